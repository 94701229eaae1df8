"""A small bundle of real RNGD programs: built by the vendor's compiler, and trained with in its executor on the CPU.

No card has run any of this. The executor runs the graphs as the compiler imported them, on the host, with the bundle's
own program: parts, buffers, moves and casts are those of a card, the arithmetic is the host's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.bundles import Built, Workshop, run
from tests.e2e.comparison import losses

FLAGS = ("--seq-len", "32", "--rank", "8", "--targets", "q,v")
# Parts of the vendor's compiler take from seconds to minutes each.
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers, with a tokenizer that knows the words w0 to w199."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **shape, num_hidden_layers=2, vocab_size=256, max_position_embeddings=512, tie_word_embeddings=False
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{i}": i for i in range(200)} | {"</s>": 200, "<unk>": 201}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="module")
def bundle(rngd_python: str, workshop: Workshop, model: Path) -> Built:
    os.environ["NPUCC_RNGD_PYTHON"] = rngd_python
    try:
        return workshop.build(model, *FLAGS, "--target", "rngd", "--fusion", "1", "-j", "2")
    finally:
        del os.environ["NPUCC_RNGD_PYTHON"]


def npurt(python: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "npurt", *map(str, words)], check=False, capture_output=True, text=True, timeout=900
    )


def test_gradients_of_the_whole_program_in_the_vendors_executor(rngd_python: str, bundle: Built, model: Path) -> None:
    done = npurt(rngd_python, "check", "--bundle", bundle.path, "--trust", bundle.trust, "--weights", model,
                 "--device", "rngd-sim", "--layers", 2, "--json")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert len(report["tensors"]) == 8
    assert min(tensor["cosine"] for tensor in report["tensors"]) >= 0.999


def test_training_follows_the_cpu_target(
    rngd_python: str, bundle: Built, workshop: Workshop, model: Path, tmp_path: Path
) -> None:
    rows = [{"text": " ".join(f"w{(7 * row + word) % 200}" for word in range(25))} for row in range(12)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--weights", model, "--data", data, "--steps", 3, "--accum", 2, "--lr", "1e-2", "--seed", 1]
    cpu = workshop.build(model, *FLAGS)
    found: dict[str, list[float]] = {}
    for device, built in (("rngd-sim", bundle), ("cpu", cpu)):
        out, log = tmp_path / device, tmp_path / f"{device}.jsonl"
        done = npurt(rngd_python, "train", "--bundle", built.path, "--trust", built.trust, "--device", device,
                     "--out", out, "--log-file", log, *common)  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[device] = losses(log)
        assert (out / "adapter_model.safetensors").exists()
    assert len(found["cpu"]) == 3
    assert found["rngd-sim"] == pytest.approx(found["cpu"], rel=0.02)
    assert found["rngd-sim"][-1] < found["rngd-sim"][0]


def test_a_second_build_compiles_nothing_and_is_the_same(
    rngd_python: str, bundle: Built, workshop: Workshop, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPUCC_RNGD_PYTHON", rngd_python)
    # Variables that the vendor's compiler would heed, had it not an environment of its own.
    monkeypatch.setenv("TACTIC_SORTING_SEED", "7")
    monkeypatch.setenv("HOME", str(tmp_path))
    again = tmp_path / "again.npub"
    said = run("npucc", "build", "--model", str(model), *FLAGS, "--target", "rngd", "--fusion", "1", "--json",
               "--key", str(workshop.folder / "key"), "--cache-dir", str(workshop.folder / "cache"),
               "-o", str(again))  # fmt: skip
    result = json.loads(said)
    assert result["compiled"] == 0
    assert again.read_bytes() == bundle.path.read_bytes()


def test_the_bundle_says_what_a_step_is_estimated_to_cost(bundle: Built) -> None:
    document: dict[str, Any] = json.loads(
        run("npucc", "inspect", str(bundle.path), "--trust", str(bundle.trust), "--json")
    )
    estimate = document["estimate"]
    assert "estimate" in estimate["label"]
    assert estimate["seconds"] > 0
    layers = document["model"]["num_hidden_layers"]
    # Beside the layers: accumulation, the head's four parts.
    assert estimate["phases"]["micro_step"]["launches"] <= 16 * layers + 5
    parts = {part["name"]: part for part in document["parts"]}
    assert parts["layer.forward.save.0"]["estimate"]["cycles"] > 0
    assert parts["layer.forward.save.0"]["graph"]["size"] > 0
    assert "2026.4.0" in document["toolchain"]["furiosa-torch"]
    assert document["toolchain"]["cross-gcc"]


#: Compiles two parts as the build did and prints the digests of their programs.
ELSEWHERE = """
import json, os, sys
from pathlib import Path

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from npubundle.digest import sha256_of
from npubundle.recipe import Recipe
from npucc.models.config_reader import read_model
from npucc.parts import trace
from npucc.targets import TargetOptions, find

target = find("rngd", TargetOptions(fusion=1))
traced = trace(read_model(Path(sys.argv[1])), Recipe(seq_len=32, rank=8, targets=("q", "v")), target.CUT)
try:
    found = {name: sha256_of(target.compile_part(traced.parts[name].graph).payload) for name in sys.argv[2:]}
finally:
    target.close()
print(json.dumps(found))
"""


def test_other_cores_home_locale_and_variables_give_the_same_programs(
    rngd_python: str, bundle: Built, model: Path, tmp_path: Path
) -> None:
    names = ("layer.forward.save.2", "layer.backward.save.0", "head.end")
    shutil.copy(model / "config.json", tmp_path)
    strange = {"HOME": str(tmp_path), "LC_ALL": "tr_TR.UTF-8", "TACTIC_SORTING_SEED": "7", "NPU_ARCH": "other",
               "OMP_NUM_THREADS": "1", "TZ": "Asia/Seoul", "NPUCC_RNGD_PYTHON": rngd_python}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "config.json"), *names],
        env={"PATH": os.environ["PATH"]} | strange, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(run("npucc", "inspect", str(bundle.path), "--trust", str(bundle.trust), "--json"))
    built = {part["name"]: part["digest"] for part in document["parts"]}
    assert json.loads(done.stdout) == {name: built[name] for name in names}
