"""One way to write a local rewrite: look at the nodes in order, keep, replace or drop each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from npucc.graph import Graph, Node

#: What becomes of a node: nodes to put in its place (the last takes over its name), or the name of an existing value.
Replacement = Sequence[Node] | str
Rule = Callable[[Node], Replacement]


def rewrite(graph: Graph, rule: Rule) -> Graph:
    """Apply `rule` to every node, in order. The rule sees references that earlier replacements have already updated."""
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    for original in graph.nodes:
        node = original.mapped(lambda name: renamed.get(name, name))
        replacement = rule(node)
        if isinstance(replacement, str):
            renamed[node.name] = replacement
        else:
            *before, last = replacement
            nodes += [*before, dataclasses.replace(last, name=node.name)]
    outputs = tuple((out, renamed.get(value, value)) for out, value in graph.outputs)
    return dataclasses.replace(graph, nodes=tuple(nodes), outputs=outputs)
