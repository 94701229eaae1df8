"""The loss as the reference program computes it: two passes over the vocabulary, and automatic differentiation.

Log-sum-exp first, then gradients with it known: so that it cannot share a fault with `npucc.training.head`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npubundle.model_config import ModelConfig
from npubundle.tensor import TensorType
from npucc.graph import Graph
from npucc.graph.capture import capture
from npucc.models.layers import rms_norm
from npucc.passes import simplify
from npucc.training.differentiate import vjp, vjp_with_extra
from npucc.training.head import LOWEST, HeadShape, block, row


def _inside(labels: torch.Tensor, start: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels fall into the slice, and an index into it that is valid for every row."""
    local = labels - start
    return (local >= 0) & (local < width), torch.clamp(local, 0, width - 1)


def reference_begin(config: ModelConfig, shape: HeadShape) -> Graph:
    """As `begin`, for the reference: what its two passes start from."""
    n, H = shape.rows, config.hidden_size

    def function(h: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor) -> Sequence[torch.Tensor]:
        x = rms_norm(h.index_select(0, rows), norm, config.rms_norm_eps)
        return x, torch.full((n,), LOWEST), torch.zeros(n), torch.zeros(n, H)

    inputs = {"h": TensorType("f32", (shape.seq_len, H)), "rows": row(shape, "i32"), "norm": TensorType("f32", (H,))}
    return simplify(capture("reference.begin", function, inputs, ["x", "lse", "label_logit", "dx"]))


def reference_lse(config: ModelConfig, shape: HeadShape, width: int) -> Graph:
    """First pass of the reference: log-sum-exp over one more slice."""

    def function(x: torch.Tensor, weight: torch.Tensor, lse: torch.Tensor) -> Sequence[torch.Tensor]:
        return [torch.logsumexp(torch.cat([lse[:, None], x @ weight.t()], 1), 1)]

    inputs = {"x": block(config, shape), "weight": TensorType("f32", (width, config.hidden_size)), "lse": row(shape)}
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
        "x": block(config, shape),
        "weight": TensorType("f32", (width, config.hidden_size)),
        "labels": row(shape, "i32"),
        "start": TensorType("i32", ()),
        "lse": row(shape),
        "label_logit": row(shape),
        "dx": block(config, shape),
    }
    return simplify(capture(f"reference.slice.{width}", function, inputs, ["new_label_logit", "new_dx"]))


def reference_matrix_gradient(config: ModelConfig, shape: HeadShape, width: int) -> Graph:
    """As `matrix_gradient`, by automatic differentiation of this slice's share of the loss."""

    def function(
        x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, start: torch.Tensor, lse: torch.Tensor,
        weights: torch.Tensor, grad: torch.Tensor,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        inside, index = _inside(labels, start, width)
        hit = (torch.arange(width)[None, :] == index[:, None]) & inside[:, None]

        def share(matrix: torch.Tensor) -> torch.Tensor:
            logits = x @ matrix.t()
            return torch.exp(logits - lse[:, None]).sum(1) - torch.where(hit, logits, torch.zeros(())).sum(1)

        _, pull_back = vjp(share, weight)
        return [grad + pull_back(weights)[0]]

    weight = TensorType("f32", (width, config.hidden_size))
    inputs = {
        "x": block(config, shape), "weight": weight, "labels": row(shape, "i32"), "start": TensorType("i32", ()),
        "lse": row(shape), "weights": row(shape), "grad": weight,
    }  # fmt: skip
    return simplify(capture(f"reference.gradient.{width}", function, inputs, ["new_grad"]))


def reference_norm_gradient(config: ModelConfig, shape: HeadShape) -> Graph:
    """As `norm_gradient`, from the gradient of the normalised rows that the slices added up."""
    H = config.hidden_size

    def function(
        h: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor, weights: torch.Tensor, dx: torch.Tensor,
        grad: torch.Tensor,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        taken = h.index_select(0, rows)
        scaled = taken * torch.rsqrt(taken.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        _, pull_back = vjp(lambda weight: scaled * weight, norm)
        return [grad + pull_back(dx * weights[:, None])[0]]

    vector = TensorType("f32", (H,))
    inputs = {
        "h": TensorType("f32", (shape.seq_len, H)), "rows": row(shape, "i32"), "norm": vector, "weights": row(shape),
        "dx": block(config, shape), "grad": vector,
    }  # fmt: skip
    return simplify(capture("reference.norm", function, inputs, ["new_grad"]))


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
        "rows": row(shape, "i32"),
        "norm": TensorType("f32", (H,)),
        "weights": row(shape),
        "lse": row(shape),
        "label_logit": row(shape),
        "dx": block(config, shape),
    }
    return simplify(capture("reference.finish", function, inputs, ["losses", "d_rows"]))
