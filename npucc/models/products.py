"""Matrix products as targets compute them: factors rounded to the target's dtype, sums in f32.

Rounding the sums too, as `torch.mm` does with bf16, would cost nothing less on a device whose accumulators are f32, and
was most of the error in a gradient of thirty layers. A product whose f32 factors have been rounded says so in
operators that every compiler knows.
"""

from __future__ import annotations

from typing import Any

import torch


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest values that `dtype` has, in f32; x itself where that is its dtype and no narrower than f32."""
    return x.to(dtype).to(torch.promote_types(dtype, torch.float32))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` of two matrices or two equal batches of them.

    Factors are rounded before they are turned, so that one that is used both ways is rounded, and kept, once.
    """
    return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)


def linear(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, *, whole: bool = False) -> torch.Tensor:
    """`x @ weightᵀ`: x (S, in), weight (out, in) -> (S, out), both of its gradients computed in the same way.

    With `whole`, what rounding x loses is rounded and multiplied too, at twice the cost. Not so in its gradients.
    """
    if dtype == x.dtype == weight.dtype:
        return x @ weight.t()
    found: torch.Tensor = _Linear.apply(x, weight, dtype, whole)  # type: ignore[no-untyped-call]
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, whole: bool) -> torch.Tensor:  # noqa: FBT001 -- autograd takes no keywords
        near, matrix = rounded(x, dtype), rounded(weight, dtype).t()
        y = product(near, matrix)
        return y + product(rounded(x - near, dtype), matrix) if whole else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: torch.Tensor) -> None:
        x, weight, ctx.dtype, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, d = (rounded(tensor, ctx.dtype) for tensor in (*ctx.saved_tensors, d))
        d_x = product(d, weight) if ctx.needs_input_grad[0] else None
        d_weight = product(d.t(), x) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None, None
