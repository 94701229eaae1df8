"""Which node of which part goes wrong: in a graph that a target's compiler refuses, or that it computes wrongly."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from npucc.errors import CompilerError, UnsupportedOperatorError
from npucc.graph import Graph, Node, described
from npucc.numerics import Sampler, bound_of, errors
from npucc.passes.dead_code import remove_dead_code
from npucc.targets import CompiledPart, Target

_LAYOUTS = {"aten.view.default", "aten.permute.default", "aten.expand.default", "constant"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a part: it is `refused` by the compiler, or its results are `wrong`.

    `node` is the first with which it goes wrong; None if time ran out, or if no node alone is to blame. `graph` is the
    smallest graph found that still goes wrong.
    """

    part: str
    kind: str
    text: str
    node: Node | None
    graph: Graph

    def __str__(self) -> str:
        """For people, in one line and the compiler's own words."""
        at = f"first at {described(self.node)}" if self.node else "no single node was found"
        return f"{self.part}: {self.kind}, {at}\n    " + self.text.replace("\n", "\n    ")


def examine(graph: Graph, target: Target, samplers: Mapping[str, Sampler], seconds: float) -> Finding | None:
    """Compile and run a part; None if it is as it should be. Searches for a node for about so many seconds at most."""
    try:
        part = target.compile_part(graph)
    except UnsupportedOperatorError as refusal:
        return _refused(graph, target, refusal, seconds)
    return examine_compiled(graph, part, target, samplers)


def examine_compiled(
    graph: Graph, part: CompiledPart, target: Target, samplers: Mapping[str, Sampler]
) -> Finding | None:
    """Run a part; None if its results are within the target's bound."""
    found = errors(graph, part, target, samplers)
    bounds = [bound_of(kind, target) for kind in graph.output_types]
    wrong = [(error, bound) for error, bound in zip(found, bounds, strict=True) if not error.within(bound)]
    if not wrong:
        return None
    text = "; ".join(f"{error.output} differs by {error.relative:.3g} (bound {bound:.3g})" for error, bound in wrong)
    return _finding(graph, "wrong", text, _first_wrong(graph, target, samplers))


def _refused(graph: Graph, target: Target, refusal: CompilerError, seconds: float) -> Finding:
    def fails(part: Graph) -> bool:
        try:
            target.compile_part(part)
        except UnsupportedOperatorError:
            return True
        return False

    return _finding(graph, "refused", refusal.what, first_failing(graph, fails, seconds))


def _finding(graph: Graph, kind: str, text: str, count: int | None) -> Finding:
    """With the first `count` nodes it goes wrong; None where nobody knows."""
    if count is None:
        return Finding(graph.name, kind, text, None, graph)
    return Finding(graph.name, kind, text, graph.nodes[count - 1], prefix(graph, count))


def first_failing(graph: Graph, fails: Callable[[Graph], bool], seconds: float) -> int | None:
    """The least number of nodes, from the first on, that fail together; None where time runs out.

    `graph` itself fails. Bisection: what holds for a number of nodes is taken to hold for more.
    """
    started = time.monotonic()
    good, bad = 0, len(graph.nodes)
    while bad - good > 1:
        if time.monotonic() - started > seconds:
            return None
        middle = (good + bad) // 2
        part = prefix(graph, middle)
        if part.outputs and fails(part):
            bad = middle
        else:
            good = middle
    return bad


def prefix(graph: Graph, count: int) -> Graph:
    """The first `count` nodes; outputs are what none of them reads, but for mere arrangements of inputs."""
    nodes = graph.nodes[:count]
    read = {name for node in nodes for name in node.refs()}
    ends = [node.name for node in nodes if node.name not in read and node.op not in _LAYOUTS]
    outputs = tuple((name, name) for name in ends)
    cut = dataclasses.replace(graph, name=f"{graph.name}[:{count}]", nodes=nodes, outputs=outputs)
    return remove_dead_code(cut, drop_inputs=True)


def _first_wrong(graph: Graph, target: Target, samplers: Mapping[str, Sampler]) -> int | None:
    """The least number of nodes of which one has a value beyond its bound, all of them made outputs of one graph."""
    shown = {
        node.name: count
        for count, node in enumerate(graph.nodes, 1)
        if node.op not in _LAYOUTS and node.type.dtype != "bool"
    }
    everything = dataclasses.replace(graph, outputs=tuple((name, name) for name in shown))
    try:
        found = errors(everything, target.imported(everything), target, samplers)
    except CompilerError:
        return None
    beyond = (shown[e.output] for e in found if not e.within(bound_of(graph.types[e.output], target)))
    return next(beyond, None)
