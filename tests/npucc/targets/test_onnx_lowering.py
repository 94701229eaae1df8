"""Every operator's ONNX form against its meaning, through onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch

from npubundle.tensor import TensorType
from npucc.errors import UnsupportedOperatorError
from npucc.graph import Graph, Node, Ref, Value
from npucc.graph.capture import capture
from npucc.graph.interpret import interpret
from npucc.numerics import sample_inputs
from npucc.parts import Traced, samplers
from npucc.passes import simplify
from npucc.passes.canonicalize import canonicalize
from npucc.targets import cpu
from npucc.targets.onnx_lowering import _HANDLERS, OPSET, lower
from tests.npucc.targets.operator_cases import CASES, Case, Function, graph_of


def values(graph: Graph) -> list[torch.Tensor]:
    """Random values; indices stay below 2, the size of the smallest axis that is indexed."""
    generator = torch.Generator().manual_seed(3)
    made: list[torch.Tensor] = []
    for value in graph.inputs:
        if value.type.dtype == "f32":
            made.append(torch.randn(value.type.shape, generator=generator))
        elif value.type.dtype == "bool":
            made.append(torch.randn(value.type.shape, generator=generator) > 0)
        else:
            dtype = torch.int32 if value.type.dtype == "i32" else torch.int64
            made.append(torch.randint(0, 2, value.type.shape, generator=generator, dtype=dtype))
    return made


def run(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[npt.NDArray[np.generic]]:
    arrays = {value.name: tensor.numpy() for value, tensor in zip(graph.inputs, inputs, strict=True)}
    return list(cpu.execute(cpu.compile_part(graph), graph, arrays))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_operator_does_in_onnx_what_it_does_in_torch(case: Case) -> None:
    graph = graph_of(case)
    onnx.checker.check_model(lower(graph), full_check=True)
    inputs = values(graph)
    for actual, expected in zip(run(graph, inputs), interpret(graph, inputs, widen=False), strict=True):
        assert actual.dtype == expected.numpy().dtype
        torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_no_operator_is_untested() -> None:
    used = {node.op for case in CASES for node in graph_of(case).nodes}
    assert used | {"constant"} == set(_HANDLERS)


def test_a_literal_tensor_is_what_it_says() -> None:
    kind = TensorType("f32", (2, 2))
    node = Node("c", "constant", ((1.0, 2.0, 3.0, 0.1),), (), kind)
    graph = Graph("g", (), (node,), (("y", "c"),))
    (actual,) = cpu.execute(cpu.compile_part(graph), graph, {})
    assert actual.tolist() == [[1.0, 2.0], [3.0, float(np.float32(0.1))]]


def test_the_first_of_equal_maxima_wins() -> None:
    graph = capture("g", lambda x: [x.argmax(1)], {"x": TensorType("f32", (2, 5))}, ["y"])
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert run(graph, [x])[0].tolist() == [1, 0]


def test_outputs_may_be_inputs_constants_and_each_other() -> None:
    kind = TensorType("f32", (2,))
    nodes = (
        Node("a", "aten.neg.default", (Ref("x"),), (), kind),
        Node("c", "constant", ((5.0, 6.0),), (), kind),
        Node("b", "aten.mul.Tensor", (Ref("a"), Ref("a")), (), kind),
    )
    outputs = (("first", "a"), ("second", "a"), ("same", "x"), ("fixed", "c"), ("square", "b"), ("same2", "x"))
    graph = Graph("g", (Value("x", kind),), nodes, outputs)
    onnx.checker.check_model(lower(graph), full_check=True)
    found = [array.tolist() for array in run(graph, [torch.tensor([2.0, 3.0])])]
    assert found == [[-2.0, -3.0], [-2.0, -3.0], [2.0, 3.0], [5.0, 6.0], [4.0, 9.0], [2.0, 3.0]]
    assert [output.name for output in onnx.load_from_string(lower(graph)).graph.output] == [
        f"out.{n}" for n, _ in outputs
    ]


def test_bf16_is_moved_and_converted() -> None:
    """Tables of weights lie in bf16; a check hands it over as f32 that bf16 can hold, and gets it back like that."""

    def function(table: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor]:
        picked = table.index_select(0, rows)
        return [picked, picked.to(torch.float32) + 1, x.to(torch.bfloat16).t()]

    kinds = {"table": TensorType("bf16", (4, 3)), "rows": TensorType("i32", (2,)), "x": TensorType("f32", (2, 3))}
    graph = simplify(capture("g", function, kinds, ["picked", "widened", "narrow"]))
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(4, 3, generator=generator).to(torch.bfloat16)
    rows, x = torch.tensor([3, 1], dtype=torch.int32), torch.randn(2, 3, generator=generator)
    actual = run(graph, [table.to(torch.float32), rows, x])
    expected = [result.to(torch.float32) for result in function(table, rows, x)]
    assert [array.dtype for array in actual] == [np.float32] * 3
    assert all(np.array_equal(array, tensor.numpy()) for array, tensor in zip(actual, expected, strict=True))


def test_bf16_arithmetic_is_exact_and_then_rounded() -> None:
    """As PyTorch has it: each operator's result is rounded, sums inside one are not."""

    def function(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor]:
        product = a @ b.t()
        return [product, product * 1.7 + product, product + x, product.argmax(1), (product > 0).to(torch.float32)]

    kinds = {"a": TensorType("bf16", (4, 64)), "b": TensorType("bf16", (5, 64)), "x": TensorType("f32", (4, 5))}
    graph = simplify(capture("g", function, kinds, ["product", "twice", "wide", "best", "positive"]))
    onnx.checker.check_model(lower(graph), full_check=True)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(n, 64, generator=generator).to(torch.bfloat16) for n in (4, 5))
    x = torch.randn(4, 5, generator=generator)
    actual = run(graph, [a.to(torch.float32), b.to(torch.float32), x])
    product = (a.to(torch.float32) @ b.to(torch.float32).t()).to(torch.bfloat16)
    wide = product.to(torch.float32)
    rounded = (wide * 1.7).to(torch.bfloat16).to(torch.float32)
    expected = [wide, (rounded + wide).to(torch.bfloat16), wide + x, wide.argmax(1), wide > 0]
    assert all(np.array_equal(one, two.to(torch.float32).numpy()) for one, two in zip(actual, expected, strict=True))


