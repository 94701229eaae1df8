from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from npubundle.tensor import TensorType
from npucc.errors import InternalError
from npucc.graph import Ref
from npucc.graph.capture import capture
from npucc.graph.graph import CONSTANT
from tests.npucc.tiny import evaluate

F32 = TensorType("f32", (2, 3))


def test_equal_samples_never_merge_two_inputs() -> None:
    graph = capture("minus", lambda a, b: [a - b], {"a": F32, "b": F32}, ["difference"])
    assert [value.name for value in graph.inputs] == ["a", "b"]
    assert list(graph.nodes[-1].refs()) == ["a", "b"]
    a, b = torch.rand(2, 3), torch.rand(2, 3)
    assert torch.equal(evaluate(graph, {"a": a, "b": b})["difference"], a.double() - b.double())


def test_inputs_keep_their_names_order_and_types_used_or_not() -> None:
    inputs = {"tokens": TensorType("i32", (4,)), "unused": TensorType("bool", (1,)), "x": TensorType("f16", ())}
    graph = capture("some", lambda tokens, unused, x: [x + 1, tokens], inputs, ["y", "same"])  # noqa: ARG005
    assert {value.name: value.type for value in graph.inputs} == inputs
    assert graph.outputs[1] == ("same", "tokens")


def test_constants_become_literals() -> None:
    table = np.array([[0.5, 0.25], [3.0, 4.0]], dtype=np.float32)
    kind = TensorType("f32", (2,))
    graph = capture("scaled", lambda x, table: [x * table], {"x": kind}, ["y"], {"table": table})
    assert [value.name for value in graph.inputs] == ["x"]
    (literal,) = [node for node in graph.nodes if node.op == CONSTANT]
    assert literal.args == ((0.5, 0.25, 3.0, 4.0),)
    assert evaluate(graph, {"x": torch.tensor([2.0, 10.0])})["y"].tolist() == [[1.0, 2.5], [6.0, 40.0]]


def test_where_a_tensor_is_leaves_no_trace() -> None:
    def function(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return [torch.zeros(2, 3, device=x.device, layout=torch.strided) + x.clone(memory_format=torch.preserve_format)]

    graph = capture("placed", function, {"x": F32}, ["y"])
    assert not {key for node in graph.nodes for key, _ in node.kwargs} & {"device", "layout", "memory_format"}


def test_dtypes_are_written_by_name() -> None:
    graph = capture("wide", lambda x: [x.to(torch.int64)], {"x": F32}, ["y"])
    assert dict(graph.nodes[-1].kwargs)["dtype"] == "i64"
    assert graph.output_types == (TensorType("i64", (2, 3)),)


def test_tracing_allocates_nothing() -> None:
    huge = TensorType("f32", (1 << 20, 1 << 20))
    graph = capture("huge", lambda x: [x @ x], {"x": huge}, ["y"])
    assert graph.output_types == (huge,)
    assert graph.nodes[0].args == (Ref("x"), Ref("x"))


def test_each_output_needs_a_name() -> None:
    with pytest.raises(InternalError, match="returns 2 tensors, 1 are named"):
        capture("pair", lambda x: [x, x], {"x": F32}, ["y"])


def test_operators_with_several_outputs_are_refused() -> None:
    with pytest.raises(InternalError, match="more than one output"):
        capture("sorted", lambda x: [torch.sort(x).values], {"x": F32}, ["y"])
