"""Cuts a graph into a sequence of parts, each an interval of its nodes in order.

For targets whose compiler takes minutes over a whole layer, and hours over some. A part holds products with weights
that are independent of one another, or batched products (attention), and the elementwise work around them: in that
form vendors' compilers neither reorder products nor search long. Among all such cuts the one is taken that moves the
fewest bytes between parts, with a launch worth `LAUNCH_BYTES`, and transposes activations in attention's parts, where
it costs least: a shortest path over the places between nodes.

Views, turned matrices and casts to a wider type never cross: the part that wants one makes it again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from npucc.graph import Graph, Node, Ref, Value
from npucc.passes.casts import CAST
from npucc.passes.dead_code import remove_dead_code
from npucc.passes.layouts import LAYOUTS

#: Bytes that may cross for one launch less.
LAUNCH_BYTES = 1 << 20

#: Gradients of matrices that one part may hold.
GRADIENTS = 6

#: What it costs to transpose a byte of activations outside attention, in bytes that cross.
TRANSPOSE = 8

_REDUCTIONS = {"aten.mean.dim", "aten.amax.default", "aten._softmax.default"}
_KINDS = ("adapter", "batched", "gradient", "reduction", "rotation", "sum", "weight")


def cut_into_parts(
    graph: Graph, weights: set[str], products: int, *, prefix: str, late: set[str] | None = None
) -> list[Graph]:
    """Parts in order of execution, named after the graph; `weights` are inputs that are matrices.

    `products` is the most weights that a part multiplies with. Inputs and outputs keep their names; values that cross
    are named `prefix` and a number. Values that do not depend on the inputs `late` are computed just before their first
    use: in a backward graph, what forward computed already.
    """
    if late:
        gradients = {node.name for node in graph.nodes if _kind(graph, node, weights) == "gradient"}
        graph = _as_late_as_possible(graph, late, gradients)
    graph = _layouts_first(graph)
    stops = _cheapest(graph, _marks(graph, weights), products)
    parts = []
    start = 0
    for number, stop in enumerate(stops):
        parts.append(_part(graph, start, stop, f"{graph.name}.{number}"))
        start = stop
    return _with_short_names(parts, {value: out for out, value in graph.outputs}, prefix)


def _as_late_as_possible(graph: Graph, late: set[str], last: set[str]) -> Graph:
    """What does not depend on `late` before its first use, and what depends on the values `last` at the end."""
    downstream, ending = _downstream(graph, late), _downstream(graph, last)
    placed: set[str] = set()
    ordered: list[Node] = []

    def place(name: str) -> None:
        node = graph.producers.get(name)
        if node is None or name in placed:
            return
        for ref in node.refs():
            place(ref)
        placed.add(name)
        ordered.append(node)

    names = [node.name for node in graph.nodes if node.name in downstream]
    for name in [n for n in names if n not in ending] + [n for n in names if n in ending]:
        place(name)
    for _, value in graph.outputs:
        place(value)
    return dataclasses.replace(graph, nodes=tuple(ordered))


def _downstream(graph: Graph, values: set[str]) -> set[str]:
    """These values, and all that depend on them."""
    found = set(values)
    for node in graph.nodes:
        if found.intersection(node.refs()):
            found.add(node.name)
    return found


def _layouts_first(graph: Graph) -> Graph:
    """Views and transposes directly after what they arrange, so that a cut may lie behind them.

    So are outputs that are casts to a narrower type: what is kept for backward, and need not cross for it.
    """
    outputs = {value for _, value in graph.outputs}
    ordered: list[Node] = []
    placed: set[str] = set()

    def place(node: Node) -> None:
        if node.name in placed:
            return
        placed.add(node.name)
        ordered.append(node)
        for user in graph.users[node.name]:
            if user.op in LAYOUTS or (user.name in outputs and _narrows(graph, user)):
                place(user)

    for node in graph.nodes:
        place(node)
    return dataclasses.replace(graph, nodes=tuple(ordered))


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a cut has to know of a node: its kind, the positions of the nodes of any kind above it, its weight."""

    kind: str
    above: frozenset[int]
    weight: str | None


