"""Pieces that several families share, written so that their gradients are cheap on every target."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from npubundle.model_config import Rope
from npucc.models.architecture import Tables


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation over the last axis (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x), spelled out: the gradient then consists of plain products that every target knows."""
    return x * torch.sigmoid(x)


def rotate(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Rotary position embedding on (…, S, D): `roll` by half a head swaps its halves, the sign is in the sine table."""
    return x * tables.cos + torch.roll(x, x.shape[-1] // 2, -1) * tables.sin


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
