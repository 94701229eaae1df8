from __future__ import annotations

import pytest
import torch

from npubundle.tensor import TensorType
from npucc.graph.capture import capture
from npucc.graph.interpret import interpret

X = TensorType("f32", (2, 3))


def test_floating_point_is_widened_and_integers_are_not() -> None:
    inputs = {"x": X, "n": TensorType("i32", (3,))}
    graph = capture("both", lambda x, n: [x * n, n + 1, x > 0], inputs, ["product", "next", "positive"])
    x, n = torch.tensor([[0.1, 0.2, 0.3], [1.0, -1.0, 0.0]]), torch.tensor([1, 2, 3], dtype=torch.int32)
    product, following, positive = interpret(graph, [x, n])
    assert torch.equal(product, x.double() * n)
    assert (product.dtype, following.dtype, positive.dtype) == (torch.float64, torch.int32, torch.bool)


def test_without_widening_a_graph_does_what_the_function_did() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.softmax(x.t() @ x, -1), torch.full((2,), 3), x.to(torch.float16)]

    graph = capture("as.it.was", function, {"x": X}, ["a", "b", "c"])
    x = torch.rand(2, 3)
    for actual, expected in zip(interpret(graph, [x], widen=False), function(x), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def test_a_table_that_is_only_indexed_is_not_copied() -> None:
    table, picked = TensorType("f32", (5, 2)), TensorType("i32", (3,))
    graph = capture("embed", lambda t, i: [t.index_select(0, i)], {"t": table, "i": picked}, ["rows"])
    values = torch.rand(5, 2)
    (rows,) = interpret(graph, [values, torch.tensor([4, 0, 4], dtype=torch.int32)])
    assert rows.dtype == torch.float64
    assert torch.equal(rows, values[[4, 0, 4]].double())


def test_inputs_of_another_shape_are_refused() -> None:
    graph = capture("same", lambda x: [x + 1], {"x": X}, ["y"])
    with pytest.raises(ValueError, match=r"input x of same is f32\[2,3\], got shape \(3, 2\)"):
        interpret(graph, [torch.zeros(3, 2)])
