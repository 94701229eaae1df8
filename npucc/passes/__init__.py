"""Rewrites of canonical graphs. Each pass is one file with one public function `Graph -> Graph` that keeps the meaning.

`simplify` is the pipeline every traced graph goes through; targets add their own passes after it.
"""

from npucc.graph import Graph
from npucc.passes.canonicalize import canonicalize
from npucc.passes.casts import drop_round_trips
from npucc.passes.common_subexpressions import merge_common_subexpressions
from npucc.passes.dead_code import remove_dead_code
from npucc.passes.expands import drop_expands
from npucc.passes.layouts import fold_layouts

#: Part of every toolchain identity: raise it whenever a pass may produce another graph than before.
PIPELINE_VERSION = 3


def simplify(graph: Graph) -> Graph:
    """The graph in canonical operators, without dead, repeated or pointless work, renumbered."""
    graph = canonicalize(graph)
    graph = drop_expands(graph)
    graph = fold_layouts(drop_round_trips(graph))
    graph = merge_common_subexpressions(graph)
    return remove_dead_code(graph).renumbered()


__all__ = ["PIPELINE_VERSION", "remove_dead_code", "simplify"]
