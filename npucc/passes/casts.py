"""Drops casts to a wider type and back, also with layouts between them: the value is the same."""

from __future__ import annotations

import dataclasses

from npubundle.tensor import TensorType
from npucc.graph import Graph, Node, Ref
from npucc.passes.rewriting import Replacement, rewrite

_CAST = "aten._to_copy.default"
_LAYOUTS = {"aten.view.default", "aten.permute.default"}
#: What holds every value of a type.
_WIDER = {"bf16": {"f32"}, "f16": {"f32"}}


def drop_round_trips(graph: Graph) -> Graph:
    """`narrow(view(widen(x)))` becomes `view(x)`."""
    seen: dict[str, Node] = {}
    types = dict(graph.types)

    def widened(name: str, dtype: str) -> tuple[str, list[Node]] | None:
        """The value of `dtype` that this is a wider form of, and the layouts between the two."""
        node = seen.get(name)
        if node is None or not isinstance(node.args[0], Ref):
            return None
        operand = node.args[0].name
        if node.op in _LAYOUTS:
            found = widened(operand, dtype)
            return found and (found[0], [*found[1], node])
        wider = _WIDER.get(dtype, set())
        is_wider = node.op == _CAST and types[operand].dtype == dtype and node.type.dtype in wider
        return (operand, []) if is_wider else None

    def rule(node: Node) -> Replacement:
        seen[node.name] = node
        if node.op != _CAST or not isinstance(node.args[0], Ref):
            return [node]
        found = widened(node.args[0].name, node.type.dtype)
        if found is None:
            return [node]
        value, layouts = found
        made: list[Node] = []
        for layout in layouts:
            kind = TensorType(node.type.dtype, layout.type.shape)
            name = f"{node.name}_{layout.name}"
            made.append(dataclasses.replace(layout, name=name, args=(Ref(value), *layout.args[1:]), type=kind))
            types[name], value = kind, name
        if made:
            # Later nodes meet this node's own name, and have to see the layout that took it over.
            seen[node.name] = dataclasses.replace(made[-1], name=node.name)
            return made
        return value

    return rewrite(graph, rule)
