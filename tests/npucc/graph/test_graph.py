from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys

import pytest

from npubundle.tensor import TensorType
from npucc.graph import Arg, Graph, Node, Ref, Value
from npucc.parts import Traced

F32 = TensorType("f32", (2, 3))
EVERY_KIND: tuple[Arg, ...] = (Ref("x"), 2, 2.0, True, None, "f16", -0.5, ((1, Ref("y")), (), 1e-30))

#: Prints one digest for each graph of the model that this process traces as well.
TRACE = """
import hashlib
from npucc.parts import trace
from tests.npucc import tiny
traced = trace(tiny.model(), tiny.recipe(targets=("q", "v", "down"), logits=True), tiny.CUT)
for name, spec in sorted(traced.parts.items()):
    print(name, hashlib.sha256(spec.graph.encode()).hexdigest())
"""


def small(*nodes: Node, name: str = "small") -> Graph:
    return Graph(name, (Value("x", F32), Value("y", F32)), nodes, (("out", nodes[-1].name),))


def one(*args: Arg, **kwargs: Arg) -> Graph:
    return small(Node("a", "aten.mul.Tensor", args, tuple(kwargs.items()), F32))


def test_a_graph_survives_json() -> None:
    graph = one(*EVERY_KIND, alpha=2.0, dtype="f32")
    document = json.loads(graph.encode())
    again = Graph.from_dict("small", document)
    assert again == graph
    assert [type(arg) for arg in again.nodes[0].args] == [type(arg) for arg in graph.nodes[0].args]


def test_every_traced_graph_survives_json(traced: Traced) -> None:
    for graph in (traced.layer, *(spec.graph for spec in traced.parts.values())):
        again = Graph.from_dict(graph.name, json.loads(graph.encode()))
        assert again == graph
        assert again.encode() == graph.encode()


@pytest.mark.parametrize(("left", "right"), [(2, 2.0), (1, True), (0, False), (0, 0.0), (1.0, True), ((1,), (1.0,))])
def test_literals_that_compare_equal_are_kept_apart(left: Arg, right: Arg) -> None:
    assert one(Ref("x"), left).encode() != one(Ref("x"), right).encode()
    for literal in (left, right):
        again = Graph.from_dict("small", json.loads(one(literal).encode())).nodes[0].args[0]
        assert repr(again) == repr(literal)


def test_the_name_is_no_part_of_the_encoding() -> None:
    node = Node("a", "aten.neg.default", (Ref("x"),), (), F32)
    assert small(node, name="one").encode() == small(node, name="two").encode()


@pytest.mark.parametrize("seed", range(5))
def test_equal_graphs_have_equal_text_whatever_their_nodes_are_called(traced: Traced, seed: int) -> None:
    graph = traced.parts["layer.backward"].graph
    shuffled = list(range(len(graph.nodes)))
    random.Random(seed).shuffle(shuffled)
    names = {v.name: v.name for v in graph.inputs}
    names |= {node.name: f"other{number}" for node, number in zip(graph.nodes, shuffled, strict=True)}
    renamed = dataclasses.replace(
        graph,
        nodes=tuple(dataclasses.replace(n.mapped(names.__getitem__), name=names[n.name]) for n in graph.nodes),
        outputs=tuple((out, names[value]) for out, value in graph.outputs),
    )
    assert renamed != graph
    assert renamed.renumbered() == graph.renumbered()
    assert renamed.renumbered().as_text() == graph.renumbered().as_text()


def test_renumbering_is_done_once(traced: Traced) -> None:
    graph = traced.layer.renumbered()
    assert graph.renumbered() == graph
    assert [node.name for node in graph.nodes] == [f"v{index}" for index in range(len(graph.nodes))]


def test_references_are_found_wherever_they_stand() -> None:
    node = Node("a", "op", (Ref("x"), (Ref("y"), (Ref("x"),)), 3), (("other", Ref("z")),), F32)
    assert list(node.refs()) == ["x", "y", "x", "z"]
    assert list(node.mapped(str.upper).refs()) == ["X", "Y", "X", "Z"]


def test_a_graph_knows_types_producers_and_users() -> None:
    double = Node("a", "aten.add.Tensor", (Ref("x"), Ref("x")), (), F32)
    total = Node("b", "aten.sum.dim_IntList", (Ref("a"), (0, 1)), (), TensorType("f32", ()))
    graph = Graph("g", (Value("x", F32),), (double, total), (("double", "a"), ("total", "b")))
    assert graph.types == {"x": F32, "a": F32, "b": TensorType("f32", ())}
    assert graph.producers == {"a": double, "b": total}
    assert graph.users == {"x": (double,), "a": (total,), "b": ()}
    assert graph.output_types == (F32, TensorType("f32", ()))


def test_text_shows_every_line_and_shortens_long_literals() -> None:
    node = Node("a", "constant", (tuple(float(n) for n in range(20)),), (), TensorType("f32", (20,)))
    graph = Graph("g", (Value("x", F32),), (node,), (("out", "a"),))
    assert graph.as_text() == (
        "graph g(\n    x: f32[2,3],\n):\n"
        "    a: f32[20] = constant([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, …])\n    return out=a\n"
    )


def test_encodings_are_equal_in_a_process_that_hashes_differently(traced: Traced) -> None:
    environment = os.environ | {"PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    there = subprocess.run(
        [sys.executable, "-c", TRACE], env=environment, check=True, capture_output=True, text=True, timeout=120
    ).stdout
    here = {name: hashlib.sha256(spec.graph.encode()).hexdigest() for name, spec in traced.parts.items()}
    assert there.splitlines() == [f"{name} {digest}" for name, digest in sorted(here.items())]
