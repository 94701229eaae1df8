"""Spells matrix products out: transposed copies, then a batched product, which no lowering merges with anything.

For the reference program. Its layers would otherwise become the very parts that they are compared with, wherever the
other passes find nothing to rewrite.
"""

from __future__ import annotations

import dataclasses

from npubundle.tensor import TensorType
from npucc.graph import Graph, Node, Ref
from npucc.passes.rewriting import Replacement, rewrite


def plain_products(graph: Graph) -> Graph:
    """`mm(a, b)` as `view(bmm(view(a), view(b)))`, a batch of one."""
    types = graph.types

    def batched(node: Node, index: int) -> Node:
        ref = node.args[index]
        if not isinstance(ref, Ref):
            raise TypeError(f"{node.op} of a literal")
        kind = types[ref.name]
        shape = (1, *kind.shape)
        return Node(
            f"{node.name}_operand{index}",
            "aten.view.default",
            (ref, shape),
            (),
            TensorType(kind.dtype, shape),
            node.source,
        )

    def rule(node: Node) -> Replacement:
        if node.op != "aten.mm.default":
            return [node]
        a, b = batched(node, 0), batched(node, 1)
        kind = TensorType(node.type.dtype, (1, *node.type.shape))
        product = Node(f"{node.name}_product", "aten.bmm.default", (Ref(a.name), Ref(b.name)), (), kind, node.source)
        view = dataclasses.replace(node, op="aten.view.default", args=(Ref(product.name), node.type.shape))
        return [a, b, product, view]

    return rewrite(graph, rule)
