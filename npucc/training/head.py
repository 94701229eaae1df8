"""The loss: final norm, output projection and cross-entropy, in slices of the vocabulary and blocks of supervised rows.

Neither an S×V tensor nor a product of full width ever exists. For a block of rows x and the slices W₁, W₂, … of the
output matrix, one pass keeps, per row, the largest logit m so far, s = Σ exp(z − m) and a = Σ exp(z − m) · W; whenever
m grows, s and a are scaled down, as in online softmax (Milakov and Gimelshein 2018). At the end log s + m is the
log-sum-exp, and a / s − W[label] is the gradient of the loss: each slice is read once, and its logits are computed
once. The row W[label] is picked beforehand; its product with x is the label's logit.

`npucc.training.head_reference` goes another way to the same end, and `npucc.training.head_gradients` has what comes on
top where norm or output matrix are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from npubundle.model_config import ModelConfig
from npubundle.tensor import TensorType
from npucc.errors import InternalError
from npucc.graph import Graph
from npucc.graph.capture import capture
from npucc.models.layers import rms_norm
from npucc.models.products import linear, product, rounded
from npucc.passes import simplify
from npucc.targets import CutPolicy
from npucc.training.differentiate import vjp

#: Lower than every logit, and bounded.
LOWEST = -1e30

#: Blocks of fewer rows than that are only made where the sequence, or what the target can do, is smaller still.
FEWEST_ROWS = 128


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of the head: S positions, blocks of `rows` supervised rows, slices of the vocabulary (start, stop)."""

    seq_len: int
    rows: int
    slices: tuple[tuple[int, int], ...]

    @property
    def blocks(self) -> int:
        """Blocks that hold all S positions."""
        return -(-self.seq_len // self.rows)


def head_shape(config: ModelConfig, seq_len: int, *, rows: int | None, slice_width: int) -> HeadShape:
    """Blocks of at most `rows` rows (None: one block), slices of at most `slice_width` columns, as equal as can be."""
    V = config.vocab_size
    count = -(-V // slice_width)
    width = -(-V // count)
    # Every block reads the whole matrix once more; one that is half empty computes for nothing. Two blocks are between.
    rows = seq_len if rows is None else min(seq_len, rows, max(FEWEST_ROWS, seq_len // 2))
    return HeadShape(seq_len, rows, tuple((start, min(start + width, V)) for start in range(0, V, width)))


def row(shape: HeadShape, dtype: str = "f32") -> TensorType:
    """A number for each row of a block."""
    return TensorType(dtype, (shape.rows,))


def block(config: ModelConfig, shape: HeadShape) -> TensorType:
    """A vector for each row of a block."""
    return TensorType("f32", (shape.rows, config.hidden_size))


def label_rows(config: ModelConfig, shape: HeadShape, products: str) -> Graph:
    """`labels i32[B,n]`, `table [V,H]` -> `label_rows [B,n,H]`: of every label, its row of the output matrix."""
    B, n, H = shape.blocks, shape.rows, config.hidden_size

    def function(labels: torch.Tensor, table: torch.Tensor) -> Sequence[torch.Tensor]:
        return [table.index_select(0, labels.view(B * n)).view(B, n, H)]

    inputs = {"labels": TensorType("i32", (B, n)), "table": TensorType(products, (config.vocab_size, H))}
    return simplify(capture("head.labels", function, inputs, ["label_rows"]))


def places(shape: HeadShape) -> Graph:
    """`rows i32[B,n]`, `weights f32[B,n]` -> `slots i32[S]`, `used f32[S]`: where each position is among the rows.

    `used` is 1 for positions that are supervised and 0 for others, whose slot is any.
    """
    B, n, S = shape.blocks, shape.rows, shape.seq_len

    def function(rows: torch.Tensor, weights: torch.Tensor) -> Sequence[torch.Tensor]:
        named = torch.arange(S, dtype=torch.int32)[:, None] == rows.view(1, B * n)
        hit = (named & (weights.view(1, B * n) > 0)).to(torch.float32)  # (S, B * n)
        return hit.argmax(1).to(torch.int32), hit.amax(1)

    inputs = {"rows": TensorType("i32", (B, n)), "weights": TensorType("f32", (B, n))}
    return simplify(capture("head.places", function, inputs, ["slots", "used"]))


def begin(config: ModelConfig, shape: HeadShape, cut: CutPolicy) -> Graph:
    """Gather and normalise a block of rows, and start the running sums."""
    n, H = shape.rows, config.hidden_size

    def function(h: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor) -> Sequence[torch.Tensor]:
        x = rms_norm(h.index_select(0, rows), norm, config.rms_norm_eps)
        return x, torch.full((n,), LOWEST), torch.zeros(n), torch.zeros(n, H)

    inputs = normed(config, shape, cut)
    return simplify(capture("head.begin", function, inputs, ["x", "top", "total", "mixed"]))


def normed(config: ModelConfig, shape: HeadShape, cut: CutPolicy) -> dict[str, TensorType]:
    """What the rows of a block are made of."""
    H = config.hidden_size
    return {
        "h": TensorType("f32", (shape.seq_len, H)),
        "rows": row(shape, "i32"),
        "norm": TensorType(cut.products, (H,)),
    }


def slice_step(config: ModelConfig, shape: HeadShape, cut: CutPolicy, width: int) -> Graph:
    """Take one slice of the vocabulary, `weight (width, H)`, into the running sums."""

    def function(
        x: torch.Tensor, weight: torch.Tensor, top: torch.Tensor, total: torch.Tensor, mixed: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        logits = linear(x, weight, weight.dtype)  # (n, width)
        new_top = torch.maximum(top, logits.amax(1))
        shrink = torch.exp(top - new_top)
        powers = torch.exp(logits - new_top[:, None])
        added = product(rounded(powers, weight.dtype), rounded(weight, weight.dtype))  # (n, H)
        return new_top, total * shrink + powers.sum(1), mixed * shrink[:, None] + added

    inputs = {
        "x": block(config, shape),
        "weight": TensorType(cut.products, (width, config.hidden_size)),
        "top": row(shape),
        "total": row(shape),
        "mixed": block(config, shape),
    }
    return simplify(capture(f"head.slice.{width}", function, inputs, ["new_top", "new_total", "new_mixed"]))


def finish(config: ModelConfig, shape: HeadShape, cut: CutPolicy) -> Graph:
    """From the running sums to the weighted losses of a block and the gradient of its rows before the norm.

    Unused rows have weight 0; whatever their values, they contribute exactly 0.
    """
    H = config.hidden_size

    def function(  # noqa: PLR0913 -- the signature of the part
        h: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor, weights: torch.Tensor, x: torch.Tensor,
        label_rows: torch.Tensor, top: torch.Tensor, total: torch.Tensor, mixed: torch.Tensor,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        wanted = label_rows.to(x.dtype)
        losses = (torch.log(total) + top - (x * wanted).sum(1)) * weights
        dx = (mixed / total[:, None] - wanted) * weights[:, None]
        _, pull_back = vjp(lambda g: rms_norm(g, norm, config.rms_norm_eps), h.index_select(0, rows))
        return losses, pull_back(dx)[0]

    inputs = {
        **normed(config, shape, cut),
        "weights": row(shape),
        "x": block(config, shape),
        "label_rows": TensorType(cut.products, (shape.rows, H)),
        "top": row(shape),
        "total": row(shape),
        "mixed": block(config, shape),
    }
    return simplify(capture("head.finish", function, inputs, ["losses", "d_rows"]))


def end(config: ModelConfig, shape: HeadShape, cut: CutPolicy) -> Graph:
    """Sum the losses of all blocks, and put the gradients of their rows back into (S, H).

    A target with memory of its own is told by `places` where they go. Elsewhere `where` keeps what an unused block
    holds from an earlier step out of the sums, and the rows are put back by a product with a matrix of zeros and ones
    and not by a scatter: unused entries all point at row 0, and onnxruntime's ScatterND adds to equal indices from
    several threads without a lock.
    """
    S, H, B, n = shape.seq_len, config.hidden_size, shape.blocks, shape.rows
    if cut.own_memory and B > 1:
        raise InternalError("a target with memory of its own takes all rows in one block")

    def function(
        losses: torch.Tensor, d_rows: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        used = weights > 0
        zero = torch.zeros(())
        loss_sum = torch.where(used, losses, zero).sum([0, 1])
        kept = torch.where(used[:, :, None], d_rows, zero).view(B * n, H)
        place = torch.arange(S, dtype=torch.int32)[:, None] == rows.view(1, B * n)  # (S, B * n)
        return loss_sum, place.to(torch.float32) @ kept

    def whole(
        losses: torch.Tensor, d_rows: torch.Tensor, slots: torch.Tensor, used: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        return losses.sum([0, 1]), d_rows.view(n, H).index_select(0, slots) * used[:, None]

    inputs = {"losses": TensorType("f32", (B, n)), "d_rows": TensorType("f32", (B, n, H))}
    outputs = ["loss_sum", "dh"]
    if cut.own_memory:
        inputs |= {"slots": TensorType("i32", (S,)), "used": TensorType("f32", (S,))}
        return simplify(capture("head.end", whole, inputs, outputs))
    inputs |= {"rows": TensorType("i32", (B, n)), "weights": TensorType("f32", (B, n))}
    return simplify(capture("head.end", function, inputs, outputs))


def score_begin(config: ModelConfig, shape: HeadShape, cut: CutPolicy) -> Graph:
    """As `begin`, for evaluation."""
    n = shape.rows

    def function(h: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor) -> Sequence[torch.Tensor]:
        x = rms_norm(h.index_select(0, rows), norm, config.rms_norm_eps)
        return x, torch.full((n,), LOWEST), torch.zeros(n), torch.zeros(n, dtype=torch.int32)

    inputs = normed(config, shape, cut)
    return simplify(capture("score.begin", function, inputs, ["x", "top", "total", "best"]))


def score_slice(config: ModelConfig, shape: HeadShape, cut: CutPolicy, width: int) -> Graph:
    """Forward half of `slice_step`, which also remembers the most likely token; the first of the slice is `start`."""

    def function(
        x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor, top: torch.Tensor, total: torch.Tensor,
        best: torch.Tensor,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        logits = linear(x, weight, weight.dtype)  # (n, width)
        here = logits.amax(1)
        new_top = torch.maximum(top, here)
        return (
            new_top,
            total * torch.exp(top - new_top) + torch.exp(logits - new_top[:, None]).sum(1),
            torch.where(here > top, logits.argmax(1).to(torch.int32) + start, best),
        )

    inputs = {
        "x": block(config, shape),
        "weight": TensorType(cut.products, (width, config.hidden_size)),
        "start": TensorType("i32", ()),
        "top": row(shape),
        "total": row(shape),
        "best": row(shape, "i32"),
    }
    return simplify(capture(f"score.slice.{width}", function, inputs, ["new_top", "new_total", "new_best"]))


def score_finish(config: ModelConfig, shape: HeadShape, cut: CutPolicy) -> Graph:
    """Log-probability of each label."""

    def function(
        x: torch.Tensor, label_rows: torch.Tensor, top: torch.Tensor, total: torch.Tensor, best: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        return (x * label_rows.to(x.dtype)).sum(1) - top - torch.log(total), best + 0

    inputs = {
        "x": block(config, shape),
        "label_rows": TensorType(cut.products, (shape.rows, config.hidden_size)),
        "top": row(shape),
        "total": row(shape),
        "best": row(shape, "i32"),
    }
    return simplify(capture("score.finish", function, inputs, ["logprobs", "predictions"]))


def logits_slice(config: ModelConfig, shape: HeadShape, cut: CutPolicy, width: int) -> Graph:
    """`x (n, H)`, `weight (width, H)` -> `logits (width, n)`: transposed, so that slices join end to end in memory."""
    inputs = {"x": block(config, shape), "weight": TensorType(cut.products, (width, config.hidden_size))}

    def function(x: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return [product(rounded(weight, weight.dtype), rounded(x, weight.dtype).t())]

    return simplify(capture(f"logits.slice.{width}", function, inputs, ["logits"]))
