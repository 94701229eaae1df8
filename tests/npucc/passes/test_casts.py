"""A cast to a wider type and back is dropped; one that rounds is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npubundle.tensor import TensorType
from npucc.graph import Graph
from npucc.graph.capture import capture
from npucc.passes import simplify

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Function = Callable[[torch.Tensor], list[torch.Tensor]]


def traced(function: Function, dtype: str) -> Graph:
    return simplify(capture("casts", function, {"x": TensorType(dtype, (2, 6))}, ["y"]))


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: [x.to(F32).to(BF16) * 2], ["aten.mul.Tensor"]),
        (lambda x: [x.to(F32).view(3, 4).to(BF16) * 2], ["aten.view.default", "aten.mul.Tensor"]),
        (
            lambda x: [x.to(F32).view(3, 4).t().to(BF16) * 2],
            ["aten.view.default", "aten.permute.default", "aten.mul.Tensor"],
        ),
        # Again and again.
        (lambda x: [x.to(F32).to(BF16).to(F32).view(12).to(BF16) * 2], ["aten.view.default", "aten.mul.Tensor"]),
    ],
)
def test_a_way_there_and_back_is_dropped(function: Function, left: list[str]) -> None:
    assert [node.op for node in traced(function, "bf16").nodes] == left


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: [x.to(BF16).to(F32)], "f32"),  # rounds
        (lambda x: [(x.to(F32) * 2).to(BF16)], "bf16"),  # another value
        (lambda x: [x.to(F32).to(F16)], "bf16"),  # another type
        (lambda x: [x.to(F16).to(BF16)], "bf16"),  # not every value on the way
    ],
)
def test_casts_that_mean_something_stay(function: Function, dtype: str) -> None:
    assert [node.op for node in traced(function, dtype).nodes].count("aten._to_copy.default") == 2
