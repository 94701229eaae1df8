"""Folds chains of `view` and `permute`, and drops those that change nothing."""

from __future__ import annotations

import dataclasses

from npucc.graph import Graph, Node, Ref
from npucc.passes.rewriting import Replacement, rewrite

#: Operators that arrange the elements of a value and change none.
LAYOUTS = frozenset({"aten.view.default", "aten.permute.default"})


def fold_layouts(graph: Graph) -> Graph:
    """`permute(permute(x))` and `view(view(x))` become one operator, or `x` itself where they cancel."""
    seen: dict[str, Node] = {}
    types = dict(graph.types)

    def rule(node: Node) -> Replacement:
        if node.op in LAYOUTS and isinstance(node.args[0], Ref):
            inner = seen.get(node.args[0].name)
            if inner is not None and inner.op == node.op:
                node = _joined(inner, node)
            operand = node.args[0]
            if not isinstance(operand, Ref) or _is_identity(node, types[operand.name].shape):
                return operand.name if isinstance(operand, Ref) else [node]
        seen[node.name] = node
        return [node]

    return rewrite(graph, rule)


def _joined(inner: Node, outer: Node) -> Node:
    if outer.op == "aten.view.default":
        return dataclasses.replace(outer, args=(inner.args[0], outer.type.shape))
    first, second = _axes(inner), _axes(outer)
    return dataclasses.replace(outer, args=(inner.args[0], tuple(first[axis] for axis in second)))


def _axes(node: Node) -> tuple[int, ...]:
    rank = len(node.type.shape)
    axes = node.args[1] if isinstance(node.args[1], tuple) else ()
    return tuple(axis % rank for axis in axes if isinstance(axis, int))


def _is_identity(node: Node, shape: tuple[int, ...]) -> bool:
    if node.op == "aten.view.default":
        return node.type.shape == shape
    return _axes(node) == tuple(range(len(shape)))
