"""Fitting documents to the sequence length, so that nothing is lost unseen.

* Plain text is split into windows that overlap by one token, so that every token but the first is predicted exactly
  once, and EOS once, in the last window.
* A chat is cut after the last whole assistant turn that fits: what remains ends as the model shall end.
* If not even the first assistant turn fits, or the row is a plain prompt and response, the head of the row is kept. Its
  missing end is counted, and no end is invented.
* What then has no supervised token left is dropped and counted: its loss would be 0/0.
"""

from __future__ import annotations

from typing import NamedTuple

from npurt.data.encoding import Document
from npurt.data.options import Overlong
from npurt.data.template import Span


class Fitted(NamedTuple):
    """What of a document is trained on: ranges of its tokens, and what was done to it.

    No ranges: the row is dropped, and `why` says for what reason.
    """

    pieces: list[Span]
    cut: bool = False
    end_lost: bool = False
    why: str = ""


def fit(document: Document, seq_len: int, overlong: Overlong) -> Fitted:
    """Fit a document into `seq_len` tokens. With `error`, the caller refuses what has a `why` and is too long."""
    length = len(document.tokens)
    if length <= seq_len:
        whole = (0, length)
        return Fitted([whole]) if count_supervised(document, whole) else Fitted([], why="no supervised token")
    if overlong != "cut":
        return Fitted([], why=f"{length:,} tokens, the sequence has {seq_len:,}")
    if document.splits:
        windows = [(start, min(start + seq_len, length)) for start in range(0, length - 1, seq_len - 1)]
        return Fitted(windows)
    end = max((end for end in document.turn_ends if end <= seq_len), default=None)
    kept = (0, seq_len if end is None else end)
    if not count_supervised(document, kept):
        return Fitted([], why=f"no supervised token within {seq_len:,} tokens")
    return Fitted([kept], cut=True, end_lost=end is None)


def count_supervised(document: Document, piece: Span) -> int:
    """Tokens of a piece that are predicted: the supervised ones without the piece's first."""
    start, end = piece
    return sum(max(0, min(past, end) - max(first, start + 1)) for first, past in document.supervised)
