"""Every rewrite keeps the meaning of random graphs and of the traced layer, and does all of what it is there for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from npubundle.tensor import TensorType
from npucc.graph import Arg, Graph, Node, Ref, Value
from npucc.parts import Traced
from npucc.passes import remove_dead_code, simplify
from npucc.passes.canonicalize import canonicalize
from npucc.passes.common_subexpressions import merge_common_subexpressions
from npucc.passes.expands import BROADCASTING, broadcast, drop_expands
from npucc.passes.layouts import fold_layouts
from npucc.passes.plain_products import plain_products
from tests.npucc.passes.random_graphs import Sample, samples
from tests.npucc.tiny import SEQ_LEN, assert_equal_functions, causal_tables, evaluate, random_inputs

FEW = settings(max_examples=30, deadline=None)
Pass = Callable[[Graph], Graph]
PASSES: list[Pass] = [
    canonicalize, drop_expands, fold_layouts, merge_common_subexpressions, plain_products, remove_dead_code, simplify
]  # fmt: skip
F = "f32"


def graph_of(*nodes: Node, x: tuple[int, ...] = (2, 3)) -> Graph:
    """A graph whose last node is its output."""
    return Graph("g", (Value("x", TensorType(F, x)),), nodes, (("out", nodes[-1].name),))


def node(name: str, op: str, *args: Arg, shape: tuple[int, ...] = (2, 3), dtype: str = F) -> Node:
    return Node(name, f"aten.{op}", args, (), TensorType(dtype, shape))


@pytest.mark.parametrize("apply", PASSES, ids=lambda apply: apply.__name__)
@FEW
@given(sample=samples())
def test_a_pass_keeps_the_meaning_of_random_graphs(apply: Pass, sample: Sample) -> None:
    after = apply(sample.graph)
    assert_equal_functions(sample.graph, after, sample.inputs)
    assert after.output_types == sample.graph.output_types
    assert after.inputs == sample.graph.inputs


@pytest.mark.parametrize("apply", PASSES, ids=lambda apply: apply.__name__)
def test_a_pass_keeps_the_meaning_of_the_traced_layer(apply: Pass, traced: Traced) -> None:
    before = canonicalize(traced.layer)
    values = random_inputs(before, **causal_tables(SEQ_LEN, traced.model.config.head_dim))
    assert_equal_functions(traced.layer, before, values)
    assert_equal_functions(before, apply(before), values)


@FEW
@given(sample=samples())
def test_types_say_what_values_are(sample: Sample) -> None:
    """Each node's declared type is that of its value: targets and the memory plan rely on it."""
    graph = simplify(sample.graph)
    everything = Graph("all", graph.inputs, graph.nodes, tuple((n.name, n.name) for n in graph.nodes))
    for name, value in evaluate(everything, sample.inputs).items():
        assert tuple(value.shape) == graph.types[name].shape, name


@FEW
@given(sample=samples())
def test_canonical_graphs_have_one_spelling_per_meaning(sample: Sample) -> None:
    ops = {n.op.removeprefix("aten.") for n in canonicalize(sample.graph).nodes}
    gone = {
        "clone.default", "detach.default", "alias.default", "t.default", "transpose.int", "unsqueeze.default",
        "squeeze.dim", "reshape.default", "add.Scalar", "mul.Scalar", "sub.Scalar", "div.Scalar", "sum.default",
        "zeros_like.default", "ones_like.default", "full_like.default", "new_zeros.default", "pow.Tensor_Scalar",
    }  # fmt: skip
    assert not ops & gone
    assert all(not n.kwargs for n in canonicalize(sample.graph).nodes)


def test_fills_are_typed_by_their_tensor() -> None:
    graph = canonicalize(graph_of(node("a", "full_like.default", Ref("x"), True)))
    assert repr(graph.nodes[0].args) == repr(((2, 3), 1.0))
    graph = canonicalize(graph_of(node("a", "full_like.default", Ref("x"), 2.0, dtype="i32")))
    assert repr(graph.nodes[0].args) == repr(((2, 3), 2))


def test_powers_that_are_no_small_whole_number_stay() -> None:
    graph = graph_of(node("a", "pow.Tensor_Scalar", Ref("x"), 0.5))
    assert canonicalize(graph) == graph


def test_a_select_of_one_among_many_stays() -> None:
    graph = graph_of(node("a", "select.int", Ref("x"), 0, 1, shape=(3,)))
    assert canonicalize(graph) == graph


