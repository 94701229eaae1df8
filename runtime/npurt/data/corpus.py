"""All documents as flat arrays, the form in which a hundred thousand of them cost little to hold and to pack."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from npurt.data.encoding import Document
from npurt.data.faults import FAULTS_SHOWN, Faults
from npurt.data.fitting import fit
from npurt.data.options import Overlong
from npurt.data.template import Span
from npurt.errors import DataError

Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]

IGNORED = -100
"""The label of a position whose next token is not to be predicted."""


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Tokenized documents, one behind the other.

    tokens -- int32 (N,)
    labels -- int32 (N,): at each position the token that follows in the same document if it is supervised, else
        `IGNORED`.
    bounds -- int64 (D + 1,): document d is `tokens[bounds[d]:bounds[d + 1]]`.
    sample -- the first document and the part of it that is trained on, for the preview.
    notes -- why rows were dropped, for the first of them: "train.jsonl:17: no supervised token within 128 tokens".
    """

    tokens: Int32
    labels: Int32
    bounds: Int64
    sample: tuple[Document, Span]
    rows_cut: int
    rows_split: int
    rows_dropped: int
    ends_lost: int
    turns_without_end: int
    notes: tuple[str, ...]

    @property
    def lengths(self) -> Int64:
        """Tokens of each document, int64 (D,)."""
        return np.diff(self.bounds)

    def digest(self) -> str:
        """sha256 of tokens, labels and bounds: equal for equal training data, whatever files it came from."""
        state = hashlib.sha256()
        for values, kind in ((self.bounds, "<i8"), (self.tokens, "<i4"), (self.labels, "<i4")):
            state.update(np.ascontiguousarray(values, dtype=kind).data)
        return "sha256:" + state.hexdigest()


def collect(documents: Iterable[Document], seq_len: int, overlong: Overlong) -> Corpus:
    """Fit the documents to the sequence length and lay them out flat.

    Raises `DataError` if nothing is left to learn, or (with `overlong="error"`) if rows are too long.
    """
    tokens, supervised, bounds = array("i"), bytearray(), array("q", [0])
    sample: tuple[Document, Span] | None = None
    cut = split = dropped = ends_lost = open_turns = 0
    notes: list[str] = []
    faults = Faults()
    for document in documents:
        fitted = fit(document, seq_len, overlong)
        if not fitted.pieces:
            dropped += 1
            if len(notes) < FAULTS_SHOWN:
                notes.append(f"{document.place}: {fitted.why}")
            if overlong == "error" and len(document.tokens) > seq_len:
                faults.add(str(document.place), fitted.why)
            continue
        cut += fitted.cut
        split += len(fitted.pieces) > 1
        ends_lost += fitted.end_lost
        open_turns += document.open_turns
        flags = bytearray(len(document.tokens))
        for first, past in document.supervised:
            flags[first:past] = b"\1" * (past - first)
        for start, end in fitted.pieces:
            tokens.extend(document.tokens[start:end])
            supervised += flags[start:end]
            bounds.append(len(tokens))
        sample = sample or (document, fitted.pieces[0])
    faults.stop_if_any(
        "rows are longer than the sequence", "build with a larger --seq-len, or train with --overlong cut"
    )
    if sample is None:
        raise DataError(
            f"none of the {dropped:,} rows has a supervised token within {seq_len:,} tokens",
            where=notes[0] if notes else None,
            remedy="build with a larger --seq-len, or shorten the prompts",
        )
    flat = np.array(tokens, dtype=np.int32)
    ends = np.array(bounds, dtype=np.int64)
    return Corpus(
        tokens=flat,
        labels=_labels(flat, np.frombuffer(supervised, dtype=np.bool_), ends),
        bounds=ends,
        sample=sample,
        rows_cut=cut,
        rows_split=split,
        rows_dropped=dropped,
        ends_lost=ends_lost,
        turns_without_end=open_turns,
        notes=tuple(notes),
    )


def _labels(tokens: Int32, supervised: NDArray[np.bool_], bounds: Int64) -> Int32:
    """Labels of next-token prediction: never across the border of a document."""
    predicted = supervised.copy()
    predicted[bounds[:-1]] = False
    labels = np.full_like(tokens, IGNORED)
    targets = np.flatnonzero(predicted)
    labels[targets - 1] = tokens[targets]
    return labels
