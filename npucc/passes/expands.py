"""Drops `expand` in front of arithmetic that broadcasts by itself, so that no target materialises the larger tensor."""

from __future__ import annotations

import dataclasses

from npubundle.tensor import TensorType
from npucc.graph import Arg, Graph, Node, Ref
from npucc.passes.rewriting import Replacement, rewrite

#: Elementwise operators with broadcasting.
BROADCASTING = {
    "aten.mul.Tensor",
    "aten.add.Tensor",
    "aten.sub.Tensor",
    "aten.div.Tensor",
    "aten.where.self",
    "aten.maximum.default",
}


def drop_expands(graph: Graph) -> Graph:
    """`mul(expand(a), b)` as `mul(a, b)` wherever the result keeps its shape; unused expands go with the dead code.

    An elementwise operation on an expanded value and a literal is done on the small value, and expanded afterwards.
    """
    expanded: dict[str, tuple[Ref, TensorType]] = {}  # value that is an expand -> the small value behind it
    types = dict(graph.types)

    def source(arg: Arg) -> Arg:
        return expanded[arg.name][0] if isinstance(arg, Ref) and arg.name in expanded else arg

    def rule(node: Node) -> Replacement:
        if node.op == "aten.expand.default" and isinstance(node.args[0], Ref):
            behind = node.args[0]
            expanded[node.name] = expanded.get(behind.name, (behind, types[behind.name]))
            return [node]
        args = tuple(source(arg) for arg in node.args)
        if node.op not in BROADCASTING or args == node.args:
            return [node]
        shape = broadcast([types[arg.name].shape for arg in args if isinstance(arg, Ref)])
        if shape == node.type.shape:
            return [dataclasses.replace(node, args=args)]
        small = Node(f"{node.name}_small", node.op, args, node.kwargs, TensorType(node.type.dtype, shape), node.source)
        types[small.name] = small.type
        expanded[node.name] = (Ref(small.name), small.type)
        return [
            small,
            Node(node.name, "aten.expand.default", (Ref(small.name), node.type.shape), (), node.type, node.source),
        ]

    return rewrite(graph, rule)


def broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that elementwise operators give to operands of these shapes."""
    rank = max((len(s) for s in shapes), default=0)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))
