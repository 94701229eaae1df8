"""Forward passes over packs: log-probability and prediction of every supervised token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from npurt.batches import Layout, program_inputs
from npurt.data import IGNORED, Pack
from npurt.engine import Engine, Float32
from npurt.errors import DataError, DivergedError
from npurt.reports import EvalReport
from npurt.stop import Stop


def score(engine: Engine, pack: Pack, layout: Layout) -> tuple[Float32, int]:
    """Run `evaluate` on one pack: the log-probability of each label, f32 (supervised,), and how many were predicted."""
    inputs = program_inputs(pack, layout)
    for name, value in inputs.items():
        engine.write(name, value)
    engine.run("evaluate")
    count = pack.supervised
    # Entries of unused blocks are left over from earlier runs; the supervised rows come first.
    logprobs = np.array(engine.view("logprobs"), dtype=np.float32).ravel()[:count]
    right = engine.view("predictions").ravel()[:count] == inputs["labels"].ravel()[:count]
    return logprobs, int(np.count_nonzero(right))


def token_logprobs(engine: Engine, pack: Pack, layout: Layout) -> Float32:
    """The log-probability of every label in its place, f32 (S,); NaN where the pack has no label."""
    scores = np.full(layout.seq_len, np.nan, dtype=np.float32)
    scores[pack.labels != IGNORED] = score(engine, pack, layout)[0]
    return scores


def evaluate(engine: Engine, packs: Iterable[Pack], layout: Layout, stop: Stop) -> EvalReport:
    """Mean loss and accuracy over all supervised tokens of the packs.

    Raises `DivergedError` if a log-probability is not finite, `DataError` if the packs have no supervised token, and
    `StoppedError` between two packs.
    """
    total, right, tokens = 0.0, 0, 0
    for pack in packs:
        stop.check()
        logprobs, predicted = score(engine, pack, layout)
        total -= float(np.sum(logprobs, dtype=np.float64))
        right += predicted
        tokens += len(logprobs)
        if not np.isfinite(total):
            raise DivergedError(
                "the loss on held-out data is not finite",
                remedy="adapter or weights hold values too large for the arithmetic of the bundle; see npurt check",
            )
    if not tokens:
        raise DataError("the evaluation data has no supervised token")
    return EvalReport(loss=total / tokens, accuracy=right / tokens, tokens=tokens)
