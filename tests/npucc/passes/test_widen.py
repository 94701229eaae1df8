"""bf16 arithmetic in f32: what is widened, what is rounded, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npubundle.tensor import TensorType
from npucc.graph import Graph
from npucc.graph.capture import capture
from npucc.graph.interpret import interpret
from npucc.passes import simplify
from npucc.passes.widen import MOVING, widen_arithmetic

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FUNCTIONS: list[Function] = [
    lambda x, y: x @ y.t(),
    lambda x, y: x * y + x,
    lambda x, y: (x * 2.5).softmax(1) - y,
    lambda x, y: x.float() + y,
    lambda x, y: torch.full_like(x, 0.3) * y,
]


def traced(function: Function, dtype: str = "bf16") -> Graph:
    kinds = {name: TensorType(dtype, (4, 4)) for name in "xy"}
    return simplify(capture("g", lambda x, y: [function(x, y)], kinds, ["z"]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_but_moves_is_left_in_bf16_and_the_result_is_torchs_own(function: Function) -> None:
    graph = traced(function)
    wide = widen_arithmetic(graph)
    assert wide.output_types == graph.output_types
    for node in wide.nodes:
        kinds = {wide.types[name].dtype for name in node.refs()} | {node.type.dtype}
        assert node.op in MOVING or "bf16" not in kinds
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 4, generator=generator).to(torch.bfloat16) for _ in range(2)]
    (found,), (expected,) = (interpret(each, inputs, widen=False) for each in (wide, graph))
    assert torch.equal(found, expected)


def test_a_value_is_widened_once() -> None:
    casts = [n for n in widen_arithmetic(traced(lambda x, y: x * y + x)).nodes if n.type.dtype == "f32"]
    assert sum(node.op == "aten._to_copy.default" for node in casts) == 3  # x, y and the product


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_other_types_are_left_alone(dtype: str) -> None:
    graph = traced(lambda x, y: x @ y + 1, dtype)
    assert widen_arithmetic(graph) == graph
