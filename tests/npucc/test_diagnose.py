"""Finding the node at fault, with compilers that refuse an operator or get one wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from npubundle.tensor import TensorType
from npucc.diagnose import Finding, examine, first_failing, prefix
from npucc.errors import UnsupportedOperatorError
from npucc.graph import Graph, Node, Ref
from npucc.graph.capture import capture
from npucc.models.layers import rms_norm
from npucc.passes import simplify
from npucc.targets import CompiledPart, cpu
from tests.npucc.faulty_targets import FaultyTarget
from tests.npucc.tiny import evaluate, random_inputs

X = TensorType("f32", (4, 6))


def chain() -> Graph:
    """A norm, then a sigmoid of it, then their product."""

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        h = rms_norm(x, w, 1e-5)
        s = torch.sigmoid(h)
        return [(h * s).t().contiguous(), s.sum(0)]

    return simplify(capture("chain", function, {"x": X, "w": TensorType("f32", (6,))}, ["y", "sum"]))


class Refusing(FaultyTarget):
    """A compiler that does not know an operator."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def compile_part(self, graph: Graph) -> CompiledPart:
        if any(node.op == self.op for node in graph.nodes):
            raise UnsupportedOperatorError("no tactics", where=graph.name)
        return super().compile_part(graph)


def halved(op: str) -> Callable[[Graph], Graph]:
    """A miscompilation: what this operator gives is halved."""

    def spoil(graph: Graph) -> Graph:
        nodes: list[Node] = []
        for node in graph.nodes:
            if node.op == op:
                nodes.append(dataclasses.replace(node, name=f"{node.name}_whole"))
                args = (Ref(f"{node.name}_whole"), 0.5)
                nodes.append(dataclasses.replace(node, op="aten.mul.Tensor", args=args, kwargs=()))
            else:
                nodes.append(node)
        return dataclasses.replace(graph, nodes=tuple(nodes))

    return spoil


def found(target: FaultyTarget, seconds: float = 60) -> Finding:
    finding = examine(chain(), target, {}, seconds)
    assert finding is not None
    return finding


@pytest.mark.parametrize("op", ["aten.rsqrt.default", "aten.sigmoid.default", "aten.sum.dim_IntList", "aten.mean.dim"])
def test_the_first_node_that_is_refused(op: str) -> None:
    finding = found(Refusing(op))
    assert finding.kind == "refused"
    assert finding.node is not None
    assert finding.node.op == op
    assert finding.graph.nodes[-1].op == op
    assert len(finding.graph.nodes) < len(chain().nodes) or op == chain().nodes[-1].op


@pytest.mark.parametrize("op", ["aten.rsqrt.default", "aten.sigmoid.default", "aten.sum.dim_IntList"])
def test_the_first_node_whose_value_is_wrong(op: str) -> None:
    finding = found(FaultyTarget(spoil=halved(op)))
    assert finding.kind == "wrong"
    assert finding.node is not None
    assert finding.node.op == op
    assert finding.graph.nodes[-1].name == finding.node.name


def test_the_finding_reads_as_a_line_and_the_compilers_words() -> None:
    head, *rest = str(found(Refusing("aten.rsqrt.default"))).splitlines()
    assert head.startswith("chain: refused, first at v")
    assert "aten.rsqrt.default f32[4,1] (models/layers.py:" in head
    assert rest == ["    no tactics"]


def test_a_part_that_is_right_has_none() -> None:
    assert examine(chain(), cpu, {}, 60) is None


def test_time_may_run_out() -> None:
    finding = found(Refusing("aten.rsqrt.default"), seconds=-1)
    assert finding.node is None
    assert "no single node was found" in str(finding)
    assert finding.graph == chain()


def test_every_prefix_computes_what_the_graph_does() -> None:
    graph = chain()
    everything = dataclasses.replace(graph, outputs=tuple((n.name, n.name) for n in graph.nodes))
    inputs = random_inputs(graph)
    whole = evaluate(everything, inputs)
    for count in range(1, len(graph.nodes) + 1):
        part = prefix(graph, count)
        for name, value in evaluate(part, inputs).items():
            torch.testing.assert_close(value, whole[name])


def test_bisection_asks_few() -> None:
    asked: list[int] = []

    def fails(part: Graph) -> bool:
        asked.append(len(part.nodes))
        return any(node.op == "aten.sigmoid.default" for node in part.nodes)

    count = first_failing(chain(), fails, 60)
    assert count is not None
    assert chain().nodes[count - 1].op == "aten.sigmoid.default"
    assert len(asked) <= len(chain().nodes).bit_length()
