"""Gradients of the final norm and of the output matrix, block by block, from the running sums of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npubundle.model_config import ModelConfig
from npubundle.tensor import TensorType
from npucc.graph import Graph
from npucc.graph.capture import capture
from npucc.models.layers import rms_norm
from npucc.models.products import linear, product, rounded
from npucc.passes import simplify
from npucc.targets import CutPolicy
from npucc.training.differentiate import vjp
from npucc.training.head import HeadShape, block, normed, row


def norm_gradient(config: ModelConfig, shape: HeadShape, cut: CutPolicy) -> Graph:
    """Add a block's share to the gradient of the final norm's weight, f32 (H,)."""

    def function(
        h: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor, weights: torch.Tensor, label_rows: torch.Tensor,
        total: torch.Tensor, mixed: torch.Tensor, grad: torch.Tensor,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        dx = (mixed / total[:, None] - label_rows.to(mixed.dtype)) * weights[:, None]
        taken = h.index_select(0, rows)
        _, pull_back = vjp(lambda weight: rms_norm(taken, weight, config.rms_norm_eps), norm)
        return [grad + pull_back(dx)[0].to(grad.dtype)]

    H = config.hidden_size
    inputs = {
        **normed(config, shape, cut),
        "weights": row(shape),
        "label_rows": TensorType(cut.products, (shape.rows, H)),
        "total": row(shape),
        "mixed": block(config, shape),
        "grad": TensorType("f32", (H,)),
    }
    return simplify(capture("head.norm", function, inputs, ["new_grad"]))


def matrix_gradient(config: ModelConfig, shape: HeadShape, cut: CutPolicy, width: int) -> Graph:
    """Add a block's share to the gradient of a slice of the output matrix, f32 (width, H).

    The running sums have reached their end by now: exp(z - top) / total are the probabilities.
    """

    def function(
        x: torch.Tensor, weight: torch.Tensor, top: torch.Tensor, total: torch.Tensor, labels: torch.Tensor,
        start: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        p = torch.exp(linear(x, weight, weight.dtype) - top[:, None]) / total[:, None]  # (n, width)
        hit = torch.arange(width, dtype=torch.int32)[None, :] == (labels - start)[:, None]
        d = (p - hit.to(p.dtype)) * weights[:, None]
        return [grad + product(rounded(d, weight.dtype).t(), rounded(x, weight.dtype))]

    weight = TensorType(cut.products, (width, config.hidden_size))
    inputs = {
        "x": block(config, shape), "weight": weight, "top": row(shape), "total": row(shape),
        "labels": row(shape, "i32"), "start": TensorType("i32", ()), "weights": row(shape),
        "grad": TensorType("f32", weight.shape),
    }  # fmt: skip
    return simplify(capture(f"head.gradient.{width}", function, inputs, ["new_grad"]))
