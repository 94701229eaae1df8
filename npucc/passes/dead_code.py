"""Removes nodes that no output needs. Restricting a joint graph to fewer outputs is dead-code removal too."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from npucc.graph import Graph


def remove_dead_code(graph: Graph, keep: Collection[str] | None = None, *, drop_inputs: bool = False) -> Graph:
    """The graph with only the outputs named in `keep` (all by default) and what they need.

    Inputs stay, whether used or not, unless `drop_inputs`.
    """
    outputs = tuple(pair for pair in graph.outputs if keep is None or pair[0] in keep)
    needed = {value for _, value in outputs}
    nodes = []
    for node in reversed(graph.nodes):
        if node.name in needed:
            nodes.append(node)
            needed.update(node.refs())
    inputs = tuple(v for v in graph.inputs if v.name in needed or not drop_inputs)
    return dataclasses.replace(graph, inputs=inputs, nodes=tuple(reversed(nodes)), outputs=outputs)
