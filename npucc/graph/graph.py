"""Values of the canonical graph, its text and its JSON.

One form serves four purposes: it is what passes rewrite, what a person reads in a dump, what the part key hashes, and
what travels to a compile worker in another environment. Hence it holds only plain values, has one spelling for every
graph (`renumbered`), and names operators as ATen does (`aten.mm.default`), of which every node has exactly one output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from npubundle import canonical
from npubundle.tensor import TensorType

#: Operator of a node that is a literal tensor: its arguments are the flat list of its elements.
CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the value of this name."""

    name: str


#: An argument of a node: a value, or a literal.
Arg = Ref | int | float | bool | str | None | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A named tensor."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Node:
    """`name = op(*args, **kwargs)`, of type `type`. Keyword arguments are sorted by name.

    `source` is the line that it comes from, for people: graphs that differ in it alone are equal and have equal bytes.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    type: TensorType
    source: str = dataclasses.field(default="", compare=False)

    def refs(self) -> Iterator[str]:
        """Names of the values this node reads, in order, repeats included."""
        for arg in (*self.args, *(value for _, value in self.kwargs)):
            yield from _refs(arg)

    def mapped(self, rename: Callable[[str], str]) -> Node:
        """The node with every reference renamed."""
        args = tuple(_mapped(arg, rename) for arg in self.args)
        return dataclasses.replace(self, args=args, kwargs=tuple((k, _mapped(v, rename)) for k, v in self.kwargs))


@dataclass(frozen=True)
class Graph:
    """A pure function from named inputs to named outputs. Nodes are in topological order.

    `outputs` pairs the name of each output with the value that it is.
    """

    name: str
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """The type of every value by name."""
        return {v.name: v.type for v in self.inputs} | {n.name: n.type for n in self.nodes}

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that computes each value; inputs are not in it."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def users(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each value (each node once)."""
        users: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(node.refs()):
                users[name].append(node)
        return {name: tuple(nodes) for name, nodes in users.items()}

    @property
    def output_types(self) -> tuple[TensorType, ...]:
        """The type of each output, in order."""
        return tuple(self.types[value] for _, value in self.outputs)

    def renumbered(self) -> Graph:
        """The same graph with nodes named `v0, v1, …` in order, so that equal graphs have equal text."""
        names = {v.name: v.name for v in self.inputs}
        for index, node in enumerate(self.nodes):
            names[node.name] = f"v{index}"
        nodes = tuple(dataclasses.replace(n.mapped(names.__getitem__), name=names[n.name]) for n in self.nodes)
        return dataclasses.replace(self, nodes=nodes, outputs=tuple((out, names[value]) for out, value in self.outputs))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. The name is left out: equal functions are equal whatever they are called."""
        return {
            "inputs": [[v.name, str(v.type)] for v in self.inputs],
            "nodes": [
                [n.name, n.op, [_plain(a) for a in n.args], {k: _plain(a) for k, a in n.kwargs}, str(n.type)]
                for n in self.nodes
            ],
            "outputs": [list(pair) for pair in self.outputs],
        }

    @classmethod
    def from_dict(cls, name: str, document: Mapping[str, Any]) -> Graph:
        """The inverse of `to_dict`."""
        return cls(
            name,
            tuple(Value(n, TensorType.from_str(t)) for n, t in document["inputs"]),
            tuple(
                Node(
                    n,
                    op,
                    tuple(map(_arg, args)),
                    tuple((k, _arg(a)) for k, a in kwargs.items()),
                    TensorType.from_str(t),
                )
                for n, op, args, kwargs, t in document["nodes"]
            ),
            tuple((out, value) for out, value in document["outputs"]),
        )

    def encode(self) -> bytes:
        """Canonical bytes: what a part key hashes."""
        return canonical.encode(self.to_dict())

    def as_text(self) -> str:
        """The graph for people, one line per value."""
        lines = [f"graph {self.name}("]
        lines += [f"    {v.name}: {v.type}," for v in self.inputs]
        lines.append("):")
        for node in self.nodes:
            args = [_text(a) for a in node.args] + [f"{k}={_text(a)}" for k, a in node.kwargs]
            source = f"  # {node.source}" if node.source else ""
            lines.append(f"    {node.name}: {node.type} = {node.op}({', '.join(args)}){source}")
        lines.append("    return " + ", ".join(f"{out}={value}" for out, value in self.outputs))
        return "\n".join(lines) + "\n"


def described(node: Node) -> str:
    """A node for an error: its operator, its type, and the line that it comes from."""
    return f"{node.name} = {node.op} {node.type}" + (f" ({node.source})" if node.source else "")


def _refs(arg: Arg) -> Iterator[str]:
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _refs(item)


def _mapped(arg: Arg, rename: Callable[[str], str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(rename(arg.name))
    return tuple(_mapped(item, rename) for item in arg) if isinstance(arg, tuple) else arg


def _plain(arg: Arg) -> Any:
    if isinstance(arg, Ref):
        return {"ref": arg.name}
    if isinstance(arg, tuple):
        return [_plain(item) for item in arg]
    # Canonical JSON writes 2.0 as 2, and an operator may behave differently for the two.
    return {"float": arg} if isinstance(arg, float) else arg


def _arg(plain: Any) -> Arg:
    if isinstance(plain, dict):
        return Ref(plain["ref"]) if "ref" in plain else float(plain["float"])
    return tuple(map(_arg, plain)) if isinstance(plain, list) else plain


def _text(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return arg.name
    if isinstance(arg, tuple):
        shown = [_text(item) for item in arg[:8]] + (["…"] if len(arg) > 8 else [])
        return f"[{', '.join(shown)}]"
    return repr(arg)
