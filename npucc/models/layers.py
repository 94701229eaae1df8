"""Pieces that several families share, written so that their gradients are cheap on every target."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from npubundle.model_config import Rope
from npucc.models.architecture import Tables
from npucc.models.products import product, rounded

#: A layer's graph grows with the blocks of its attention; beyond so many they save little more.
MAX_BLOCKS = 8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation over the last axis (Zhang and Sennrich 2019), in the dtype of x."""
    found: tuple[torch.Tensor, torch.Tensor] = _RmsNorm.apply(x, weight.to(x.dtype), eps)  # type: ignore[no-untyped-call]
    return found[0]


class _RmsNorm(torch.autograd.Function):
    """With n the inverse of the root, g = d·w and H columns: g·n - x·n³·Σ(g·x)/H, a fourth less than step by step."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        inverse = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        return x * inverse * weight, inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, weight, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        g = d * weight
        correction = (g * x).sum(-1, keepdim=True) * (inverse * inverse * inverse / x.shape[-1])
        rows = (d * x * inverse).reshape(-1, x.shape[-1])
        return g * inverse - x * correction, rows.sum(0), None


def gated(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`silu(gate) · up`, its gradient spelled out in products that every target knows, as few as there can be.

    `dtype` is that of the weights: backward reads gate and up rounded to it, so that no more has to be kept for it than
    the weights' dtype would take. Its error adds up over no layers, unlike one made on the way forward.
    """
    found: torch.Tensor = _Gated.apply(gate, up, dtype)  # type: ignore[no-untyped-call]
    return found


class _Gated(torch.autograd.Function):
    """With s the sigmoid and y = g·s, the derivative of y is s + y·(1 - s): backward needs y in any case."""

    @staticmethod
    def forward(gate: torch.Tensor, up: torch.Tensor, _: torch.dtype) -> torch.Tensor:
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.dtype], _: torch.Tensor) -> None:
        gate, up, ctx.dtype = inputs
        ctx.save_for_backward(gate, up)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = (rounded(x, ctx.dtype) for x in ctx.saved_tensors)
        s = torch.sigmoid(gate)
        y = gate * s
        return d * up * (s + y * (1 - s)), d * y, None


def rotate(x: torch.Tensor, tables: Tables, scale: float = 1.0) -> torch.Tensor:
    """Rotary position embedding on (…, S, D): `roll` by half a head swaps its halves, the sign is in the sine table."""
    rotated = x * tables.cos + torch.roll(x, x.shape[-1] // 2, -1) * tables.sin
    return rotated if scale == 1.0 else rotated * scale


def rotate_rows(x: torch.Tensor, tables: Tables, scale: float = 1.0) -> torch.Tensor:
    """The same on (S, …, D), with halves swapped by a product with `tables.swap`.

    Each of the product's sums has one term, so that nothing is lost but what rounding to the dtype of `swap` loses.
    """
    if tables.swap is None:
        raise ValueError("these tables have no swap")
    cos, sin = tables.cos[:, None], tables.sin[:, None]  # (S, 1, D)
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    found: torch.Tensor = _RotateRows.apply(rows, cos, sin, tables.swap, scale)  # type: ignore[no-untyped-call]
    return found.view(x.shape)


class _RotateRows(torch.autograd.Function):
    """The gradient is a rotation by the opposite angle, computed in the same form."""

    @staticmethod
    def forward(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, swap: torch.Tensor, scale: float
    ) -> torch.Tensor:
        rotated = x * cos + _with_halves_swapped(x, swap) * sin
        return rotated if scale == 1.0 else rotated * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: torch.Tensor) -> None:
        _, cos, sin, swap, ctx.scale = inputs
        ctx.save_for_backward(cos, sin, swap)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, swap = ctx.saved_tensors
        rotated = d.to(cos.dtype) * cos - _with_halves_swapped(d, swap) * sin
        return rotated if ctx.scale == 1.0 else rotated * ctx.scale, None, None, None, None


