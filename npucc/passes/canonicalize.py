"""One operator for each meaning: ATen's many spellings of views, copies and scalar arithmetic become one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from npubundle.tensor import TensorType
from npucc.errors import InternalError
from npucc.graph import Graph, Node, Ref
from npucc.passes.rewriting import Replacement, rewrite

#: Copies and markers: in a graph without strides and autograd they are the value itself.
_IDENTITIES = {
    "aten.clone.default",
    "aten.detach.default",
    "aten.alias.default",
    "aten.contiguous.default",
    "aten.lift_fresh_copy.default",
}
#: Operators whose result is the same elements in another shape, in the same order.
_RESHAPES = {
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.view.default",
}
_FLOATS = {"f32", "f16", "bf16"}
_RENAMED = {
    "aten.mul.Scalar": "aten.mul.Tensor",
    "aten.add.Scalar": "aten.add.Tensor",
    "aten.sub.Scalar": "aten.sub.Tensor",
    "aten.div.Scalar": "aten.div.Tensor",
}
_FILLS: dict[str, Callable[[Node], object]] = {
    "aten.zeros_like.default": lambda _: 0.0,
    "aten.ones_like.default": lambda _: 1.0,
    "aten.full_like.default": lambda node: node.args[1],
    "aten.new_zeros.default": lambda _: 0.0,
    "aten.zeros.default": lambda _: 0.0,
    "aten.full.default": lambda node: node.args[1],
    "aten.ones.default": lambda _: 1.0,
    "aten.scalar_tensor.default": lambda node: node.args[0],
}


def canonicalize(graph: Graph) -> Graph:
    """Reshapes are `view`, axis swaps `permute`, fills `full`, and scalar overloads their tensor overloads."""

    def rule(node: Node) -> Replacement:
        node = dataclasses.replace(node, op=_RENAMED.get(node.op, node.op))
        respell = _SPELLINGS.get(node.op)
        return respell(node, graph.types) if respell else [node]

    return rewrite(graph, rule)


Types = Mapping[str, TensorType]


def _identity(node: Node, _: Types) -> Replacement:
    return _only(node)


def _reshape(node: Node, _: Types) -> Replacement:
    return [dataclasses.replace(node, op="aten.view.default", args=(node.args[0], node.type.shape), kwargs=())]


def _swap(node: Node, _: Types) -> Replacement:
    axes = list(range(len(node.type.shape)))
    first, second = (-2, -1) if node.op == "aten.t.default" else (_axis(node, 1), _axis(node, 2))
    if len(axes) > 1:
        axes[first], axes[second] = axes[second], axes[first]
    return [dataclasses.replace(node, op="aten.permute.default", args=(node.args[0], tuple(axes)))]


def _fill(node: Node, _: Types) -> Replacement:
    value = _FILLS[node.op](node)
    if not isinstance(value, int | float):
        raise InternalError(f"{node.op} fills with {value!r}")
    value = float(value) if node.type.dtype in _FLOATS else int(value)
    return [dataclasses.replace(node, op="aten.full.default", args=(node.type.shape, value), kwargs=())]


def _sum_of_all(node: Node, types: Types) -> Replacement:
    axes = tuple(range(len(types[_only(node)].shape)))
    return [dataclasses.replace(node, op="aten.sum.dim_IntList", args=(node.args[0], axes))]


def _select(node: Node, types: Types) -> Replacement:
    """The only element of an axis is the tensor without that axis."""
    return _reshape(node, types) if types[_only(node)].shape[_axis(node, 1)] == 1 else [node]


def _slice(node: Node, types: Types) -> Replacement:
    """Bounds within the axis, counted from its start; the whole axis is the tensor itself."""
    shape = types[_only(node)].shape
    axis = _axis(node, 1) % len(shape)
    start, stop = (bound if isinstance(bound, int) else None for bound in (*node.args[2:4], None, None)[:2])
    first, last, _ = slice(start, stop).indices(shape[axis])
    if (first, last) == (0, shape[axis]):
        return _only(node)
    return [dataclasses.replace(node, args=(node.args[0], axis, first, last))]


def _without_alpha(node: Node, types: Types) -> Replacement:
    """`add(a, b, alpha=c)` as `add(a, mul(b, c))`."""
    alpha = dict(node.kwargs).get("alpha", node.args[2] if len(node.args) > 2 else 1)
    plain = dataclasses.replace(node, args=node.args[:2], kwargs=())
    if alpha == 1:
        return [plain]
    second = node.args[1]
    if not isinstance(second, Ref):
        raise InternalError(f"{node.op} of a literal with alpha {alpha!r}")
    kind = TensorType(node.type.dtype, types[second.name].shape)
    scaled = Node(f"{node.name}_scaled", "aten.mul.Tensor", (second, alpha), (), kind, node.source)
    return [scaled, dataclasses.replace(plain, args=(node.args[0], Ref(scaled.name)))]


def _power(node: Node, _: Types) -> Replacement:
    """Small whole powers as products: exact, and known to every target."""
    base, exponent = node.args
    if exponent == 1:
        return _only(node)
    if exponent not in {2, 3}:
        return [node]
    square = dataclasses.replace(node, name=f"{node.name}_square", op="aten.mul.Tensor", args=(base, base))
    if exponent == 2:
        return [square]
    return [square, dataclasses.replace(square, args=(Ref(square.name), base))]


_SPELLINGS: dict[str, Callable[[Node, Types], Replacement]] = {
    **dict.fromkeys(_IDENTITIES, _identity),
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_FILLS, _fill),
    "aten.t.default": _swap,
    "aten.transpose.int": _swap,
    "aten.add.Tensor": _without_alpha,
    "aten.sub.Tensor": _without_alpha,
    "aten.pow.Tensor_Scalar": _power,
    "aten.sum.default": _sum_of_all,
    "aten.select.int": _select,
    "aten.slice.Tensor": _slice,
}


def _only(node: Node) -> str:
    ref = node.args[0]
    if not isinstance(ref, Ref):
        raise InternalError(f"{node.op} of a literal")
    return ref.name


def _axis(node: Node, position: int) -> int:
    axis = node.args[position]
    if not isinstance(axis, int):
        raise InternalError(f"{node.op} along {axis!r}")
    return axis
