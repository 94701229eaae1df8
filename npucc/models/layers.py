"""Pieces that several families share, written so that their gradients are cheap on every target."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from npubundle.model_config import Rope
from npucc.models.architecture import Tables

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


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x), its gradient spelled out in plain products that every target knows, as few as there can be."""
    found: torch.Tensor = _Silu.apply(x)  # type: ignore[no-untyped-call]
    return found


class _Silu(torch.autograd.Function):
    """With s the sigmoid and y the result, the derivative is s + y·(1 - s): backward needs y in any case."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], _: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = ctx.saved_tensors[0]
        s = torch.sigmoid(x)
        return d * (s + x * s * (1 - s))


def rotate(x: torch.Tensor, tables: Tables, scale: float = 1.0) -> torch.Tensor:
    """Rotary position embedding on (…, S, D): `roll` by half a head swaps its halves, the sign is in the sine table."""
    rotated = x * tables.cos + torch.roll(x, x.shape[-1] // 2, -1) * tables.sin
    return rotated if scale == 1.0 else rotated * scale


def rotate_rows(x: torch.Tensor, tables: Tables, scale: float = 1.0) -> torch.Tensor:
    """The same on (S, …, D), with halves swapped by a product with `tables.swap`: exact, each sum has one term."""
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
        x, swapped = _with_halves_swapped(x, swap)
        rotated = x.to(cos.dtype) * cos + swapped.to(cos.dtype) * sin
        return (rotated if scale == 1.0 else rotated * scale).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: torch.Tensor) -> None:
        _, cos, sin, swap, ctx.scale = inputs
        ctx.save_for_backward(cos, sin, swap)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, swap = ctx.saved_tensors
        d, swapped = _with_halves_swapped(d, swap)
        rotated = d.to(cos.dtype) * cos - swapped.to(cos.dtype) * sin
        return (rotated if ctx.scale == 1.0 else rotated * ctx.scale).to(d.dtype), None, None, None, None


def _with_halves_swapped(x: torch.Tensor, swap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, (x.reshape(-1, x.shape[-1]) @ swap.to(x.dtype)).view(x.shape)


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
    found: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
    return found[0]


class _Attention(torch.autograd.Function):
    """Attention of one block with its gradient.

    The queries of a group are stacked into the rows of one product, so that keys and values are never repeated in
    memory. The gradient is that of FlashAttention (Dao et al. 2022): the row sums of the softmax's gradient come from
    the narrow results instead of the wide probabilities. Products are in the dtype of q, k and v, softmax in the
    mask's.
    """

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared, group, rows, D = q.shape
        scores = torch.bmm(q.reshape(shared, group * rows, D), k.transpose(1, 2))  # (shared, group * rows, n)
        scores = (scores.to(mask.dtype).view(shared, group, rows, -1) + mask).view(shared, group * rows, -1)
        probabilities = torch.softmax(scores, dim=-1)
        return torch.bmm(probabilities.to(v.dtype), v).view(shared, group, rows, D), probabilities

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        q, k, v, _ = inputs
        mixed, probabilities = output
        ctx.mark_non_differentiable(probabilities)
        ctx.save_for_backward(q, k, v, mixed, probabilities)

    @staticmethod
    def backward(
        ctx: Any, d_mixed: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, mixed, p = ctx.saved_tensors
        shared, group, rows, D = q.shape
        d = d_mixed.reshape(shared, group * rows, D)
        mixed = mixed.reshape(shared, group * rows, D)
        sums = (d.to(p.dtype) * mixed.to(p.dtype)).sum(-1, keepdim=True)
        d_scores = (p * (torch.bmm(d, v.transpose(1, 2)).to(p.dtype) - sums)).to(q.dtype)  # (shared, group * rows, n)
        d_q = torch.bmm(d_scores, k).view(shared, group, rows, D)
        d_k = torch.bmm(d_scores.transpose(1, 2), q.reshape(shared, group * rows, D))
        return d_q, d_k, torch.bmm(p.to(d.dtype).transpose(1, 2), d), None


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
