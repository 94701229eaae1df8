"""Computes equal expressions once. Safe because every operator of a canonical graph is a pure function."""

from __future__ import annotations

from npucc.graph import Graph, Node
from npucc.passes.rewriting import Replacement, rewrite


def merge_common_subexpressions(graph: Graph) -> Graph:
    """Later nodes with the operator and arguments of an earlier node become that node."""
    seen: dict[str, str] = {}

    def rule(node: Node) -> Replacement:
        # The text of the arguments tells 2 from 2.0 and True, which compare equal; the type tells casts apart.
        key = repr((node.op, node.args, node.kwargs, str(node.type)))
        if key in seen:
            return seen[key]
        seen[key] = node.name
        return [node]

    return rewrite(graph, rule)
