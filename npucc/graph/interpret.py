"""Runs a canonical graph with PyTorch: the meaning of a graph, and the float64 reference of every numerics check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from npucc.graph.capture import DTYPES
from npucc.graph.graph import CONSTANT, Arg, Graph, Node, Ref

_FLOATS = {torch.float16, torch.bfloat16, torch.float32}
_VIEWS = {"aten.view.default", "aten._unsafe_view.default"}


def interpret(graph: Graph, inputs: Sequence[torch.Tensor], *, widen: bool = True) -> list[torch.Tensor]:
    """The outputs of `graph` on `inputs`. With `widen`, every floating-point value is float64, inputs included.

    A value is dropped after its last use, so that peak memory is that of the graph and not of its trace.
    """
    values: dict[str, torch.Tensor] = {}
    for declared, tensor in zip(graph.inputs, inputs, strict=True):
        if tuple(tensor.shape) != declared.type.shape:
            raise ValueError(
                f"input {declared.name} of {graph.name} is {declared.type}, got shape {tuple(tensor.shape)}"
            )
        values[declared.name] = (
            tensor if _only_indexed(graph, declared.name) else tensor.to(_dtype(declared.type.dtype, widen=widen))
        )
    last_use = {name: node.name for node in graph.nodes for name in node.refs()}
    kept = {value for _, value in graph.outputs}
    for node in graph.nodes:
        values[node.name] = _run(node, values, widen=widen)
        for name in set(node.refs()):
            if last_use[name] == node.name and name not in kept:
                del values[name]
    return [values[value] for _, value in graph.outputs]


def _only_indexed(graph: Graph, name: str) -> bool:
    """Whether rows are picked from this input and nothing else.

    Then it is enough to widen the rows, and a whole table of vectors need not be doubled.
    """
    users = graph.users[name]
    return bool(users) and all(u.op == "aten.index_select.default" and u.args[0] == Ref(name) for u in users)


def _dtype(name: str, *, widen: bool) -> torch.dtype:
    dtype = DTYPES[name]
    return torch.float64 if widen and dtype in _FLOATS else dtype


def _run(node: Node, values: Mapping[str, torch.Tensor], *, widen: bool) -> torch.Tensor:
    dtype = _dtype(node.type.dtype, widen=widen)
    if node.op == CONSTANT:
        return torch.tensor(node.args[0], dtype=dtype).reshape(node.type.shape)

    def value(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return values[arg.name]
        return [value(item) for item in arg] if isinstance(arg, tuple) else arg

    args = [value(arg) for arg in node.args]
    kwargs = {key: DTYPES[arg] if key == "dtype" and isinstance(arg, str) else value(arg) for key, arg in node.kwargs}
    if node.op in _VIEWS:  # a canonical graph has no strides, so a view may have to copy
        return args[0].reshape(args[1])  # type: ignore[no-any-return]
    if node.op in {"aten._to_copy.default", "aten.full.default", "aten.arange.start_step"}:
        kwargs["dtype"] = dtype
    result: torch.Tensor = _operator(node.op)(*args, **kwargs)
    return result.to(dtype)


def _operator(name: str) -> Any:
    """The operator of a name such as `aten.mm.default`."""
    return reduce(getattr, name.split("."), torch.ops)