def _marks(graph: Graph, weights: set[str]) -> list[_Mark]:
    """Of every node, in order.

    Products are `weight` (with a weight), `adapter` (with a LoRA matrix), `rotation`, `batched`, or the `gradient` of a
    matrix, of two activations; then there are `sum` and other `reduction`.
    """
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    marks: list[_Mark] = []
    for node in graph.nodes:
        before = [position[name] for name in node.refs() if name in position]
        above = frozenset[int]().union(*(marks[p].above | ({p} if marks[p].kind else set()) for p in before))
        kind = _kind(graph, node, weights)
        weight = next(iter(_roots(graph, node) & weights)) if kind == "weight" else None
        marks.append(_Mark(kind, above, weight))
    return marks


def _kind(graph: Graph, node: Node, weights: set[str]) -> str:
    if node.op == "aten.mm.default":
        roots = _roots(graph, node)
        if roots & weights:
            return "weight"
        if "swap" in roots:
            return "rotation"
        return "adapter" if any(".lora_" in root for root in roots) else "gradient"
    if node.op == "aten.bmm.default":
        return "batched"
    if node.op == "aten.sum.dim_IntList":
        return "sum"
    return "reduction" if node.op in _REDUCTIONS else ""


def _roots(graph: Graph, node: Node) -> set[str]:
    return {_root(graph, name) for name in node.refs()}


def _root(graph: Graph, name: str) -> str:
    node = graph.producers.get(name)
    if node is not None and _arranges(node) and isinstance(node.args[0], Ref):
        return _root(graph, node.args[0].name)
    return name


def _fits(mark: _Mark, held: Mapping[str, set[int]]) -> bool:
    """Whether a node may join what a part holds already.

    Found by compiling: products with weights that feed one another, a reduction or a rotation of what the part's own
    products made, and both kinds of products together take many minutes or fail. A product of what the gradient of a
    norm gives takes five times as long as both apart, and gains nothing. So do gradients of matrices beside products
    with weights.
    """
    if mark.kind == "weight":
        apart = held["batched"] or held["rotation"] or held["gradient"]
        return not (apart or mark.above & (held["weight"] | held["sum"]))
    if mark.kind == "batched":
        return not (held["weight"] or held["gradient"])
    if mark.kind == "rotation":
        return not (held["weight"] or held["gradient"] or mark.above & held["batched"])
    if mark.kind == "gradient":
        apart = held["batched"] or held["rotation"] or held["sum"] or held["weight"]
        return not apart and len(held["gradient"]) < GRADIENTS
    if mark.kind == "sum" and held["gradient"]:
        return False
    return mark.kind not in {"reduction", "sum"} or not mark.above & held["weight"]


def _cheapest(graph: Graph, marks: Sequence[_Mark], products: int) -> list[int]:
    """Ends of the parts: the cheapest way from the first node to the last."""
    count = len(graph.nodes)
    best = [0.0] + [math.inf] * count
    before = [0] * (count + 1)
    for start in range(count):
        if math.isinf(best[start]):
            continue
        held: dict[str, set[int]] = {kind: set() for kind in _KINDS}
        for stop in range(start + 1, count + 1):
            mark = marks[stop - 1]
            if not _fits(mark, held):
                break
            if mark.kind:
                held[mark.kind].add(stop - 1)
            if len({marks[position].weight for position in held["weight"]}) > products:
                break
            cost = best[start] + LAUNCH_BYTES + _crossing(graph, start, stop)
            if not held["batched"]:
                transposed = (node.type.nbytes for node in graph.nodes[start:stop] if _transposes(graph, node))
                cost += TRANSPOSE * sum(transposed)
            if cost < best[stop]:
                best[stop], before[stop] = cost, start
    stops = [count]
    while before[stops[-1]]:
        stops.append(before[stops[-1]])
    return stops[::-1]


