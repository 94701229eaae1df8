"""Drops casts to a wider type and back, also with layouts between them: the value is the same."""

from __future__ import annotations

import dataclasses

from npubundle.tensor import TensorType
from npucc.graph import Graph, Node, Ref
from npucc.passes.layouts import LAYOUTS
from npucc.passes.rewriting import Replacement, rewrite

CAST = "aten._to_copy.default"
#: Types all of whose values f32 holds.
_WITHIN_F32 = {"bf16", "f16"}


def drop_round_trips(graph: Graph) -> Graph:
    """`narrow(view(widen(x)))` becomes `view(x)`, where f32 is the wider type."""
    seen: dict[str, Node] = {}
    types = dict(graph.types)

    def widened(name: str, dtype: str) -> tuple[str, list[Node]] | None:
        """The value of `dtype` that this is a wider form of, and the layouts between the two."""
        node = seen.get(name)
        if node is None or not isinstance(node.args[0], Ref):
            return None
        operand = node.args[0].name
        if node.op in LAYOUTS:
            found = widened(operand, dtype)
            return found and (found[0], [*found[1], node])
        widens = node.op == CAST and types[operand].dtype == dtype and node.type.dtype == "f32"
        return (operand, []) if widens else None

    def rule(node: Node) -> Replacement:
        seen[node.name] = node
        operand = node.args[0] if node.op == CAST and node.type.dtype in _WITHIN_F32 else None
        found = widened(operand.name, node.type.dtype) if isinstance(operand, Ref) else None
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