@FEW
@given(sample=samples())
def test_no_layout_operator_follows_its_own_kind(sample: Sample) -> None:
    graph = remove_dead_code(fold_layouts(canonicalize(sample.graph)))
    for n in graph.nodes:
        if n.op in {"aten.view.default", "aten.permute.default"}:
            (source,) = n.refs()
            inner = graph.producers.get(source)
            assert inner is None or inner.op != n.op
            assert n.op != "aten.view.default" or n.type != graph.types[source]


def test_layouts_that_cancel_vanish() -> None:
    graph = graph_of(
        node("a", "permute.default", Ref("x"), (1, 0), shape=(3, 2)),
        node("b", "permute.default", Ref("a"), (-1, 0)),
        node("c", "view.default", Ref("b"), (6,), shape=(6,)),
        node("d", "view.default", Ref("c"), (2, 3)),
    )
    assert remove_dead_code(fold_layouts(graph)).nodes == ()


@FEW
@given(sample=samples())
def test_equal_expressions_are_computed_once(sample: Sample) -> None:
    nodes = merge_common_subexpressions(sample.graph).nodes
    assert len({repr((n.op, n.args, n.kwargs, n.type)) for n in nodes}) == len(nodes)


def test_expressions_that_only_compare_equal_are_both_computed() -> None:
    total = node("d", "add.Tensor", Ref("a"), Ref("c"))
    graph = graph_of(
        node("a", "mul.Tensor", Ref("x"), 2),
        node("b", "mul.Tensor", Ref("x"), 2.0),
        node("c", "mul.Tensor", Ref("x"), 2),
        total,
    )
    merged = merge_common_subexpressions(graph)
    assert [n.name for n in merged.nodes] == ["a", "b", "d"]
    assert merged.nodes[-1].args == (Ref("a"), Ref("a"))


def test_casts_to_two_dtypes_are_two_values() -> None:
    graph = graph_of(
        node("a", "_to_copy.default", Ref("x"), dtype="i32"), node("b", "_to_copy.default", Ref("x"), dtype="i64"),
        node("c", "mul.Tensor", Ref("a"), Ref("b"), dtype="i64"),
    )  # fmt: skip
    assert merge_common_subexpressions(graph) == graph


@FEW
@given(sample=samples())
def test_every_node_that_is_left_is_needed(sample: Sample) -> None:
    graph = remove_dead_code(sample.graph)
    read = {name for n in graph.nodes for name in n.refs()} | {value for _, value in graph.outputs}
    assert all(n.name in read for n in graph.nodes)


def test_fewer_outputs_need_fewer_nodes_and_inputs() -> None:
    graph = Graph(
        "g",
        (Value("x", TensorType(F, (2, 3))), Value("y", TensorType(F, (2, 3)))),
        (node("a", "neg.default", Ref("x")), node("b", "neg.default", Ref("y"))),
        (("first", "a"), ("second", "b")),
    )
    cut = remove_dead_code(graph, {"second"}, drop_inputs=True)
    assert ([v.name for v in cut.inputs], [n.name for n in cut.nodes], cut.outputs) == (
        ["y"],
        ["b"],
        (("second", "b"),),
    )
    assert [v.name for v in remove_dead_code(graph, {"second"}).inputs] == ["x", "y"]


@FEW
@given(sample=samples())
def test_arithmetic_reads_no_expanded_value_that_it_could_broadcast(sample: Sample) -> None:
    graph = drop_expands(canonicalize(sample.graph))
    for n in graph.nodes:
        if n.op in BROADCASTING:
            for name in n.refs():
                producer = graph.producers.get(name)
                assert producer is None or producer.op != "aten.expand.default"


def test_a_scaled_expansion_is_scaled_before_it_grows() -> None:
    graph = graph_of(
        node("a", "expand.default", Ref("x"), (4, 3), shape=(4, 3)),
        node("b", "mul.Tensor", Ref("a"), 0.5, shape=(4, 3)),
        x=(1, 3),
    )
    after = remove_dead_code(drop_expands(graph))
    assert [(n.op, n.type.shape) for n in after.nodes] == [("aten.mul.Tensor", (1, 3)), ("aten.expand.default", (4, 3))]


def test_broadcast_shapes() -> None:
    assert broadcast([(2, 1), (3,)]) == (2, 3)
    assert broadcast([(), (4, 1, 2)]) == (4, 1, 2)
    assert broadcast([]) == ()
