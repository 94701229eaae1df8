"""Drops `expand` in front of arithmetic that broadcasts by itself, so that no target materialises the larger tensor."""

from __future__ import annotations

from npubundle.tensor import TensorType
from npucc.graph import Graph, Node, Ref
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

    def source(arg: object) -> object:
        return expanded[arg.name][0] if isinstance(arg, Ref) and arg.name in expanded else arg

    def rule(node: Node) -> Replacement:
        if node.op == "aten.expand.default" and isinstance(node.args[0], Ref):
            small = expanded.get(node.args[0].name, (node.args[0], types[node.args[0].name]))
            expanded[node.name] = small
            return [node]
        if node.op in BROADCASTING:
            args = tuple(source(arg) for arg in node.args)
            shapes = [types[arg.name].shape for arg in args if isinstance(arg, Ref)]
            shape = broadcast(shapes)
            if args != node.args and shape == node.type.shape:
                return [Node(node.name, node.op, args, node.kwargs, node.type)]  # type: ignore[arg-type]
            if args != node.args:
                small = Node(f"{node.name}_small", node.op, args, node.kwargs, TensorType(node.type.dtype, shape))  # type: ignore[arg-type]
                types[small.name] = small.type
                expanded[node.name] = (Ref(small.name), small.type)
                grown = Node(node.name, "aten.expand.default", (Ref(small.name), node.type.shape), (), node.type)
                return [small, grown]
        return [node]

    return rewrite(graph, rule)


def broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that elementwise operators give to operands of these shapes."""
    rank = max((len(s) for s in shapes), default=0)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))
