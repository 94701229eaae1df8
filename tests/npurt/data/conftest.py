"""Small model folders, made on the spot: the tokenizers and chat templates of several families in miniature."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEMPLATES = Path(__file__).parent / "templates"

_SENTENCES = [
    "What is the capital of France? The capital of France is Paris.",
    "You are a small model. You are a careful assistant. Answer briefly.",
    "system user assistant tool [INST] [/INST] hello world, one two three",
    "Today Date: 01 Dec 2026\n\nI think so.\n\n",
] * 4
_CONTROL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
]


def byte_level() -> Tokenizer:
    """In the manner of GPT-2, Llama 3 and Qwen: bytes, and offsets from which blanks are trimmed."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=_CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_SENTENCES, trainer)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


def sentencepiece_like() -> Tokenizer:
    """In the manner of Llama 2 and Mistral: ▁ for blanks and before the text, bytes for the unknown, BOS added."""
    special = ["<unk>", "<s>", "</s>"]
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # no token reaches over a blank
    backend.train_from_iterator(_SENTENCES, trainer)
    # Only these are control tokens; the trainer made the bytes special as well.
    state = json.loads(backend.to_str())
    state["pre_tokenizer"] = None
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


_FAMILIES: dict[str, tuple[Callable[[], Tokenizer], str, str]] = {
    "chatml": (byte_level, "<|im_start|>", "<|im_end|>"),
    "qwen": (byte_level, "<|endoftext|>", "<|im_end|>"),
    "thinking": (byte_level, "<|endoftext|>", "<|im_end|>"),
    "generation": (byte_level, "<|endoftext|>", "<|im_end|>"),
    "endless": (byte_level, "<|endoftext|>", "<|endoftext|>"),
    "llama3": (byte_level, "<|begin_of_text|>", "<|eot_id|>"),
    "llama2": (sentencepiece_like, "<s>", "</s>"),
    "mistral": (sentencepiece_like, "<s>", "</s>"),
}


@pytest.fixture(scope="session")
def families() -> Sequence[str]:
    return tuple(_FAMILIES)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_folder("llama3")`: a folder with that family's tokenizer and template.

    Keywords: `template` is another template's text, or None for none; `config` adds to tokenizer_config.json;
    `change` gets the tokenizer before it is saved.
    """

    def make(
        family: str,
        *,
        template: str | None = "",
        config: dict[str, Any] | None = None,
        change: Callable[[Tokenizer], None] | None = None,
    ) -> Path:
        make_tokenizer, bos, eos = _FAMILIES[family]
        folder = tmp_path_factory.mktemp(family)
        backend = make_tokenizer()
        if change:
            change(backend)
        backend.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": eos,
            **(config or {}),
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if template == "":
            template = (TEMPLATES / f"{family}.jinja").read_text()
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """`write_rows(row, row, …)`: a JSON Lines file of these rows."""

    def write(*rows: object, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def reference() -> Callable[[Path], Any]:
    """`reference(folder)`: the tokenizer that transformers makes of the folder."""
    transformers = pytest.importorskip("transformers")

    def make(folder: Path) -> Any:
        return transformers.AutoTokenizer.from_pretrained(folder)

    return make
