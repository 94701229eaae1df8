"""Reverse-mode differentiation: `torch.func.vjp`, with one signature for each of its two forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

#: From the gradient of a value to the gradients of what it was computed from.
PullBack = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def vjp(function: Callable[..., torch.Tensor], *at: torch.Tensor) -> tuple[torch.Tensor, PullBack]:
    """`function(*at)`, and the pull-back to every tensor of `at`."""
    return cast("tuple[torch.Tensor, PullBack]", torch.func.vjp(function, *at))


def vjp_with_extra(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], *at: torch.Tensor
) -> tuple[torch.Tensor, PullBack, torch.Tensor]:
    """As `vjp`, for a function whose second result is handed through and not differentiated."""
    return cast("tuple[torch.Tensor, PullBack, torch.Tensor]", torch.func.vjp(function, *at, has_aux=True))
