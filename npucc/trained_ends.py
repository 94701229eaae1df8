"""Calls that add up the gradients of what is trained outside the layers: final norm, embeddings, output matrix.

Parts add to these gradients in place, block by block of supervised rows and slice by slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from npubundle.program import Call
from npucc.trained_state import MakesCalls
from npucc.training.head import HeadShape


class TrainedEnds:
    """`trained` has those of the buffers `norm`, `embed` and `head` that are; `matrix` is the one logits come from."""

    def __init__(self, trained: frozenset[str], head: HeadShape, matrix: str, call: MakesCalls) -> None:
        self.trained = trained
        self.matrix = matrix
        self._slices = tuple(enumerate(stop - start for start, stop in head.slices))
        self._call = call

    def zeroed(self) -> Iterator[Call]:
        """What the first micro-step of an optimizer step begins with."""
        if "norm" in self.trained:
            yield self._call("zeros.norm", [], ["grad.norm"])
        for name in sorted(self.trained - {"norm"}):
            for number, width in self._slices:
                yield self._call(f"zeros.{width}", [], [f"grad.{name}.{number}"])

    def of_block(self, rows: Sequence[str], weights: str, sums: Sequence[str]) -> Iterator[Call]:
        """A block's share; `sums` are `top`, `total` and `mixed` after the last slice."""
        if "norm" in self.trained:
            yield self._call("head.norm", [*rows, weights, "label_rows[]", *sums[1:], "grad.norm"], ["grad.norm"])
        yield from self._of_matrix("head.gradient", [*sums[:2], "labels[]"], [weights])

    def of_reference_block(self, rows: Sequence[str], lse: str, dx: str) -> Iterator[Call]:
        """The same in the reference program."""
        if "norm" in self.trained:
            yield self._call("reference.norm", [*rows, "weights[]", dx, "grad.norm"], ["grad.norm"])
        yield from self._of_matrix("reference.gradient", ["labels[]"], [lse, "weights[]"])

    def _of_matrix(self, part: str, before: Sequence[str], after: Sequence[str]) -> Iterator[Call]:
        for number, width in self._slices if self.matrix in self.trained else ():
            grad = f"grad.{self.matrix}.{number}"
            args = ["hx", f"head.{number}", *before, f"head.{number}.start", *after, grad]
            yield self._call(f"{part}.{width}", args, [grad])

    def of_embeddings(self, dx: str) -> Iterator[Call]:
        """At the end of the backward pass, whose last gradient is `dx`."""
        for number, width in self._slices if "embed" in self.trained else ():
            grad = f"grad.embed.{number}"
            yield self._call(f"embed.gradient.{width}", ["tokens", f"head.{number}.start", dx, grad], [grad])
