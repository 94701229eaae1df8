"""From a Python function on tensors to a canonical graph, without any data.

Functions are traced with `make_fx` on fake tensors, so that the size of a model costs nothing. Every input is a fake
tensor of its own: equal sample tensors must never merge two inputs into one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npubundle.tensor import TensorType
from npucc.errors import InternalError
from npucc.graph.graph import CONSTANT, Arg, Graph, Node, Ref, Value
from npucc.graph.sources import source_of, with_sources

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _split(x: torch.Tensor, sizes: int | Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    """`split` as slices: in a canonical graph a node has one output."""
    total = x.shape[dim]
    steps = [sizes] * -(-total // sizes) if isinstance(sizes, int) else list(sizes)
    ends = [min(end, total) for end in itertools.accumulate(steps)]
    return [torch.ops.aten.slice.Tensor(x, dim, start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


#: Composite operators, replaced by simple ones while tracing.
_DECOMPOSED: Mapping[Any, Callable[..., Any]] = get_decompositions(
    [
        torch.ops.aten._softmax_backward_data,  # noqa: SLF001 -- that is the operator's name
        torch.ops.aten.sigmoid_backward,
        torch.ops.aten.index_select_backward,
        torch.ops.aten.rsub,
        torch.ops.aten.addmm,
    ]
) | {torch.ops.aten.split.Tensor: _split, torch.ops.aten.split_with_sizes.default: _split}

Function = Callable[..., Sequence[torch.Tensor]]


def capture(
    name: str,
    function: Function,
    inputs: Mapping[str, TensorType],
    outputs: Sequence[str],
    constants: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Graph:
    """Trace `function(*inputs, *constants)`, which returns one tensor per name in `outputs`.

    `constants` are handed over as further tensors and become literals of the graph.
    """
    constants = constants or {}
    types = dict(inputs) | {n: TensorType("f32", a.shape) for n, a in constants.items()}
    with FakeTensorMode():
        samples = [torch.empty(t.shape, dtype=DTYPES[t.dtype]) for t in types.values()]
        module = make_fx(with_sources(function), decomposition_table=_DECOMPOSED)(*samples)
    placeholders = iter(types.items())
    names: dict[torch.fx.Node, str] = {}
    literals: list[Node] = []
    nodes: list[Node] = []
    returned: list[str] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            names[node], given = next(placeholders)
            if names[node] in constants:
                data = tuple(float(x) for x in constants[names[node]].ravel())
                literals.append(Node(names[node], CONSTANT, (data,), (), given))
        elif node.op == "call_function":
            names[node] = f"{node.name}"
            nodes.append(_node(node, names))
        elif node.op == "output":
            returned = [names[value] for value in node.args[0]]
        else:
            raise InternalError(f"tracing {name} gave a node of kind {node.op} ({node.target})")
    if len(returned) != len(outputs):
        raise InternalError(f"{name} returns {len(returned)} tensors, {len(outputs)} are named")
    values = tuple(Value(n, t) for n, t in inputs.items())
    return Graph(name, values, (*literals, *nodes), tuple(zip(outputs, returned, strict=True)))


def _node(node: torch.fx.Node, names: Mapping[torch.fx.Node, str]) -> Node:
    result = node.meta["val"]
    if not isinstance(result, torch.Tensor):
        raise InternalError(f"operator {node.target} has more than one output")
    arg = _arg_reader(names)
    kwargs = tuple((key, arg(value)) for key, value in sorted(node.kwargs.items()) if key not in _PLACEMENT)
    return Node(names[node], str(node.target), tuple(map(arg, node.args)), kwargs, _type(result), source_of(node))


#: Keyword arguments that say where a tensor is, or how it lies in memory; canonical graphs have no such notions.
_PLACEMENT = {"device", "pin_memory", "layout", "memory_format"}


def _arg_reader(names: Mapping[torch.fx.Node, str]) -> Callable[[Any], Arg]:
    def read(value: Any) -> Arg:
        if isinstance(value, torch.fx.Node):
            return Ref(names[value])
        if isinstance(value, list | tuple):
            return tuple(read(item) for item in value)
        if isinstance(value, torch.dtype):
            return _NAMES[value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise InternalError(f"argument {value!r} of a traced operator has no canonical form")

    return read


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(_NAMES[tensor.dtype], tuple(int(size) for size in tensor.shape))
