"""One operator for each meaning: the many spellings that ATen has for views, copies and scalar arithmetic become one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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
    types = graph.types

    def rule(node: Node) -> Replacement:  # noqa: PLR0911 -- one return per family of operators
        if node.op in _IDENTITIES:
            return _only(node)
        if node.op in _RESHAPES:
            return [dataclasses.replace(node, op="aten.view.default", args=(node.args[0], node.type.shape), kwargs=())]
        if node.op in {"aten.t.default", "aten.transpose.int"}:
            axes = _swapped(len(node.type.shape), node)
            return [dataclasses.replace(node, op="aten.permute.default", args=(node.args[0], axes))]
        if node.op in _FILLS:
            value = _FILLS[node.op](node)
            if not isinstance(value, int | float):
                raise InternalError(f"{node.op} fills with {value!r}")
            value = float(value) if node.type.dtype in _FLOATS else int(value)
            return [dataclasses.replace(node, op="aten.full.default", args=(node.type.shape, value), kwargs=())]
        if node.op in _RENAMED:
            node = dataclasses.replace(node, op=_RENAMED[node.op])
        if node.op in {"aten.add.Tensor", "aten.sub.Tensor"}:
            return _without_alpha(node)
        if node.op == "aten.pow.Tensor_Scalar":
            return _power(node)
        if node.op == "aten.sum.default":
            axes = tuple(range(len(types[_only(node)].shape)))
            return [dataclasses.replace(node, op="aten.sum.dim_IntList", args=(node.args[0], axes))]
        if node.op == "aten.select.int" and types[_only(node)].shape[_axis(node)] == 1:
            return [dataclasses.replace(node, op="aten.view.default", args=(node.args[0], node.type.shape))]
        return [node]

    return rewrite(graph, rule)


def _only(node: Node) -> str:
    ref = node.args[0]
    if not isinstance(ref, Ref):
        raise InternalError(f"{node.op} of a literal")
    return ref.name


def _axis(node: Node) -> int:
    axis = node.args[1]
    if not isinstance(axis, int):
        raise InternalError(f"{node.op} along {axis!r}")
    return axis


def _swapped(rank: int, node: Node) -> tuple[int, ...]:
    axes = list(range(rank))
    first, second = (-2, -1) if node.op == "aten.t.default" else node.args[1:]
    if rank > 1:
        axes[first], axes[second] = axes[second], axes[first]  # type: ignore[index, call-overload]
    return tuple(axes)


def _without_alpha(node: Node) -> Replacement:
    """`add(a, b, alpha=c)` as `add(a, mul(b, c))`."""
    alpha = dict(node.kwargs).get("alpha", node.args[2] if len(node.args) > 2 else 1)
    plain = dataclasses.replace(node, args=node.args[:2], kwargs=())
    if alpha == 1:
        return [plain]
    scaled = dataclasses.replace(
        node, name=f"{node.name}_scaled", op="aten.mul.Tensor", args=(node.args[1], alpha), kwargs=()
    )
    return [scaled, dataclasses.replace(plain, args=(node.args[0], Ref(scaled.name)))]


def _power(node: Node) -> Replacement:
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
