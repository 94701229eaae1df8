from __future__ import annotations

import pytest

from npubundle.tensor import TensorType
from npucc.errors import InternalError
from npucc.graph import Arg, Graph, Node, Ref, Value
from npucc.passes.inplace import inplace_pairs
from npucc.training import optimizer

KIND = TensorType("f32", (4,))


def graph_of(*nodes: tuple[str, str, tuple[Arg, ...]], outputs: tuple[tuple[str, str], ...] = (("out", "b"),)) -> Graph:
    made = tuple(Node(name, f"aten.{op}", args, (), KIND) for name, op, args in nodes)
    return Graph("g", (Value("x", KIND), Value("y", KIND)), made, outputs)


def test_the_optimizer_updates_its_state_in_place() -> None:
    wanted = {"new_param": "param", "new_moment1": "moment1", "new_moment2": "moment2"}
    assert inplace_pairs(optimizer.adamw(6), wanted) == ((0, 0), (1, 1), (2, 2))
    assert inplace_pairs(optimizer.accumulate(6), {"new_grad": "grad"}) == ((0, 0),)


def test_an_elementwise_writer_that_reads_last_may_write_over_its_input() -> None:
    graph = graph_of(("a", "sigmoid.default", (Ref("x"),)), ("b", "mul.Tensor", (Ref("a"), Ref("x"))))
    assert inplace_pairs(graph, {"out": "x"}) == ((0, 0),)


def test_an_input_that_is_read_after_the_output_is_written_is_refused() -> None:
    graph = graph_of(
        ("b", "mul.Tensor", (Ref("x"), 2.0)),
        ("late", "add.Tensor", (Ref("b"), Ref("x"))),
        outputs=(("out", "b"), ("sum", "late")),
    )
    with pytest.raises(InternalError, match=r"out cannot be written over x .*late"):
        inplace_pairs(graph, {"out": "x"})


def test_a_reader_without_order_to_the_writer_is_refused() -> None:
    """It stands earlier in the list, but an executor may run it later."""
    graph = graph_of(
        ("other", "sigmoid.default", (Ref("x"),)),
        ("b", "mul.Tensor", (Ref("x"), 2.0)),
        outputs=(("out", "b"), ("sigmoid", "other")),
    )
    with pytest.raises(InternalError, match="read later by"):
        inplace_pairs(graph, {"out": "x"})


def test_a_writer_that_is_not_elementwise_is_refused() -> None:
    graph = graph_of(("b", "roll.default", (Ref("x"), (1,), (0,))))
    with pytest.raises(InternalError, match=r"aten\.roll\.default"):
        inplace_pairs(graph, {"out": "x"})


def test_an_input_of_another_type_is_refused() -> None:
    node = Node("b", "aten.mul.Tensor", (Ref("x"), 2.0), (), TensorType("f32", (3, 4)))
    graph = Graph("g", (Value("x", KIND),), (node,), (("out", "b"),))
    with pytest.raises(InternalError, match="cannot be written over"):
        inplace_pairs(graph, {"out": "x"})
