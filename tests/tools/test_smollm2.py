"""The test model's folder is what transformers and a published checkpoint would have it be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "smollm2.py"


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, SCRIPT],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_stdout_is_the_folder_alone(smollm2_dir: Path) -> None:
    assert run().stdout == f"{smollm2_dir}\n"


def test_a_finished_folder_costs_no_import_outside_the_standard_library(smollm2_dir: Path) -> None:
    done = run("-I", "-S")  # without site-packages
    assert done.returncode == 0
    assert done.stdout == f"{smollm2_dir}\n"


def test_a_failed_download_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run(NPUCC_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "cannot make" in done.stderr
    assert list((tmp_path / "models").iterdir()) == []


def test_config_is_spelt_like_a_published_one(smollm2_dir: Path) -> None:
    config = json.loads((smollm2_dir / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["torch_dtype"] == "bfloat16"
    assert config["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-05
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]


@pytest.mark.parametrize(
    "text", ["12 apples cost 3.50 €\n\n  indented", " Zürich, 東京 😀", "<|im_start|>user\nhi<|im_end|>"]
)
def test_tokenizer_keeps_text_and_splits_digits(smollm2_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert all(len(token) == 1 for token in encoded.tokens if any(character.isdigit() for character in token))


def test_transformers_answers_a_question_with_it(smollm2_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\nThe capital of France is Paris.<|im_end|>"
    )
