"""Computes in f32 what a graph computes in bf16, and rounds each result: what bf16 arithmetic is defined as.

For targets whose kernels only move and convert bf16.
"""

from __future__ import annotations

import dataclasses

from npubundle.tensor import TensorType
from npucc.graph import Arg, Graph, Node, Ref
from npucc.passes.casts import CAST
from npucc.passes.layouts import LAYOUTS
from npucc.passes.rewriting import Replacement, rewrite

#: Operators that only move or convert elements.
MOVING = LAYOUTS | {CAST, "aten.index_select.default", "aten.slice.Tensor"}


def widen_arithmetic(graph: Graph) -> Graph:
    """`mm(a, b)` of bf16 becomes `bf16(mm(f32(a), f32(b)))`. A graph without bf16 arithmetic stays as it is."""
    types = dict(graph.types)
    wide: dict[str, str] = {}

    def rule(node: Node) -> Replacement:
        if node.op in MOVING:
            return [node]
        narrow = [name for name in dict.fromkeys(node.refs()) if types[name].dtype == "bf16"]
        if not narrow and node.type.dtype != "bf16":
            return [node]
        casts = [_cast(name, f"{name}_wide", types[name], "f32", node) for name in narrow if name not in wide]
        wide.update({name: f"{name}_wide" for name in narrow})
        computed = node.mapped(lambda name: wide.get(name, name))
        if node.type.dtype != "bf16":
            return [*casts, computed]
        kind = TensorType("f32", node.type.shape)
        kwargs: tuple[tuple[str, Arg], ...] = tuple((k, "f32" if k == "dtype" else v) for k, v in node.kwargs)
        inner = dataclasses.replace(computed, name=f"{node.name}_exact", kwargs=kwargs, type=kind)
        return [*casts, inner, _cast(inner.name, node.name, kind, "bf16", node)]

    return rewrite(graph, rule)


def _cast(value: str, name: str, kind: TensorType, dtype: str, near: Node) -> Node:
    return Node(name, CAST, (Ref(value),), (("dtype", dtype),), TensorType(dtype, kind.shape), near.source)
