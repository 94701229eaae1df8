"""The check of gradients passes a right program and fails a wrong one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npurt.bundle import Bundle
from npurt.data import IGNORED, Pack
from npurt.errors import MismatchError
from npurt.gradient_check import Agreement, check_gradients, random_inputs
from tests.npurt import toy_bundle as toy


@pytest.mark.parametrize("layers", [1, 2, None])
def test_a_right_program_agrees_with_its_reference(tmp_path: Path, layers: int | None) -> None:
    path, key = toy.write_bundle(tmp_path)
    with Bundle.open(path, key) as bundle:
        report = check_gradients(bundle, toy.write_weights(tmp_path / "m"), layers=layers)
    assert report.good
    assert report.loss == pytest.approx(report.reference_loss)
    assert [tensor.tensor for tensor in report.tensors] == ["layers.0.s", "layers.1.s"][: layers or 2]
    assert all(tensor.cosine == pytest.approx(1) for tensor in report.tensors)


def test_a_sequence_of_ones_own(tmp_path: Path) -> None:
    tokens = np.arange(toy.S, dtype=np.int32) % toy.V
    labels = np.append(tokens[1:], np.int32(IGNORED))
    pack = Pack(tokens, np.arange(toy.S, dtype=np.int32), np.ones(toy.S, np.int32), labels)
    path, key = toy.write_bundle(tmp_path)
    weights = toy.write_weights(tmp_path / "m")
    with Bundle.open(path, key) as bundle:
        report, other = check_gradients(bundle, weights, pack=pack), check_gradients(bundle, weights)
        assert report.good
        assert report.loss != pytest.approx(other.loss)
        short = Pack(*(part[:-1] for part in (pack.tokens, pack.positions, pack.segments, pack.labels)))
        with pytest.raises(MismatchError, match="tokens"):
            check_gradients(bundle, weights, pack=short)


def test_a_wrong_gradient_is_found(tmp_path: Path) -> None:
    path, key = toy.write_bundle(tmp_path, backward="wrong")
    with Bundle.open(path, key) as bundle:
        report = check_gradients(bundle, toy.write_weights(tmp_path / "m"))
    assert not report.good
    assert not any(tensor.good for tensor in report.tensors)


@pytest.mark.parametrize(
    ("cosine", "ratio", "good"),
    [(1, 1, True), (0.99989, 1, False), (1, 1.0011, False), (1, 0.9989, False), (np.nan, 1, False), (1, np.nan, False)],
)
def test_bounds(cosine: float, ratio: float, good: bool) -> None:
    assert Agreement("t", cosine, ratio).good == good


def test_random_inputs_supervise_what_can_be_supervised() -> None:
    inputs = random_inputs(toy.program(), toy.V, seed=1)
    rows = inputs["rows"].ravel()[inputs["weights"].ravel() == 1]
    assert len(rows) == toy.S - 2  # the last token of each of two documents has no next one
    np.testing.assert_array_equal(inputs["labels"].ravel()[: len(rows)], inputs["tokens"][rows + 1])
    assert (inputs["segments"][rows] == inputs["segments"][rows + 1]).all()
    assert inputs["blocks"] == 2
