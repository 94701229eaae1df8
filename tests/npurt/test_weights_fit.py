"""Weights that belong to another bundle are refused with all that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npurt.errors import MismatchError
from npurt.weights import Checkpoint
from npurt.weights_fit import check_fit
from tests.npurt import toy_bundle as toy

HEAD = "lm_head.weight"


def problems(folder: Path) -> dict[str, str]:
    try:
        check_fit(Checkpoint.open(folder), toy.program(), toy.MODEL)
    except MismatchError as error:
        return {problem.where: problem.what for problem in error.problems}
    return {}


def test_the_right_weights_fit(tmp_path: Path) -> None:
    assert problems(toy.write_weights(tmp_path / "m")) == {}


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    tensors: dict[str, Any] = toy.weights()
    del tensors["layers.1.w"]
    tensors["layers.0.w"] = tensors["layers.0.w"][:3]
    tensors[toy.EMBEDDING] = tensors[toy.EMBEDDING].astype(np.int32)
    tensors["layers.2.w"] = np.ones((4, 4), np.float32)
    folder = toy.write_weights(
        tmp_path / "m",
        tensors,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        tie_word_embeddings=False,
    )
    found = problems(folder)
    assert set(found) == {
        "config.json: rms_norm_eps",
        "config.json: rope_parameters",
        "config.json: tie_word_embeddings",
        "layers.0.w",
        "layers.1.w",
        "layers.2.w",
        toy.EMBEDDING,
    }
    assert found["layers.0.w"] == "has shape [3, 4]; the bundle was built for [4, 4]"
    assert found["layers.1.w"].startswith("is missing")
    assert "I32" in found[toy.EMBEDDING]
    assert "another model" in found["layers.2.w"]


def test_spellings_of_the_same_configuration_do_not_differ(tmp_path: Path) -> None:
    folder = toy.write_weights(tmp_path / "m", rope_parameters=None, rope_theta=10000.0, head_dim=None)
    assert problems(folder) == {}


def test_tables_that_are_computed_anew_are_ignored(tmp_path: Path) -> None:
    tensors = toy.weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    assert problems(toy.write_weights(tmp_path / "m", tensors)) == {}


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        (toy.weights()[toy.EMBEDDING], None),
        (toy.weights()[toy.EMBEDDING] * 2, "differs"),
        (toy.weights()[toy.EMBEDDING].astype(np.float16), "differs"),
        (toy.weights()[toy.EMBEDDING].astype(np.int8), "differs"),
    ],
    ids=["equal", "other values", "other dtype", "no float"],
)
def test_a_tied_head_must_be_the_embedding(tmp_path: Path, head: Any, fault: str | None) -> None:
    found = problems(toy.write_weights(tmp_path / "m", toy.weights() | {HEAD: head}))
    assert list(found) == ([] if fault is None else [HEAD])
    assert fault is None or fault in found[HEAD]
