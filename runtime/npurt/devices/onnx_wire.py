"""Turns inputs of an ONNX model into constants, on the level of protobuf's wire format.

A part has its frozen weights as graph inputs. ONNX Runtime packs a constant operand of a matrix product once, when the
session is made, and an input at every call. The model is a few kilobytes and the edit is two fields, so the runtime
needs neither the `onnx` package nor a protobuf library for it.

Field numbers are those of onnx.proto (`ModelProto`, `GraphProto`, `ValueInfoProto`, `TensorProto`), which never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from npubundle.errors import FormatError
from npubundle.tensor import TensorType

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_IR_VERSION, _MODEL_GRAPH, _MODEL_OPSET = 1, 7, 8
_GRAPH_NODE, _GRAPH_NAME, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 1, 2, 5, 11, 12
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TENSOR_DIMS, _TENSOR_DTYPE, _TENSOR_NAME, _TENSOR_EXTERNAL, _TENSOR_LOCATION = 1, 2, 8, 13, 14

#: `TensorProto.DataType` of our dtype names.
_DATA_TYPE = {"f32": 1, "i32": 6, "i64": 7, "bool": 9, "f16": 10, "bf16": 16}
_EXTERNAL = 1
#: External data needs a location; nothing reads it, because the arrays are handed over in memory.
_LOCATION = b"memory"


def with_constants(model: bytes, constants: Mapping[int, TensorType]) -> tuple[bytes, dict[int, str]]:
    """The model with the inputs at these indices made initializers without data, and the names of those inputs.

    The caller supplies the data (`SessionOptions.add_external_initializers`). Everything else keeps its bytes and
    order. Raises FormatError if the bytes are no ONNX model or an index is beyond its inputs.
    """
    edited = bytearray()
    names: dict[int, str] | None = None
    for number, wire, field, value in _fields(model):
        if number == _MODEL_GRAPH and wire == _BYTES and names is None:
            graph, names = _edit_graph(value, constants)
            edited += _bytes(_MODEL_GRAPH, graph)
        else:
            edited += field
    if names is None:
        raise FormatError("the payload of a part is no ONNX model: it has no graph")
    return bytes(edited), names


def input_names(model: bytes) -> list[str]:
    """Names of the graph's inputs, in order. Raises FormatError if the bytes are no ONNX model."""
    for number, wire, _, value in _fields(model):
        if number == _MODEL_GRAPH and wire == _BYTES:
            return [_name(v) for n, w, _, v in _fields(value) if n == _GRAPH_INPUT and w == _BYTES]
    raise FormatError("the payload of a part is no ONNX model: it has no graph")


def identity_model(opset: int) -> bytes:
    """The smallest model of an opset version: loading it tells whether a runtime knows that opset."""
    scalar = _bytes(1, _number(1, _DATA_TYPE["f32"]) + _bytes(2, b""))
    node = _bytes(1, b"x") + _bytes(2, b"y") + _bytes(4, b"Identity")
    value = {name: _bytes(_VALUE_NAME, name) + _bytes(_VALUE_TYPE, scalar) for name in (b"x", b"y")}
    graph = (
        _bytes(_GRAPH_NODE, node)
        + _bytes(_GRAPH_NAME, b"probe")
        + _bytes(_GRAPH_INPUT, value[b"x"])
        + _bytes(_GRAPH_OUTPUT, value[b"y"])
    )
    return _number(_MODEL_IR_VERSION, 8) + _bytes(_MODEL_GRAPH, graph) + _bytes(_MODEL_OPSET, _number(2, opset))


def _edit_graph(graph: bytes, constants: Mapping[int, TensorType]) -> tuple[bytes, dict[int, str]]:
    edited = bytearray()
    names: dict[int, str] = {}
    index = 0
    for number, wire, field, value in _fields(graph):
        if number == _GRAPH_INPUT and wire == _BYTES:
            if index in constants:
                names[index] = _name(value)
            else:
                edited += field
            index += 1
        else:
            edited += field
    if missing := sorted(set(constants) - set(names)):
        raise FormatError(f"the ONNX graph of a part has {index} inputs, but input {missing[0]} was asked for")
    for index, kind in constants.items():
        edited += _bytes(_GRAPH_INITIALIZER, _initializer(names[index], kind))
    return bytes(edited), names


def _initializer(name: str, kind: TensorType) -> bytes:
    location = _bytes(1, b"location") + _bytes(2, _LOCATION)
    return (
        b"".join(_number(_TENSOR_DIMS, size) for size in kind.shape)
        + _number(_TENSOR_DTYPE, _DATA_TYPE[kind.dtype])
        + _bytes(_TENSOR_NAME, name.encode())
        + _bytes(_TENSOR_EXTERNAL, location)
        + _number(_TENSOR_LOCATION, _EXTERNAL)
    )


def _name(value_info: bytes) -> str:
    for number, wire, _, value in _fields(value_info):
        if number == _VALUE_NAME and wire == _BYTES:
            try:
                return value.decode()
            except UnicodeDecodeError as error:
                raise FormatError("the payload of a part is no ONNX model: an input's name is no text") from error
    raise FormatError("the payload of a part is no ONNX model: an input has no name")


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes, bytes]]:
    """`(field number, wire type, the whole field, its content)` of every field of a message, in order."""
    position = 0
    while position < len(message):
        start = position
        tag, position = _read_varint(message, position)
        wire = tag & 7
        content = position
        if wire == _VARINT:
            _, position = _read_varint(message, position)
        elif wire == _BYTES:
            length, content = _read_varint(message, position)
            position = content + length
        elif wire in (_FIXED64, _FIXED32):
            position += 8 if wire == _FIXED64 else 4
        else:
            raise FormatError(f"the payload of a part is no ONNX model: wire type {wire} at byte {start}")
        if position > len(message):
            raise FormatError("the payload of a part is no ONNX model: it ends inside a field")
        yield tag >> 3, wire, message[start:position], message[content:position]


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            raise FormatError("the payload of a part is no ONNX model: it ends inside a number")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise FormatError("the payload of a part is no ONNX model: a number has more than ten bytes")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value
