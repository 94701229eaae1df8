"""From a packed sequence to the inputs of a program: supervised positions gathered into blocks of fixed size.

Programs have static shapes, and the number of supervised positions varies from pack to pack. So the head works on
blocks of n rows and is called as often as there are used blocks:

    labels  [ .  7  .  3  9  . ]   n = 2, B = 3      rows    [[1 3] [4 0] [0 0]]
                                                     labels  [[7 3] [9 0] [0 0]]
    blocks  2                                        weights [[1 1] [1 0] [0 0]]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npubundle.program import Program
from npurt.data import IGNORED, Pack
from npurt.engine import Array
from npurt.errors import DataError, MismatchError


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a program's inputs: tokens of a sequence, blocks of supervised rows, rows of a block, vocabulary."""

    seq_len: int
    blocks: int
    rows: int
    vocabulary: int

    @classmethod
    def of(cls, program: Program, vocabulary: int) -> Layout:
        """The layout that the program's input buffers have."""
        blocks, rows = program.buffers["rows"].type.shape
        return cls(program.buffers["tokens"].type.shape[0], blocks, rows, vocabulary)


def program_inputs(pack: Pack, layout: Layout) -> dict[str, Array]:
    """The input buffers `tokens`, `positions`, `segments`, `rows`, `labels`, `weights` and `blocks` of one pack.

    Raises `MismatchError` for a pack of another sequence length or with tokens beyond the vocabulary, and `DataError`
    for one with more supervised positions than the blocks hold.
    """
    if pack.tokens.shape != (layout.seq_len,):
        raise MismatchError(
            f"the pack has {len(pack.tokens)} tokens, the bundle's sequences have {layout.seq_len}",
            remedy="load the data with the sequence length of the bundle",
        )
    largest = int(pack.tokens.max(initial=0))
    if largest >= layout.vocabulary or int(pack.tokens.min(initial=0)) < 0:
        raise MismatchError(
            f"the data has token {largest}, the model's vocabulary has {layout.vocabulary}",
            remedy="take tokenizer and weights from the same release of the model",
        )
    positions = np.flatnonzero(pack.labels != IGNORED)
    count, capacity = len(positions), layout.blocks * layout.rows
    if count > capacity:
        raise DataError(f"the pack has {count} supervised positions, the program has room for {capacity}")
    return {
        "tokens": pack.tokens,
        "positions": pack.positions,
        "segments": pack.segments,
        "rows": _blocks(positions, layout, np.int32),
        "labels": _blocks(pack.labels[positions], layout, np.int32),
        "weights": _blocks(np.ones(count), layout, np.float32),
        "blocks": np.array(max(1, -(-count // layout.rows)), dtype=np.int32),
    }


def _blocks(values: Array, layout: Layout, dtype: type[np.generic]) -> Array:
    """Values in order, then zeros, as (blocks, rows)."""
    padded = np.zeros(layout.blocks * layout.rows, dtype=dtype)
    padded[: len(values)] = values
    return padded.reshape(layout.blocks, layout.rows)