def test_unknown_operators_are_all_named() -> None:
    kinds = {"x": TensorType("f32", (2, 3))}
    graph = capture("g", lambda x: [torch.erf(x), torch.atan(x), torch.exp(x)], kinds, ["a", "b", "c"])
    with pytest.raises(UnsupportedOperatorError, match=r"aten\.atan\.default, aten\.erf\.default") as caught:
        lower(graph)
    assert int(caught.value.exit_code) == 3
    assert "graph g" in str(caught.value)
    assert "aten.exp.default" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: torch.roll(x, (1, 1), (0, 1)), "roll"),
        (lambda x: torch.roll(x, 1), "roll"),
        (lambda x: x.argmax(), "argmax"),
        (lambda x: x.index_add(0, torch.zeros(1, dtype=torch.int32), x[:1]), "index_add"),
    ],
)
def test_forms_without_a_counterpart_are_refused_by_name(function: Function, named: str) -> None:
    graph = canonicalize(capture("g", lambda x: [function(x)], {"x": TensorType("f32", (2, 3))}, ["y"]))
    with pytest.raises(UnsupportedOperatorError, match=named):
        lower(graph)


def test_every_part_is_valid_standard_onnx_without_a_trace_of_its_maker(traced: Traced) -> None:
    for spec in traced.parts.values():
        payload = lower(spec.graph)
        onnx.checker.check_model(payload, full_check=True)
        model = onnx.load_from_string(payload)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
        assert {node.domain for node in model.graph.node} <= {""}
        assert [value.name for value in model.graph.input] == [value.name for value in spec.graph.inputs]
        assert [value.name for value in model.graph.output] == [f"out.{name}" for name, _ in spec.graph.outputs]
        assert (model.producer_name, model.producer_version, model.domain, model.doc_string) == ("", "", "", "")
        assert not model.metadata_props
        assert not model.functions
        told = [model.graph.doc_string, *(n.doc_string for n in model.graph.node), *(n.name for n in model.graph.node)]
        assert set(told) == {""}
        assert str(Path.cwd()).encode() not in payload
        assert b".py" not in payload


def test_weights_are_inputs_and_nothing_of_their_size_is_inside(traced: Traced) -> None:
    for spec in traced.parts.values():
        sizes = [int(np.prod(t.dims)) for t in onnx.load_from_string(lower(spec.graph)).graph.initializer]
        assert max(sizes, default=0) <= 8, spec.name


def test_equal_graphs_give_equal_bytes(traced: Traced) -> None:
    for spec in traced.parts.values():
        assert lower(spec.graph) == lower(Graph.from_dict("other", spec.graph.to_dict())), spec.name


def test_every_part_computes_its_graph(traced: Traced) -> None:
    """As a build checks it, but in f32 against f32, so that operators and not roundings are compared."""
    inputs = samplers(traced)
    for spec in traced.parts.values():
        arrays = sample_inputs(spec.graph, inputs)
        actual = cpu.execute(cpu.compile_part(spec.graph), spec.graph, arrays)
        tensors = [torch.from_numpy(arrays[value.name]) for value in spec.graph.inputs]
        for array, expected in zip(actual, interpret(spec.graph, tensors, widen=False), strict=True):
            torch.testing.assert_close(torch.from_numpy(array), expected, rtol=1e-4, atol=1e-5)