def _with_halves_swapped(x: torch.Tensor, swap: torch.Tensor) -> torch.Tensor:
    rows = rounded(x, swap.dtype).reshape(-1, x.shape[-1])
    return product(rows, rounded(swap, swap.dtype)).view(x.shape)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables) -> torch.Tensor:
    """`softmax(q kᵀ + mask) v`: q (shared, group, S, D), k and v (shared, S, D) -> (shared, group, S, D).

    Every query of a group meets the same keys and values. Queries are taken a block of rows at a time, so that nothing
    is computed for the keys after a block: half of all scores, and on a CPU the dear half, since the exponential of a
    masked score is a subnormal number before it becomes zero.
    """
    S = q.shape[2]
    rows = max(tables.query_rows, -(-S // MAX_BLOCKS))
    if rows >= S:
        return _attend(q, k, v, tables.mask)
    keys, values = torch.split(k, rows, 1), torch.split(v, rows, 1)
    found = []
    for number, queries in enumerate(torch.split(q, rows, 2)):
        stop = number * rows + queries.shape[2]
        mask = tables.mask[number * rows : stop, :stop]
        seen_keys, seen_values = torch.cat(keys[: number + 1], 1), torch.cat(values[: number + 1], 1)
        found.append(_attend(queries, seen_keys, seen_values, mask))
    return torch.cat(found, 2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _Attention.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
    return found


class _Attention(torch.autograd.Function):
    """Attention of one block with its gradient.

    The queries of a group are stacked into the rows of one product, so that keys and values are never repeated in
    memory. Factors of products are rounded to the dtype of q and v, which is that of the result; the rest is in the
    mask's. The gradient is that of FlashAttention (Dao et al. 2022): the row sums of the softmax's gradient come from
    the narrow results instead of the wide probabilities.

    Keys that are wider than the queries count in full: what rounding them does to the scores was half of the error in
    the gradients of thirty layers. Backward rounds them, where the error adds up over no layers; its probabilities
    are not forward's then, and the row sums are those of its own.
    """

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rest = None if k.dtype == q.dtype else k - rounded(k, q.dtype)
        p = rounded(_probabilities(q, k, mask, rest), q.dtype)
        return product(p, rounded(v, q.dtype)).to(q.dtype).view(q.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, d_mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, mask, mixed = ctx.saved_tensors
        p = _probabilities(q, k, mask)  # (shared, group * rows, n)
        d = rounded(_stacked(d_mixed), q.dtype)
        d_p = product(d, rounded(v, q.dtype).transpose(1, 2))
        if k.dtype == q.dtype:
            d_scores = p * (d_p - (d * _stacked(mixed)).sum(-1, keepdim=True))
        else:
            weighted = p * d_p
            d_scores = rounded(weighted - p * weighted.sum(-1, keepdim=True), q.dtype)
        d_q = product(d_scores, rounded(k, q.dtype)).view(q.shape)
        d_k = product(d_scores.transpose(1, 2), rounded(_stacked(q), q.dtype))
        return d_q, d_k, product(rounded(p, q.dtype).transpose(1, 2), d), None


def _stacked(x: torch.Tensor) -> torch.Tensor:
    """(shared, group, rows, D) -> (shared, group * rows, D)."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, rest: torch.Tensor | None = None
) -> torch.Tensor:
    """`softmax(q (k + rest)ᵀ + mask)`, (shared, group * rows, n)."""
    queries = rounded(_stacked(q), q.dtype)
    scores = product(queries, rounded(k, q.dtype).transpose(1, 2))
    if rest is not None:
        scores = scores + product(queries, rounded(rest, q.dtype).transpose(1, 2))
    masked = scores.view(*q.shape[:3], -1) + mask  # (shared, group, rows, n)
    return torch.softmax(masked.view(scores.shape), dim=-1)


def inverse_frequencies(rope: Rope, head_dim: int) -> npt.NDArray[np.float32]:
    """(head_dim / 2,) angular speeds per position, computed in f32 as `transformers.modeling_rope_utils` does.

    `linear` divides them by its factor (Chen et al. 2023); `llama3` does so for wavelengths beyond the original
    context, not at all for short ones, and interpolates between (Llama 3.1's scaling).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.int64).astype(np.float32) / np.float32(head_dim)
    speeds = torch.tensor(1.0) / torch.tensor(rope.theta) ** torch.from_numpy(exponents)
    if rope.type == "linear":
        speeds = speeds / rope.parameters["factor"]
    elif rope.type == "llama3":
        speeds = _llama3(speeds, rope)
    return np.asarray(speeds.numpy(), dtype=np.float32)


def _llama3(speeds: torch.Tensor, rope: Rope) -> torch.Tensor:
    factor, low, high, context = (
        rope.parameters[name]
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    wavelengths = 2 * math.pi / speeds
    slowed = torch.where(wavelengths > context / low, speeds / factor, speeds)
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * slowed / factor + smooth * slowed
    medium = ~(wavelengths < context / high) & ~(wavelengths > context / low)
    return torch.where(medium, between, slowed)
