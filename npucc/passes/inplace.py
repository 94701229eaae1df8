"""Which outputs may be written over which inputs."""

from __future__ import annotations

from npucc.errors import InternalError
from npucc.graph import Graph, Node
from npucc.passes.expands import BROADCASTING

#: Operators that read element i of every operand of their own shape only to write element i of their result.
_ALIGNED = BROADCASTING | {"aten.sqrt.default", "aten.exp.default", "aten.neg.default"}


def inplace_pairs(graph: Graph, wanted: dict[str, str]) -> tuple[tuple[int, int], ...]:
    """Indices (output, input) for the names in `wanted`, after proving that sharing memory is safe in any valid order.

    Safe means: the output is computed by an elementwise operator, and every other reader of the input is an ancestor of
    it, so that nothing reads the input after the output is written.
    """
    outputs = dict(graph.outputs)
    names = [name for name, _ in graph.outputs]
    inputs = [value.name for value in graph.inputs]
    for output, source in wanted.items():
        writer = graph.producers[outputs[output]]
        ancestors = _ancestors(graph, writer)
        late = [user.name for user in graph.users[source] if user.name not in ancestors and user is not writer]
        if writer.op not in _ALIGNED or late or graph.types[source] != writer.type:
            raise InternalError(
                f"{graph.name}: {output} cannot be written over {source} ({writer.op}, read later by {late})"
            )
    return tuple((names.index(output), inputs.index(source)) for output, source in wanted.items())


def _ancestors(graph: Graph, node: Node) -> set[str]:
    found: set[str] = set()
    pending = list(node.refs())
    while pending:
        name = pending.pop()
        if name in graph.producers and name not in found:
            found.add(name)
            pending.extend(graph.producers[name].refs())
    return found
