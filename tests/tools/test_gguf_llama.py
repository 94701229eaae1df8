"""The row order of GGUF's query and key projections, undone."""

from __future__ import annotations

import gguf_llama
import numpy as np
from hypothesis import given
from hypothesis import strategies as st


@given(heads=st.integers(1, 5), half=st.integers(1, 8), columns=st.integers(1, 4))
def test_unpermute_brings_pairs_back_to_halves(heads: int, half: int, columns: int) -> None:
    straight = np.arange(heads * 2 * half * columns).reshape(heads, 2, half, columns)
    interleaved = straight.swapaxes(1, 2).reshape(-1, columns)  # row 2i is row i, row 2i + 1 is row i + half
    np.testing.assert_array_equal(gguf_llama.unpermute(interleaved, heads), straight.reshape(-1, columns))


def test_unpermute_of_one_head_by_hand() -> None:
    interleaved = np.array([[0], [2], [1], [3]])
    assert gguf_llama.unpermute(interleaved, 1).ravel().tolist() == [0, 1, 2, 3]
