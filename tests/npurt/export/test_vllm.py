"""What vLLM's loader asks of an adapter, checked on what is about to be written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npurt import MismatchError
from npurt.export import peft, vllm
from tests.npurt.simulator import ALPHA, HIDDEN, MODULES, RANK, VOCABULARY, tensor_name

SHAPES: dict[str, tuple[int, ...]] = {
    tensor_name(module, matrix): shape
    for module in MODULES
    for matrix, shape in (("A", (RANK, HIDDEN)), ("B", (VOCABULARY, RANK)))
}
CARD = peft.AdapterCard.of(SHAPES, rank=RANK, alpha=ALPHA, base="models/llama")
FIRST, SECOND = sorted(SHAPES)[:2]


def faults(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    with pytest.raises(MismatchError, match="vLLM would not load") as caught:
        vllm.require_servable(config, shapes)
    return {problem.where: problem.what for problem in caught.value.problems}


def test_what_npurt_writes_keeps_the_rules() -> None:
    vllm.require_servable(CARD.to_dict(), SHAPES)


@pytest.mark.parametrize(
    "change",
    [
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"peft_type": "LOHA"},
        {"lora_bias": False},
        {"rank_pattern": {}},
        {"r": 0},
        {"r": 2.0},
        {"r": True},
    ],
    ids=str,
)
def test_settings_it_refuses(change: dict[str, Any]) -> None:
    found = faults(CARD.to_dict() | change, SHAPES)
    assert change.keys() <= found.keys()


@pytest.mark.parametrize("key", ["r", "lora_alpha", "target_modules", "peft_type"])
def test_keys_it_needs(key: str) -> None:
    config = CARD.to_dict()
    del config[key]
    assert faults(config, SHAPES)[key] == "is missing"


@pytest.mark.parametrize(
    "name",
    [
        FIRST.removeprefix("base_model."),
        f"base_model.{FIRST}",
        FIRST.replace(".weight", ".default.weight"),
        FIRST.replace(".lora_A", ".base_layer.lora_A"),
        FIRST.replace(".lora_A.weight", ".lora_magnitude_vector"),
        "base_model.model.lora_A.weight",
        "base_model.model.lm_head.modules_to_save.weight",
    ],
)
def test_names_it_does_not_know(name: str) -> None:
    shapes = {name if key == FIRST else key: shape for key, shape in SHAPES.items()}
    found = faults(CARD.to_dict(), shapes)
    assert name in found


def test_matrices_without_their_other_half_of_other_ranks_or_modules() -> None:
    shapes = SHAPES | {SECOND: (VOCABULARY, RANK + 1)}
    del shapes[FIRST]
    found = faults(CARD.to_dict() | {"target_modules": ["v_proj"]}, shapes)
    module = FIRST.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    assert found[module] == "has no lora_A"
    assert SECOND in found
    assert faults(CARD.to_dict(), {}) == {"tensors": "there are none"}


def test_no_adapter_is_written_against_the_rules() -> None:
    tensors = {name.removeprefix("base_model.model."): np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    with pytest.raises(MismatchError, match="vLLM would not load") as caught:
        peft.adapter_files(tensors, CARD)
    assert "rebuild the bundle" in str(caught.value.remedy)


def test_ranks_it_has_no_setting_for() -> None:
    assert all(vllm.rank_note(rank) is None for rank in vllm.VLLM_RANKS)
    assert "--max-lora-rank 32" in str(vllm.rank_note(24))
    assert "above 512" in str(vllm.rank_note(1024))
