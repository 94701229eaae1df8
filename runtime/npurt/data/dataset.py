"""Packed training data: loaded once, handed out pack by pack, resumable at any of them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from npubundle.errors import Problem
from npurt.data.corpus import IGNORED, Corpus, collect
from npurt.data.encoding import encode_rows
from npurt.data.jsonl import read_rows
from npurt.data.options import Counts, DataOptions
from npurt.data.packing import (
    Pack,
    PackPlan,
    build_pack,
    epoch_order,
    plan_alone,
    plan_best_fit,
    plan_in_sequence,
)
from npurt.data.preview import preview
from npurt.data.rows import TextRow
from npurt.data.template import ChatTemplate
from npurt.data.tokens import Tokenizer
from npurt.errors import MismatchError, UsageError

_SHORTEST = 2  # with a single token there is nothing to predict


class PackedDataset:
    """Packs of one length, in an endless stream (`next_pack`) or once through in a fixed order (iteration).

    counts -- what became of the rows.
    notes -- place and reason of the first rows that were dropped.
    largest_token -- the largest id in the data; the model's vocabulary must have it.
    digest -- identifies tokens, labels, sequence length and packing; equal digest and seed, equal stream.
    """

    def __init__(
        self, corpus: Corpus, seq_len: int, options: DataOptions, tokenizer: Tokenizer, rows: int, blank: int
    ) -> None:
        self.seq_len = seq_len
        self.options = options
        self.notes = corpus.notes
        self.largest_token = int(corpus.tokens.max())
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._plan = _plan(corpus, seq_len, options)
        self.digest = f"{corpus.digest()}/{seq_len}/{_layout(options)}"
        self.counts = _count(corpus, self._plan, seq_len, rows, blank)
        self._epoch = self._index = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Packs in one epoch."""
        return len(self._plan)

    def __iter__(self) -> Iterator[Pack]:
        """Every pack once, always in the same order, whatever the stream's position: for evaluation."""
        return (self._build(number) for number in range(len(self)))

    def next_pack(self) -> Pack:
        """The next pack of the endless stream; after the last of an epoch, the first of the next."""
        if self._index == len(self):
            self._epoch, self._index = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        self._index += 1
        return self._build(int(self._order[self._index - 1]))

    @property
    def epochs_done(self) -> float:
        """Epochs that the stream has handed out, as a fraction: 1.5 is half-way through the second."""
        return self._epoch + self._index / len(self)

    def state(self) -> dict[str, str | int]:
        """The stream's position, fit for JSON: after `restore`, `next_pack` gives the pack that it would give now."""
        clock = self.options.clock
        return {
            "epoch": self._epoch,
            "index": self._index,
            "seed": self.options.seed,
            "digest": self.digest,
            "clock": clock.isoformat() if clock else "",
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue where `state` was taken.

        Raises `MismatchError` if it was taken from other data, another seed or sequence length, or is no state at all;
        the stream then stays where it is. Where a template writes the date, load with the `clock` of the state.
        """
        epoch, index = state.get("epoch"), state.get("index")
        problems = [
            Problem(name, f"{state.get(name)!r} was saved, this is {mine!r}")
            for name, mine in (("seed", self.options.seed), ("digest", self.digest))
            if state.get(name) != mine
        ]
        if not isinstance(epoch, int) or epoch < 0:
            problems.append(Problem("epoch", f"{epoch!r} is no epoch"))
        if not isinstance(index, int) or not 0 <= index <= len(self):
            problems.append(Problem("index", f"{index!r} is no position among {len(self)} packs"))
        if problems or not isinstance(epoch, int) or not isinstance(index, int):
            raise MismatchError(
                "the saved data position does not belong to this data",
                problems=problems,
                remedy="resume with the data files, seed, sequence length and data options of the first run",
            )
        self._epoch, self._index = epoch, index
        self._order = self._order_of(epoch)

    def preview(self, *, color: bool = False) -> str:
        """The first row as the model will see it, its supervised tokens in ⟦ ⟧, and the counts as the last line."""
        return f"{preview(*self._corpus.sample, self._tokenizer, color=color)}\n{self.counts}"

    def _order_of(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if not self.options.shuffle:
            return np.arange(len(self))
        return epoch_order(len(self), self.options.seed, epoch)

    def _build(self, number: int) -> Pack:
        start, end = self._plan.bounds[number : number + 2]
        return build_pack(self._corpus, self._plan.members[start:end], self.seq_len)


def load(
    paths: str | Path | Sequence[str | Path], model_dir: str | Path, seq_len: int, options: DataOptions | None = None
) -> PackedDataset:
    """Read, render, tokenize and pack JSON Lines files.

    `model_dir` is a Hugging Face model folder; its tokenizer.json, tokenizer_config.json and chat template are read.
    Raises `DataError` for files, rows and templates that will not do (up to 20 rows at once), `UsageError` for options.
    """
    options = options or DataOptions()
    if seq_len < _SHORTEST:
        raise UsageError(f"a sequence has at least {_SHORTEST} tokens, not {seq_len}")
    if options.clock is None:
        now = dt.datetime.now()  # noqa: DTZ005 -- local time without a zone, as the reference
        options = dataclasses.replace(options, clock=now)
    files = [paths] if isinstance(paths, str | Path) else paths
    if not files:
        raise UsageError("no data files are given")
    found = read_rows([Path(path) for path in files])
    folder = Path(model_dir)
    tokenizer = Tokenizer.from_folder(folder)
    template = None
    if options.clock and options.template != "plain" and not all(isinstance(row, TextRow) for row in found.rows):
        template = ChatTemplate.from_folder(folder, tokenizer.special_tokens, options.clock)
    corpus = collect(encode_rows(found.rows, tokenizer, template, options), seq_len, options.overlong)
    return PackedDataset(corpus, seq_len, options, tokenizer, len(found.rows), found.blank_lines)


def _plan(corpus: Corpus, seq_len: int, options: DataOptions) -> PackPlan:
    if not options.pack:
        return plan_alone(corpus.lengths)
    if not options.shuffle:
        return plan_in_sequence(corpus.lengths, seq_len)
    return plan_best_fit(corpus.lengths, seq_len)


def _layout(options: DataOptions) -> str:
    """The options that decide which documents share a pack, and in which order packs come, for the digest."""
    return f"{'packed' if options.pack else 'alone'}-{'shuffled' if options.shuffle else 'in-order'}"


def _count(corpus: Corpus, plan: PackPlan, seq_len: int, rows: int, blank_lines: int) -> Counts:
    return Counts(
        rows=rows,
        blank_lines=blank_lines,
        documents=len(corpus.lengths),
        packs=len(plan),
        capacity=len(plan) * seq_len,
        tokens=len(corpus.tokens),
        supervised_tokens=int(np.count_nonzero(corpus.labels != IGNORED)),
        rows_cut=corpus.rows_cut,
        rows_split=corpus.rows_split,
        rows_dropped=corpus.rows_dropped,
        ends_lost=corpus.ends_lost,
        turns_without_end=corpus.turns_without_end,
    )
