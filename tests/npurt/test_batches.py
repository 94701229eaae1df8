from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npurt import DataError, MismatchError, Pack
from npurt.batches import Layout, program_inputs
from tests.npurt.simulator import BLOCKS, ROWS, VOCABULARY, S, random_pack, simulated_program

LAYOUT = Layout(S, BLOCKS, ROWS, VOCABULARY)


def labelled(*positions: int) -> Pack:
    pack = random_pack(1)
    labels = np.full(S, -100, np.int32)
    labels[list(positions)] = np.arange(len(positions)) + 5
    return Pack(pack.tokens, pack.positions, pack.segments, labels)


def test_layout_is_read_from_the_program() -> None:
    assert Layout.of(simulated_program(), VOCABULARY) == LAYOUT


def test_rows_are_gathered_into_blocks() -> None:
    inputs = program_inputs(labelled(1, 3, 4, 9, 15), LAYOUT)
    assert inputs["rows"].tolist() == [[1, 3, 4, 9], [15, 0, 0, 0], [0] * 4, [0] * 4]
    assert inputs["labels"].tolist() == [[5, 6, 7, 8], [9, 0, 0, 0], [0] * 4, [0] * 4]
    assert inputs["weights"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [0] * 4, [0] * 4]
    assert inputs["blocks"] == 2


@given(st.sets(st.integers(0, S - 1)))
def test_every_label_arrives_once_and_nothing_else(positions: set[int]) -> None:
    pack = labelled(*sorted(positions))
    inputs = program_inputs(pack, LAYOUT)
    used = int(inputs["blocks"])
    assert used == max(1, -(-len(positions) // ROWS))
    real = inputs["weights"].ravel() == 1
    assert inputs["rows"].ravel()[real].tolist() == sorted(positions)
    assert inputs["labels"].ravel()[real].tolist() == pack.labels[sorted(positions)].tolist()
    assert inputs["weights"].sum() == len(positions) == inputs["weights"][:used].sum()
    assert not inputs["rows"].ravel()[~real].any()


def test_types_are_the_program_s() -> None:
    program = simulated_program()
    for name, value in program_inputs(random_pack(3), LAYOUT).items():
        kind = program.buffers[name].type
        assert value.shape == kind.shape
        assert value.dtype == {"i32": np.int32, "f32": np.float32}[kind.dtype]


def test_pack_of_another_length() -> None:
    with pytest.raises(MismatchError, match="16 tokens, the bundle's sequences have 32"):
        program_inputs(random_pack(1), Layout(32, BLOCKS, ROWS, VOCABULARY))


def test_token_beyond_the_vocabulary() -> None:
    pack = random_pack(1)
    pack.tokens[2] = VOCABULARY
    with pytest.raises(MismatchError, match="token 48"):
        program_inputs(pack, LAYOUT)


def test_more_rows_than_fit() -> None:
    with pytest.raises(DataError, match="15 supervised"):
        program_inputs(random_pack(1), Layout(S, 2, 4, VOCABULARY))
