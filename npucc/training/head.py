"""The loss: final norm, output projection and cross-entropy, in slices of the vocabulary and blocks of supervised rows.

Neither an S×V tensor nor a product of full width ever exists. For a block of rows x and the slices W₁, W₂, … of the
output matrix, one pass keeps, per row, the largest logit m so far, s = Σ exp(z − m) and a = Σ exp(z − m) · W; whenever
m grows, s and a are scaled down, as in online softmax (Milakov and Gimelshein 2018). At the end log s + m is the
log-sum-exp, and a / s − W[label] is the gradient of the loss: each slice is read once, and its logits are computed
once. The row W[label] is picked beforehand; its product with x is the label's logit.

The reference uses two passes instead (log-sum-exp first, then automatic differentiation), so that the two cannot share
a fault.
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
from npucc.training.differentiate import vjp, vjp_with_extra

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


def _row(shape: HeadShape, dtype: str = "f32") -> TensorType:
    return TensorType(dtype, (shape.rows,))


def _block(config: ModelConfig, shape: HeadShape) -> TensorType:
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

    inputs = _normed(config, shape, cut)
    return simplify(capture("head.begin", function, inputs, ["x", "top", "total", "mixed"]))


def _normed(config: ModelConfig, shape: HeadShape, cut: CutPolicy) -> dict[str, TensorType]:
    """What the rows of a block are made of."""
    H = config.hidden_size
    return {
        "h": TensorType("f32", (shape.seq_len, H)),
        "rows": _row(shape, "i32"),
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
        "x": _block(config, shape),
        "weight": TensorType(cut.products, (width, config.hidden_size)),
        "top": _row(shape),
        "total": _row(shape),
        "mixed": _block(config, shape),
    }
    return simplify(capture(f"head.slice.{width}", function, inputs, ["new_top", "new_total", "new_mixed"]))


def _inside(labels: torch.Tensor, start: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels fall into the slice, and an index into it that is valid for every row."""
    local = labels - start
    return (local >= 0) & (local < width), torch.clamp(local, 0, width - 1)


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
        **_normed(config, shape, cut),
        "weights": _row(shape),
        "x": _block(config, shape),
        "label_rows": TensorType(cut.products, (shape.rows, H)),
        "top": _row(shape),
        "total": _row(shape),
        "mixed": _block(config, shape),
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

    inputs = _normed(config, shape, cut)
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
        "x": _block(config, shape),
        "weight": TensorType(cut.products, (width, config.hidden_size)),
        "start": TensorType("i32", ()),
        "top": _row(shape),
        "total": _row(shape),
        "best": _row(shape, "i32"),
    }
    return simplify(capture(f"score.slice.{width}", function, inputs, ["new_top", "new_total", "new_best"]))


def score_finish(config: ModelConfig, shape: HeadShape, cut: CutPolicy) -> Graph:
    """Log-probability of each label."""

    def function(
        x: torch.Tensor, label_rows: torch.Tensor, top: torch.Tensor, total: torch.Tensor, best: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        return (x * label_rows.to(x.dtype)).sum(1) - top - torch.log(total), best + 0

    inputs = {
        "x": _block(config, shape),
        "label_rows": TensorType(cut.products, (shape.rows, config.hidden_size)),
        "top": _row(shape),
        "total": _row(shape),
        "best": _row(shape, "i32"),
    }
    return simplify(capture("score.finish", function, inputs, ["logprobs", "predictions"]))


def reference_begin(config: ModelConfig, shape: HeadShape) -> Graph:
    """As `begin`, for the reference: what its two passes start from."""
    n, H = shape.rows, config.hidden_size

    def function(h: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor) -> Sequence[torch.Tensor]:
        x = rms_norm(h.index_select(0, rows), norm, config.rms_norm_eps)
        return x, torch.full((n,), LOWEST), torch.zeros(n), torch.zeros(n, H)

    inputs = {"h": TensorType("f32", (shape.seq_len, H)), "rows": _row(shape, "i32"), "norm": TensorType("f32", (H,))}
    return simplify(capture("reference.begin", function, inputs, ["x", "lse", "label_logit", "dx"]))


def logits_slice(config: ModelConfig, shape: HeadShape, cut: CutPolicy, width: int) -> Graph:
    """`x (n, H)`, `weight (width, H)` -> `logits (width, n)`: transposed, so that slices join end to end in memory."""
    inputs = {"x": _block(config, shape), "weight": TensorType(cut.products, (width, config.hidden_size))}

    def function(x: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return [product(rounded(weight, weight.dtype), rounded(x, weight.dtype).t())]

    return simplify(capture(f"logits.slice.{width}", function, inputs, ["logits"]))


def reference_lse(config: ModelConfig, shape: HeadShape, width: int) -> Graph:
    """First pass of the reference: log-sum-exp over one more slice."""

    def function(x: torch.Tensor, weight: torch.Tensor, lse: torch.Tensor) -> Sequence[torch.Tensor]:
        return [torch.logsumexp(torch.cat([lse[:, None], x @ weight.t()], 1), 1)]

    inputs = {"x": _block(config, shape), "weight": TensorType("f32", (width, config.hidden_size)), "lse": _row(shape)}
    return simplify(capture(f"reference.lse.{width}", function, inputs, ["new_lse"]))


def reference_slice(config: ModelConfig, shape: HeadShape, width: int) -> Graph:
    """Second pass: this slice's share of the loss and, by automatic differentiation, of the gradient of the block.

    With the log-sum-exp L known, Σ exp(z − L) has the gradient of L itself, since L's own dependence on z is what is
    summed.
    """

    def function(
        x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, start: torch.Tensor, lse: torch.Tensor,
        label_logit: torch.Tensor, dx: torch.Tensor,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        inside, index = _inside(labels, start, width)
        hit = (torch.arange(width)[None, :] == index[:, None]) & inside[:, None]

        def share(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = rows @ weight.t()
            picked = torch.where(hit, logits, torch.zeros(())).sum(1)
            return torch.exp(logits - lse[:, None]).sum(1) - picked, picked

        _, pull_back, picked = vjp_with_extra(share, x)
        return label_logit + picked, dx + pull_back(torch.ones(shape.rows))[0]

    inputs = {
        "x": _block(config, shape),
        "weight": TensorType("f32", (width, config.hidden_size)),
        "labels": _row(shape, "i32"),
        "start": TensorType("i32", ()),
        "lse": _row(shape),
        "label_logit": _row(shape),
        "dx": _block(config, shape),
    }
    return simplify(capture(f"reference.slice.{width}", function, inputs, ["new_label_logit", "new_dx"]))


def reference_finish(config: ModelConfig, shape: HeadShape) -> Graph:
    """Weighted losses of a block, and the gradient of its rows before the norm, in the reference."""
    H = config.hidden_size

    def function(
        h: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor, weights: torch.Tensor,
        lse: torch.Tensor, label_logit: torch.Tensor, dx: torch.Tensor,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        _, pull_back = vjp(lambda g: rms_norm(g, norm, config.rms_norm_eps), h.index_select(0, rows))
        return (lse - label_logit) * weights, pull_back(dx * weights[:, None])[0]

    inputs = {
        "h": TensorType("f32", (shape.seq_len, H)),
        "rows": _row(shape, "i32"),
        "norm": TensorType("f32", (H,)),
        "weights": _row(shape),
        "lse": _row(shape),
        "label_logit": _row(shape),
        "dx": _block(config, shape),
    }
    return simplify(capture("reference.finish", function, inputs, ["losses", "d_rows"]))
