"""Splits a joint forward-and-backward graph in two, and chooses what forward keeps for backward.

What is kept is a minimum cut, in bytes, between what is too dear to compute twice (matrix products and softmax) and
what backward reads, as in Chen et al. 2016 and the min-cut partitioner of functorch (He, Yu 2023). A batched product
over few terms is the exception that a target may ask for: the scores of attention cost less time to compute again than
to write and read, as in FlashAttention (Dao et al. 2022). Inputs of the joint
graph cost nothing: backward receives them again. Among cuts of equal size the one nearest to backward is taken, so that
values are kept in the layout in which backward wants them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import networkx as nx

from npucc.graph import Graph, Node, Ref, Value
from npucc.passes.dead_code import remove_dead_code

_SOFTMAX = "aten._softmax.default"


@dataclass(frozen=True, slots=True)
class Halves:
    """`forward` has the joint graph's forward outputs and then what is kept; `backward` reads what is kept."""

    forward: Graph
    backward: Graph
    saved: tuple[str, ...]


def partition(
    joint: Graph,
    *,
    tangents: set[str],
    forward_outputs: set[str],
    repeat_products_within: int = 0,
    repeat_after_softmax: bool = True,
) -> Halves:
    """Cut `joint`; `tangents` are its inputs that exist only in backward, `forward_outputs` the outputs of forward.

    Batched products over at most `repeat_products_within` terms, and softmax with them, may be computed twice; those
    with what softmax gave only with `repeat_after_softmax`.
    """
    backward_values = _downstream(joint, tangents)
    softmaxes = {node.name for node in joint.nodes if node.op == _SOFTMAX}
    once = set() if repeat_after_softmax else _downstream(joint, softmaxes) - softmaxes
    saved = _minimum_cut(joint, backward_values, once, repeat_products_within)
    names = {value: f"saved{number}" for number, value in enumerate(saved)}
    kept = tuple((names[value], value) for value in saved)
    outputs = tuple(pair for pair in joint.outputs if pair[0] in forward_outputs)
    forward = dataclasses.replace(joint, name=f"{joint.name}.forward", outputs=(*outputs, *kept))
    backward = _starting_from(joint, names, forward_outputs)
    return Halves(
        remove_dead_code(forward, drop_inputs=True).renumbered(),
        remove_dead_code(backward, drop_inputs=True).renumbered(),
        tuple(names.values()),
    )


def _downstream(graph: Graph, sources: set[str]) -> set[str]:
    found = set(sources)
    for node in graph.nodes:
        if any(name in found for name in node.refs()):
            found.add(node.name)
    return found


def _minimum_cut(joint: Graph, backward: set[str], once: set[str], repeat_products_within: int) -> list[str]:
    """Values of forward to keep, in the order in which forward computes them."""
    network = nx.DiGraph()
    network.add_nodes_from(["source", "sink"])
    for node in joint.nodes:
        if node.name in backward:
            continue
        # Between cuts of equal size, not the one in another layout: products transpose their operands for free, and
        # a view is free unless it has to be an output of its own.
        arranged = node.op in {"aten.permute.default", "aten.view.default"}
        network.add_edge((node.name, "in"), (node.name, "out"), capacity=node.type.nbytes + arranged)
        if _is_expensive(joint, node, 0 if node.name in once else repeat_products_within):
            network.add_edge("source", (node.name, "in"), capacity=math.inf)
        for user in joint.users[node.name]:
            end = "sink" if user.name in backward else (user.name, "in")
            network.add_edge((node.name, "out"), end, capacity=math.inf)
    _, (near_source, _) = nx.minimum_cut(network, "source", "sink")
    return [
        node.name for node in joint.nodes if (node.name, "in") in near_source and (node.name, "out") not in near_source
    ]


def _is_expensive(joint: Graph, node: Node, repeat_products_within: int) -> bool:
    """Whether backward must not compute this again."""
    if node.op == "aten.bmm.default":
        first = node.args[0]
        return isinstance(first, Ref) and joint.types[first.name].shape[-1] > repeat_products_within
    return node.op == "aten.mm.default" or (node.op == _SOFTMAX and not repeat_products_within)


def _starting_from(joint: Graph, names: dict[str, str], forward_outputs: set[str]) -> Graph:
    """Backward: kept values become further inputs; everything else is computed from them, or again."""
    inputs = tuple(Value(new, joint.types[old]) for old, new in names.items())
    nodes = tuple(node.mapped(lambda n: names.get(n, n)) for node in joint.nodes if node.name not in names)
    outputs = tuple((out, names.get(v, v)) for out, v in joint.outputs if out not in forward_outputs)
    return dataclasses.replace(
        joint, name=f"{joint.name}.backward", inputs=(*joint.inputs, *inputs), nodes=nodes, outputs=outputs
    )
