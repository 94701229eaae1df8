"""Gradient accumulation, clipping and AdamW: over one flat vector of all LoRA matrices, or over blocks of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npubundle.tensor import TensorType
from npucc.graph import Graph
from npucc.graph.capture import DTYPES, capture
from npucc.passes import simplify

_SCALAR = TensorType("f32", ())


def accumulate(size: int, *, select: bool = True) -> Graph:
    """`grad`, `step`, `accumulate` -> `new_grad`: `step` alone where `accumulate` is 0, their sum otherwise.

    With `select`, what `grad` holds before the first micro-step does not matter, not even a NaN. Without, for targets
    that cannot choose by a scalar, it has to be finite: memory starts as zero, and a run ends at the first NaN.
    """

    def function(grad: torch.Tensor, step: torch.Tensor, accumulate: torch.Tensor) -> Sequence[torch.Tensor]:
        kept = torch.where(accumulate > 0, grad, torch.zeros(())) if select else grad * accumulate
        return [kept + step]

    flat = TensorType("f32", (size,))
    return simplify(capture("accumulate", function, {"grad": flat, "step": flat, "accumulate": _SCALAR}, ["new_grad"]))


def clip(size: int) -> Graph:
    """`grad`, `token_count`, `max_norm` -> `grad_norm`, `scale`.

    `grad_norm` is the L2 norm of the mean gradient; `scale` turns the summed gradient into the mean one, limited to
    `max_norm` with the formula of `torch.nn.utils.clip_grad_norm_`.
    """

    def function(grad: torch.Tensor, token_count: torch.Tensor, max_norm: torch.Tensor) -> Sequence[torch.Tensor]:
        return _limited(torch.sqrt(_sum(grad * grad)), token_count, max_norm)

    inputs = {"grad": TensorType("f32", (size,)), "token_count": _SCALAR, "max_norm": _SCALAR}
    return simplify(capture("clip", function, inputs, ["grad_norm", "scale"]))


def add(size: int, dtype: str = "f32") -> Graph:
    """`grad`, `step` -> `new_grad`, their sum: for programs whose first micro-step writes gradients where they stay."""

    def function(grad: torch.Tensor, step: torch.Tensor) -> Sequence[torch.Tensor]:
        return [grad + step.to(grad.dtype)]

    inputs = {"grad": TensorType("f32", (size,)), "step": TensorType(dtype, (size,))}
    return simplify(capture(f"add.{size}", function, inputs, ["new_grad"]))


def widen(size: int, dtype: str) -> Graph:
    """`step` -> `grad` in f32."""
    inputs = {"step": TensorType(dtype, (size,))}
    return simplify(capture(f"widen.{size}", lambda step: [_cast(step, torch.float32)], inputs, ["grad"]))


def narrow(size: int, dtype: str) -> Graph:
    """`param` -> `copy`: a block of master weights in the dtype that a device multiplies with."""
    inputs = {"param": TensorType("f32", (size,))}
    return simplify(capture(f"narrow.{size}", lambda param: [_cast(param, DTYPES[dtype])], inputs, ["copy"]))


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A value of its own also where there is nothing to cast."""
    return values + 0.0 if values.dtype == dtype else values.to(dtype)


def zeros(name: str, shape: tuple[int, ...]) -> Graph:
    """`grad` of zeros: where gradients are added up in place, the first micro-step begins with it."""
    return simplify(capture(name, lambda: [torch.zeros(shape)], {}, ["grad"]))


def squares(size: int) -> Graph:
    """`grad` -> `square`: the sum of a block's squares."""

    def function(grad: torch.Tensor) -> Sequence[torch.Tensor]:
        return [_sum(grad * grad)]

    return simplify(capture(f"squares.{size}", function, {"grad": TensorType("f32", (size,))}, ["square"]))


def norm(blocks: Sequence[int]) -> Graph:
    """As `clip`, from the squares of blocks: one vector for each group, of so many blocks."""

    def function(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        *sums, token_count, max_norm = values
        return _limited(torch.sqrt(torch.cat(sums).sum()), token_count, max_norm)

    inputs = {f"squares{number}": TensorType("f32", (count,)) for number, count in enumerate(blocks)}
    inputs |= {"token_count": _SCALAR, "max_norm": _SCALAR}
    return simplify(capture("norm", function, inputs, ["grad_norm", "scale"]))


def _limited(norm: torch.Tensor, token_count: torch.Tensor, max_norm: torch.Tensor) -> Sequence[torch.Tensor]:
    mean = norm / token_count
    return mean, torch.clamp(max_norm / (mean + 1e-6), max=1.0) / token_count


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Sum in two stages: one f32 sum over millions of squares would lose four digits on targets that add one by one."""
    width = 1 << max(0, (values.numel() - 1).bit_length() // 2)
    rest = -values.numel() % width
    padded = torch.cat([values, torch.zeros(rest)]) if rest else values
    return padded.view(-1, width).sum(1).sum()


def adamw(size: int, name: str = "adamw", copy: str | None = None) -> Graph:
    """One AdamW update (Loshchilov and Hutter 2019), with PyTorch's order of operations and placement of epsilon.

    With `copy`, the new parameters come in that dtype as well.
    """

    def function(  # noqa: PLR0913 -- the signature of the part
        param: torch.Tensor, moment1: torch.Tensor, moment2: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor,
        learning_rate: torch.Tensor, beta1: torch.Tensor, beta2: torch.Tensor, epsilon: torch.Tensor,
        weight_decay: torch.Tensor, correction1: torch.Tensor, correction2: torch.Tensor,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        g = grad * scale
        m = moment1 * beta1 + g * (1.0 - beta1)
        v = moment2 * beta2 + g * g * (1.0 - beta2)
        denominator = torch.sqrt(v) / torch.sqrt(correction2) + epsilon
        decayed = param * (1.0 - learning_rate * weight_decay)
        new = decayed - m / denominator * (learning_rate / correction1)
        return (new, m, v) if copy is None else (new, m, v, _cast(new, DTYPES[copy]))

    flat = TensorType("f32", (size,))
    inputs = dict.fromkeys(["param", "moment1", "moment2", "grad"], flat) | dict.fromkeys(
        ["scale", "learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "correction1", "correction2"], _SCALAR
    )
    outputs = ["new_param", "new_moment1", "new_moment2", *(["new_copy"] if copy else [])]
    return simplify(capture(name, function, inputs, outputs))