def _crossing(graph: Graph, start: int, stop: int) -> int:
    """Bytes that the nodes from `start` to `stop` hand to later ones, or read from earlier ones."""
    inside = {node.name for node in graph.nodes[start:stop]}
    part_outputs = _outputs(graph, stop, inside)
    reads, _ = _needed(graph, graph.nodes[start:stop], inside)
    return sum(graph.types[name].nbytes for name in (*part_outputs, *(r for r in reads if r in graph.producers)))


def _transposes(graph: Graph, node: Node) -> bool:
    """Whether this shuffles an activation of more than two axes."""
    return node.op == "aten.permute.default" and len(node.type.shape) > 2 and _root(graph, node.name) in graph.producers


def _arranges(node: Node) -> bool:
    """Whether this is another layout or dtype of its operand."""
    return node.op in LAYOUTS or node.op == CAST


def _narrows(graph: Graph, node: Node) -> bool:
    """Whether this is a cast to a type of fewer bytes."""
    operand = node.args[0] if node.op == CAST else None
    return isinstance(operand, Ref) and node.type.nbytes < graph.types[operand.name].nbytes


def _is_transparent(graph: Graph, node: Node) -> bool:
    operand = node.args[0] if node.args else None
    if not isinstance(operand, Ref) or not _arranges(node):
        return False
    # What is made of an input by layout and casts alone is made again wherever it is wanted.
    from_input = _root(graph, node.name) not in graph.producers
    widens = node.op == CAST and not _narrows(graph, node)
    turned = node.op == "aten.permute.default" and len(node.type.shape) == 2  # products read either way
    return from_input or widens or turned or node.op == "aten.view.default"


def _needed(graph: Graph, nodes: Iterable[Node], inside: set[str]) -> tuple[list[str], list[Node]]:
    """Values that these nodes read from outside, and the nodes outside that are to be made again, in order."""
    reads: dict[str, None] = {}
    again: dict[str, Node] = {}

    def want(name: str) -> None:
        if name in inside or name in again:
            return
        node = graph.producers.get(name)
        if node is not None and _is_transparent(graph, node):
            for ref in node.refs():
                want(ref)
            again[name] = node
        else:
            reads[name] = None

    for node in nodes:
        for name in node.refs():
            want(name)
    return list(reads), list(again.values())


def _outputs(graph: Graph, stop: int, inside: set[str]) -> list[str]:
    """Values inside that nodes from `stop` on read, in order."""
    later = graph.nodes[stop:]
    reads, _ = _needed(graph, later, {node.name for node in later})
    return [name for name in reads if name in inside]


def _part(graph: Graph, start: int, stop: int, name: str) -> Graph:
    nodes = graph.nodes[start:stop]
    inside = {node.name for node in nodes}
    reads, again = _needed(graph, nodes, inside)
    declared = {value.name: value for value in graph.inputs}
    inputs = [declared[n] if n in declared else Value(n, graph.types[n]) for n in reads]
    named = {value: out for out, value in graph.outputs}
    outputs = [(out, value) for out, value in graph.outputs if value in inside]
    outputs += [(value, value) for value in _outputs(graph, stop, inside) if value not in named]
    part = Graph(name, tuple(inputs), (*again, *nodes), tuple(outputs))
    return remove_dead_code(part, drop_inputs=True)


def _with_short_names(parts: Sequence[Graph], outputs: Mapping[str, str], prefix: str) -> list[Graph]:
    """Every value that crosses is named as the output it is, and the others `prefix0, prefix1, …` in order."""
    names = dict(outputs)
    for part in parts:
        for out, value in part.outputs:
            if value not in names and out == value:
                names[value] = f"{prefix}{len(names) - len(outputs)}"
    renamed = []
    for part in parts:
        inputs = tuple(Value(names.get(v.name, v.name), v.type) for v in part.inputs)
        swap = {v.name: names.get(v.name, v.name) for v in part.inputs}
        nodes = tuple(node.mapped(lambda name, swap=swap: swap.get(name, name)) for node in part.nodes)  # type: ignore[misc]
        outs = tuple((names.get(value, out) if out == value else out, value) for out, value in part.outputs)
        renamed.append(dataclasses.replace(part, inputs=inputs, nodes=nodes, outputs=outs).renumbered())
    return renamed
