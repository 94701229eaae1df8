"""From a canonical graph to ONNX, in operators of the standard opset alone.

Direct and small on purpose: every canonical operator has one function below that writes its ONNX nodes. The model has
no names, paths, versions or comments of the host in it, so that equal graphs give equal bytes anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from npubundle.tensor import TensorType
from npucc.errors import UnsupportedOperatorError
from npucc.graph import Graph, Node, Ref
from npucc.graph.graph import CONSTANT
from npucc.passes.widen import widen_arithmetic

#: ONNX 1.13; onnxruntime reads it from 1.14 on.
OPSET = 18
IR_VERSION = 8
#: Raise it whenever the same graph may give other bytes.
LOWERING_VERSION = 1

_ELEMENT = {
    "f32": TensorProto.FLOAT,
    "f16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
_NUMPY = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64, "bool": np.bool_}
#: Rank of a dtype when two meet in one operator, as in PyTorch's promotion.
_WIDTH = {"bool": 0, "i32": 1, "i64": 2, "f16": 3, "f32": 4}

_ELEMENTWISE = {
    "aten.mul.Tensor": "Mul",
    "aten.add.Tensor": "Add",
    "aten.sub.Tensor": "Sub",
    "aten.div.Tensor": "Div",
    "aten.maximum.default": "Max",
    "aten.eq.Tensor": "Equal",
    "aten.ge.Tensor": "GreaterOrEqual",
    "aten.gt.Tensor": "Greater",
    "aten.lt.Tensor": "Less",
    "aten.ge.Scalar": "GreaterOrEqual",
    "aten.gt.Scalar": "Greater",
    "aten.lt.Scalar": "Less",
}
_COMPARISONS = {"Equal", "GreaterOrEqual", "Greater", "Less"}
_UNARY = {
    "aten.exp.default": "Exp",
    "aten.log.default": "Log",
    "aten.sqrt.default": "Sqrt",
    "aten.sigmoid.default": "Sigmoid",
    "aten.neg.default": "Neg",
    "aten.cos.default": "Cos",
    "aten.sin.default": "Sin",
}
_REDUCTIONS = {
    "aten.sum.dim_IntList": "ReduceSum",
    "aten.mean.dim": "ReduceMean",
    "aten.amax.default": "ReduceMax",
    "aten.logsumexp.default": "ReduceLogSumExp",
}


def lower(graph: Graph) -> bytes:
    """The serialized ONNX model of `graph`. Raises UnsupportedOperatorError naming every operator it cannot express.

    ONNX Runtime's CPU kernels do not compute in bf16: that is done in f32, and rounded.
    """
    unknown = sorted({node.op for node in graph.nodes if node.op not in _HANDLERS})
    if unknown:
        raise UnsupportedOperatorError(
            f"ONNX lowering does not know {', '.join(unknown)}",
            where=f"graph {graph.name}",
            remedy="add the operator to npucc/targets/onnx_lowering.py, or rewrite it in a pass",
        )
    graph = widen_arithmetic(graph)
    writer = _Writer(graph)
    for node in graph.nodes:
        _HANDLERS[node.op](writer, node)
    return writer.finish()


class _Writer:
    """The ONNX graph being written. Names of values are those of the canonical graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.types = dict(graph.types)
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], str] = {}
        self._initializers: list[TensorProto] = []
        self._published: dict[str, str] = {}

    def emit(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Append one ONNX node."""
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def constant(self, array: npt.NDArray[np.generic]) -> str:
        """The name of an initializer with this content; equal ones are shared."""
        key = (array.tobytes(), str(array.dtype), array.shape)
        if key not in self._constants:
            name = f"const{len(self._constants)}"
            self._constants[key] = name
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            self._initializers.append(helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True))
        return self._constants[key]

    def integers(self, values: Sequence[int]) -> str:
        """A 1-D int64 initializer: shapes, axes, indices."""
        return self.constant(np.array(values, dtype=np.int64))

    def scalar(self, value: object, dtype: str) -> str:
        """A scalar initializer."""
        return self.constant(np.array(value, dtype=_NUMPY[dtype]))

    def operand(self, arg: object, dtype: str) -> str:
        """An argument as a value of this dtype, cast where needed."""
        if not isinstance(arg, Ref):
            return self.scalar(arg, dtype)
        if self.types[arg.name].dtype == dtype:
            return arg.name
        return self.cast(arg.name, dtype)

    def cast(self, name: str, dtype: str) -> str:
        """The value in another dtype; one cast per value and dtype."""
        output = f"{name}.{dtype}"
        if output not in self.types:
            self.types[output] = TensorType(dtype, self.types[name].shape)
            self.emit("Cast", [name], output, to=_ELEMENT[dtype])
        return output

    def finish(self) -> bytes:
        """The model as deterministic bytes."""
        values = []
        for name, value in self.graph.outputs:
            self._publish(value, f"out.{name}")
            values.append(_info(f"out.{name}", self.graph.types[value]))
        inputs = [_info(value.name, value.type) for value in self.graph.inputs]
        proto = helper.make_graph(self.nodes, "part", inputs, values, initializer=self._initializers)
        model = helper.make_model(
            proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name=""
        )
        return bytes(model.SerializeToString(deterministic=True))

    def _publish(self, value: str, output: str) -> None:
        """Make a value an output: under the output's name everywhere, so that nothing is copied.

        An input or a constant, or a value that is an output already, needs a copy of its own.
        """
        producers = [node for node in self.nodes if value in node.output]
        if not producers or value in self._published or producers[0].op_type == "Identity":
            self.emit("Identity", [self._published.get(value, value)], output)
            return
        self._published[value] = output
        for node in self.nodes:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name == value:
                        names[index] = output


def _info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _ELEMENT[kind.dtype], list(kind.shape))


Handler = Callable[[_Writer, Node], object]


def _ints(arg: object) -> list[int]:
    items = arg if isinstance(arg, tuple) else (arg,)
    return [item for item in items if isinstance(item, int)]


def _name(arg: object) -> str:
    if not isinstance(arg, Ref):
        raise UnsupportedOperatorError(f"a literal {arg!r} stands where a tensor is needed")
    return arg.name


def _elementwise(w: _Writer, node: Node) -> None:
    dtype = _compared(w, node) if _ELEMENTWISE[node.op] in _COMPARISONS else node.type.dtype
    w.emit(_ELEMENTWISE[node.op], [w.operand(arg, dtype) for arg in node.args[:2]], node.name)


def _compared(w: _Writer, node: Node) -> str:
    """The dtype in which PyTorch compares: that of the widest operand; literals count only by their category."""
    dtype = max((w.types[arg.name].dtype for arg in node.args if isinstance(arg, Ref)), key=_WIDTH.__getitem__)
    if any(isinstance(arg, float) for arg in node.args) and not dtype.startswith("f"):
        return "f32"
    return "i64" if dtype == "bool" and any(type(arg) is int for arg in node.args) else dtype


def _bitwise_and(w: _Writer, node: Node) -> None:
    op = "And" if node.type.dtype == "bool" else "BitwiseAnd"
    w.emit(op, [w.operand(arg, node.type.dtype) for arg in node.args[:2]], node.name)


def _unary(w: _Writer, node: Node) -> None:
    w.emit(_UNARY[node.op], [w.operand(node.args[0], node.type.dtype)], node.name)


def _rsqrt(w: _Writer, node: Node) -> None:
    w.emit("Reciprocal", [w.emit("Sqrt", [_name(node.args[0])], f"{node.name}.root")], node.name)


def _mm(w: _Writer, node: Node) -> None:
    """Gemm reads either operand transposed, so a transposition in front of it costs nothing."""
    operands, attributes = [], {}
    for arg, flag in zip(node.args, ("transA", "transB"), strict=True):
        producer = w.graph.producers.get(_name(arg))
        if producer is not None and _transposes(producer):
            operands.append(_name(producer.args[0]))
            attributes[flag] = 1
        else:
            operands.append(_name(arg))
    w.emit("Gemm", operands, node.name, **attributes)


def _transposes(node: Node) -> bool:
    return node.op == "aten.permute.default" and [axis % 2 for axis in _ints(node.args[1])] == [1, 0]


def _bmm(w: _Writer, node: Node) -> None:
    w.emit("MatMul", [_name(arg) for arg in node.args], node.name)


def _permute(w: _Writer, node: Node) -> None:
    users = w.graph.users[node.name]
    only_products = bool(users) and all(user.op == "aten.mm.default" for user in users)
    if _transposes(node) and only_products and node.name not in {value for _, value in w.graph.outputs}:
        return  # every reader is a product that transposes by itself
    axes = [axis % len(node.type.shape) for axis in _ints(node.args[1])]
    w.emit("Transpose", [_name(node.args[0])], node.name, perm=axes)


def _view(w: _Writer, node: Node) -> None:
    w.emit("Reshape", [_name(node.args[0]), w.integers(node.type.shape)], node.name)


def _expand(w: _Writer, node: Node) -> None:
    w.emit("Expand", [_name(node.args[0]), w.integers(node.type.shape)], node.name)


def _reduction(w: _Writer, node: Node) -> None:
    source = w.operand(node.args[0], node.type.dtype)  # sums of i32 are i64
    rank = len(w.types[source].shape)
    axes = [axis % rank for axis in _ints(_argument(node, 1))] or list(range(rank))
    w.emit(_REDUCTIONS[node.op], [source, w.integers(axes)], node.name, keepdims=int(bool(_argument(node, 2))))


def _argument(node: Node, position: int) -> object:
    """A positional argument, None where it was left out."""
    return node.args[position] if len(node.args) > position else None


def _argmax(w: _Writer, node: Node) -> None:
    axes = _ints(_argument(node, 1))
    if not axes:
        raise UnsupportedOperatorError("argmax is only known along an axis", where=w.graph.name)
    w.emit("ArgMax", [_name(node.args[0])], node.name, axis=axes[0], keepdims=int(bool(_argument(node, 2))))


def _softmax(w: _Writer, node: Node) -> None:
    w.emit("Softmax", [_name(node.args[0])], node.name, axis=_ints(node.args[1])[0])


def _roll(w: _Writer, node: Node) -> None:
    source, shifts, axes = _name(node.args[0]), _ints(node.args[1]), _ints(_argument(node, 2))
    if len(shifts) != 1 or len(axes) != 1:
        raise UnsupportedOperatorError("roll is only known along one axis", where=w.graph.name)
    (shift,), (axis,) = shifts, axes
    size = node.type.shape[axis]
    split = -shift % size
    if split == 0:
        w.emit("Identity", [source], node.name)
        return
    ends = [(split, size), (0, split)]
    pieces = [
        w.emit("Slice", [source, w.integers([a]), w.integers([b]), w.integers([axis])], f"{node.name}.{a}")
        for a, b in ends
    ]
    w.emit("Concat", pieces, node.name, axis=axis)


def _slice(w: _Writer, node: Node) -> None:
    axis, start, stop = ([bound] for bound in _ints(node.args[1:]))
    bounds = [w.integers(start), w.integers(stop), w.integers(axis)]
    w.emit("Slice", [_name(node.args[0]), *bounds], node.name)


def _cat(w: _Writer, node: Node) -> None:
    items = node.args[0] if isinstance(node.args[0], tuple) else ()
    (axis,) = _ints(_argument(node, 1)) or [0]
    w.emit("Concat", [_name(item) for item in items], node.name, axis=axis)


def _index_select(w: _Writer, node: Node) -> None:
    source, axis, index = node.args
    w.emit("Gather", [_name(source), _name(index)], node.name, axis=_ints(axis)[0])


def _gather(w: _Writer, node: Node) -> None:
    source, axis, index = node.args[:3]
    w.emit("GatherElements", [_name(source), _name(index)], node.name, axis=_ints(axis)[0])


def _where(w: _Writer, node: Node) -> None:
    condition, yes, no = node.args
    w.emit("Where", [_name(condition), w.operand(yes, node.type.dtype), w.operand(no, node.type.dtype)], node.name)


def _clamp(w: _Writer, node: Node) -> None:
    low, high = (*node.args[1:], None, None)[:2]
    bounds = ["" if bound is None else w.scalar(bound, node.type.dtype) for bound in (low, high)]
    w.emit("Clip", [w.operand(node.args[0], node.type.dtype), *bounds], node.name)


def _copy(w: _Writer, node: Node) -> None:
    w.emit("Cast", [_name(node.args[0])], node.name, to=_ELEMENT[node.type.dtype])


def _full(w: _Writer, node: Node) -> None:
    value: npt.NDArray[Any] = np.array([node.args[1]], dtype=_NUMPY[node.type.dtype])
    if not node.type.shape:
        w.emit("Identity", [w.constant(value[0])], node.name)
        return
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    fill = helper.make_tensor("value", kind, [1], value.tobytes(), raw=True)
    w.emit("ConstantOfShape", [w.integers(node.type.shape)], node.name, value=fill)


def _arange(w: _Writer, node: Node) -> None:
    bounds = [w.scalar(bound, node.type.dtype) for bound in (0, node.type.shape[0], 1)]
    w.emit("Range", bounds, node.name)


def _constant(w: _Writer, node: Node) -> None:
    array: npt.NDArray[Any] = np.array(node.args[0], dtype=_NUMPY[node.type.dtype]).reshape(node.type.shape)
    w.emit("Identity", [w.constant(array)], node.name)


_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    CONSTANT: _constant,
    "aten._softmax.default": _softmax,
    "aten._to_copy.default": _copy,
    "aten.arange.default": _arange,
    "aten.argmax.default": _argmax,
    "aten.bitwise_and.Tensor": _bitwise_and,
    "aten.bmm.default": _bmm,
    "aten.cat.default": _cat,
    "aten.clamp.default": _clamp,
    "aten.expand.default": _expand,
    "aten.full.default": _full,
    "aten.gather.default": _gather,
    "aten.index_select.default": _index_select,
    "aten.mm.default": _mm,
    "aten.permute.default": _permute,
    "aten.roll.default": _roll,
    "aten.slice.Tensor": _slice,
    "aten.rsqrt.default": _rsqrt,
    "aten.view.default": _view,
    "aten.where.self": _where,
}
