from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npurt.data.corpus import IGNORED, collect
from npurt.data.encoding import Document
from npurt.data.faults import Place
from npurt.data.fitting import Fitted, count_supervised, fit
from npurt.errors import DataError


def document(
    length: int, supervised: list[tuple[int, int]], *, splits: bool = False, line: int = 1, **more: Any
) -> Document:
    """A document of the tokens 100, 101, …."""
    values: dict[str, Any] = {
        "place": Place("x", line),
        "tokens": list(range(100, 100 + length)),
        "supervised": supervised,
        "turn_ends": [] if splits else [past for _, past in supervised],
        "splits": splits,
        "open_turns": 0,
        "text": "",
        "offsets": [],
        "lead": 0,
    }
    return Document(**values | more)


def test_what_fits_is_left_alone() -> None:
    assert fit(document(8, [(4, 8)]), 8, "error") == Fitted([(0, 8)])


def test_a_chat_is_cut_after_the_last_whole_turn() -> None:
    chat = document(30, [(4, 8), (12, 16), (20, 30)])
    assert fit(chat, 19, "cut") == Fitted([(0, 16)], cut=True)
    assert fit(chat, 16, "cut") == Fitted([(0, 16)], cut=True)
    assert fit(chat, 15, "cut") == Fitted([(0, 8)], cut=True)


def test_a_first_turn_that_does_not_fit_keeps_its_head_and_its_lost_end_is_told() -> None:
    assert fit(document(30, [(4, 30)]), 10, "cut") == Fitted([(0, 10)], cut=True, end_lost=True)


@pytest.mark.parametrize("start", [10, 11, 25])
def test_what_has_no_supervised_token_left_is_dropped(start: int) -> None:
    fitted = fit(document(30, [(start, 30)]), 10, "cut")
    assert fitted.pieces == []
    assert fitted.why == "no supervised token within 10 tokens"


@pytest.mark.parametrize("supervised", [[], [(0, 1)], [(3, 3)]])
def test_rows_that_fit_and_teach_nothing_are_dropped(supervised: list[tuple[int, int]]) -> None:
    assert fit(document(8, supervised), 8, "cut").pieces == []


def test_drop_drops_texts_too() -> None:
    assert fit(document(1234, [(0, 1234)], splits=True), 100, "drop") == Fitted(
        [], why="1,234 tokens, the sequence has 100"
    )


@given(st.integers(2, 200), st.integers(2, 40))
def test_windows_of_a_text_predict_every_token_once(length: int, seq_len: int) -> None:
    text = document(length, [(0, length)], splits=True)
    pieces = fit(text, seq_len, "cut").pieces
    predicted = [token for start, end in pieces for token in text.tokens[start + 1 : end]]
    assert predicted == text.tokens[1:]
    assert all(2 <= end - start <= seq_len for start, end in pieces)


@given(
    st.integers(2, 60),
    st.lists(st.integers(0, 60), max_size=8, unique=True).map(sorted),
    st.integers(2, 60),
    st.booleans(),
)
def test_counts_and_labels_agree_whatever_is_cut(length: int, marks: list[int], seq_len: int, splits: bool) -> None:
    supervised = [(a, min(b, length)) for a, b in zip(marks[::2], marks[1::2], strict=False) if a < length]
    row = document(length, [(0, length)] if splits else supervised, splits=splits)
    pieces = fit(row, seq_len, "cut").pieces
    kept = document(4, [(0, 4)], line=2)  # so that something is left in any case
    corpus = collect([row, kept], seq_len=max(seq_len, 4), overlong="cut")
    if seq_len >= 4:
        expected = sum(count_supervised(row, piece) for piece in pieces) + 3
        assert np.count_nonzero(corpus.labels != IGNORED) == expected
    assert all(count_supervised(row, piece) > 0 for piece in pieces)


def test_labels_are_the_next_supervised_token_of_the_same_document() -> None:
    corpus = collect([document(5, [(2, 4)]), document(3, [(0, 3)])], 8, "cut")
    assert corpus.bounds.tolist() == [0, 5, 8]
    assert corpus.tokens.tolist() == [100, 101, 102, 103, 104, 100, 101, 102]
    assert corpus.labels.tolist() == [IGNORED, 102, 103, IGNORED, IGNORED, 101, 102, IGNORED]


def test_the_fate_of_every_row_is_counted() -> None:
    corpus = collect(
        [
            document(8, [(4, 8)], line=1),
            document(30, [(4, 8), (12, 30)], line=2, open_turns=2),
            document(30, [(4, 30)], line=3),
            document(30, [(20, 30)], line=4),
            document(25, [(0, 25)], line=5, splits=True),
            document(3, [], line=6),
        ],
        10,
        "cut",
    )
    assert len(corpus.lengths) == 3 + 3
    assert (corpus.rows_cut, corpus.rows_split, corpus.rows_dropped) == (2, 1, 2)
    assert (corpus.ends_lost, corpus.turns_without_end) == (1, 2)
    assert corpus.notes == ("x:4: no supervised token within 10 tokens", "x:6: no supervised token")
    assert corpus.sample[0].place.line == 1


def test_error_names_all_rows_that_are_too_long() -> None:
    rows = [document(9 + line % 2, [(0, 9)], line=line) for line in range(50)]
    with pytest.raises(DataError, match="25 faults, the first 20") as caught:
        collect(rows, 9, "error")
    assert str(caught.value.problems[0]) == "x:1: 10 tokens, the sequence has 9"


def test_nothing_left_to_learn_is_an_error_and_no_loss_of_zero() -> None:
    with pytest.raises(DataError, match="none of the 2 rows has a supervised token within 10 tokens"):
        collect([document(30, [(20, 30)]), document(30, [(10, 30)])], 10, "cut")


def test_the_digest_tells_data_apart() -> None:
    one = collect([document(5, [(2, 4)])], 8, "cut")
    assert one.digest() == collect([document(5, [(2, 4)], line=9)], 8, "cut").digest()
    others = [
        collect([document(5, [(2, 5)])], 8, "cut"),
        collect([document(6, [(2, 4)])], 8, "cut"),
        collect([document(5, [(2, 4)]), document(5, [(2, 4)])], 8, "cut"),
    ]
    assert len({corpus.digest() for corpus in [one, *others]}) == 4
