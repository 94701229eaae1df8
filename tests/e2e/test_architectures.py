"""Small random models of every supported variant: the gradients of a built bundle against transformers with PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft_reference import Lora, Reference, attention_mask

from npurt import Pack
from npurt.data import IGNORED
from tests.e2e.bundles import Workshop
from tests.e2e.comparison import gradients, opened, random_parameters, require_close

SEQ_LEN = 48
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
WINDOW = 5


@dataclass(frozen=True, slots=True)
class Variant:
    """A model to make: configuration, what changes in the written `config.json`, LoRA targets, dtype of the file."""

    config: Callable[[], Any]
    targets: tuple[str, ...]
    rank: int = 4
    alpha: float = 6.0
    dtype: torch.dtype = torch.float32
    respell: Callable[[dict[str, Any]], None] | None = None


def _llama3() -> Any:
    """Untied head, llama3 RoPE, grouped heads, and a vocabulary that no block size divides."""
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return LlamaConfig(**SMALL, vocab_size=1009, num_key_value_heads=2, tie_word_embeddings=False, rope_parameters=rope)


def _llama2() -> Any:
    """Tied head, linear RoPE scaling, one key and value head per query head, a head_dim of its own."""
    from transformers import LlamaConfig

    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    return LlamaConfig(
        **SMALL, vocab_size=320, num_key_value_heads=4, head_dim=24, tie_word_embeddings=True, rope_parameters=rope
    )


def _mistral() -> Any:
    """A window shorter than the documents."""
    from transformers import MistralConfig

    return MistralConfig(
        **SMALL, vocab_size=777, num_key_value_heads=1, sliding_window=WINDOW, tie_word_embeddings=False
    )


def _old_spelling(config: dict[str, Any]) -> None:
    """As transformers wrote it before version 5."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope


VARIANTS = {
    "llama3-untied-all-targets": Variant(
        _llama3, ("q", "k", "v", "o", "gate", "up", "down"), dtype=torch.bfloat16, respell=_old_spelling
    ),
    "llama2-linear-rope": Variant(_llama2, ("o", "down"), rank=1, alpha=1.0, respell=_old_spelling),
    "llama2-new-spelling": Variant(_llama2, ("k", "gate")),
    "mistral-sliding-window": Variant(_mistral, ("q", "v"), dtype=torch.float16),
}


def write_model(folder: Path, variant: Variant) -> Path:
    """A model with random weights, large enough that attention is far from uniform, in several files."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(variant.config()).to(variant.dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 else 0.15
            parameter.copy_(torch.randn(parameter.shape) * scale + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if variant.respell:
        variant.respell(config)
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def random_pack(vocabulary: int, seed: int) -> Pack:
    """Three documents and padding; a third of the tokens has no label."""
    rng = np.random.default_rng(seed)
    lengths = [20, 9, 13]
    tokens = rng.integers(0, vocabulary, SEQ_LEN).astype(np.int32)
    segments = np.repeat([1, 2, 3, 0], [*lengths, SEQ_LEN - sum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in [*lengths, 0]] + [np.zeros(SEQ_LEN - sum(lengths))])
    labels = np.full(SEQ_LEN, IGNORED, dtype=np.int32)
    inside = (segments[:-1] == segments[1:]) & (segments[:-1] > 0) & (rng.random(SEQ_LEN - 1) > 1 / 3)
    labels[:-1][inside] = tokens[1:][inside]
    return Pack(tokens, positions.astype(np.int32), segments, labels)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_and_log_probabilities(name: str, workshop: Workshop, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    folder = write_model(tmp_path / "model", variant)
    built = workshop.build(
        folder, "--seq-len", str(SEQ_LEN), "--rank", str(variant.rank), "--alpha", str(variant.alpha),
        "--targets", ",".join(variant.targets),
    )  # fmt: skip
    reference = Reference.create(folder, Lora(variant.rank, variant.alpha, variant.targets))
    packs = [random_pack(reference.model.config.vocab_size, seed) for seed in (1, 2)]
    with opened(built, folder) as (trainer, session):
        parameters = random_parameters(trainer, seed=3, scale=0.2)
        trainer.set_parameters(parameters)
        reference.set_parameters(parameters)
        loss, found = gradients(trainer, session, packs)
        expected_loss, expected = reference.gradients(packs)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        require_close(found, expected, cosine=0.99999, norm=1e-4)
        np.testing.assert_allclose(trainer.logprobs(packs[0]), reference.logprobs(packs[0]), rtol=0, atol=1e-4)
        adapter = trainer.save_adapter(tmp_path / "adapter")
    reloaded = Reference.load(folder, adapter)
    np.testing.assert_allclose(reloaded.logprobs(packs[0]), reference.logprobs(packs[0]), rtol=0, atol=1e-6)


def test_the_mask_of_a_sliding_window_is_that_of_transformers(tmp_path: Path) -> None:
    variant = VARIANTS["mistral-sliding-window"]
    folder = write_model(tmp_path / "model", variant)
    reference = Reference.create(folder, Lora(variant.rank, variant.alpha, variant.targets))
    tokens = torch.from_numpy(random_pack(777, 1).tokens.astype(np.int64))[None]
    pack = Pack(*(np.zeros(SEQ_LEN, np.int32), np.arange(SEQ_LEN, dtype=np.int32)), *(np.ones(SEQ_LEN, np.int32),) * 2)
    with torch.no_grad():
        theirs = reference.model(input_ids=tokens).logits  # masks by itself
        ours = reference.model(input_ids=tokens, attention_mask=attention_mask(pack, WINDOW)).logits
        unlimited = reference.model(input_ids=tokens, attention_mask=attention_mask(pack)).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert (unlimited - theirs).abs().max() > 0.01, "the window makes no difference here"
