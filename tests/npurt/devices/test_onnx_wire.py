"""The wire editor, against the `onnx` package."""

from __future__ import annotations

import contextlib

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from npubundle.errors import FormatError
from npubundle.tensor import ITEM_SIZE, TensorType
from npurt.devices.onnx_wire import identity_model, input_names, with_constants

NAMES = st.text(min_size=1, max_size=20)
SHAPES = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
TYPES = st.builds(TensorType, st.sampled_from(sorted(ITEM_SIZE)), SHAPES)
ELEMENT = {
    "f32": TensorProto.FLOAT,
    "f16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}


def model_of(inputs: dict[str, TensorType]) -> onnx.ModelProto:
    """A model with these inputs, an initializer, metadata and a node: something of everything around the edit."""
    values = [helper.make_tensor_value_info(name, ELEMENT[kind.dtype], kind.shape) for name, kind in inputs.items()]
    constant = helper.make_tensor("a constant", TensorProto.FLOAT, [2], [1.0, 2.0])
    node = helper.make_node("Identity", ["a constant"], ["y"])
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])]
    graph = helper.make_graph([node], "graph", values, outputs, [constant])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    helper.set_model_props(model, {"key": "value"})
    return model


@given(st.dictionaries(NAMES, TYPES, min_size=1, max_size=6), st.data())
def test_the_edit_is_what_the_onnx_package_would_do(inputs: dict[str, TensorType], data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, len(inputs) - 1)))
    names, kinds = list(inputs), list(inputs.values())
    model = model_of(inputs)

    edited, found = with_constants(model.SerializeToString(), {index: kinds[index] for index in chosen})

    wanted = onnx.ModelProto()
    wanted.CopyFrom(model)
    del wanted.graph.input[:]
    wanted.graph.input.extend(value for index, value in enumerate(model.graph.input) if index not in chosen)
    for index in chosen:
        tensor = wanted.graph.initializer.add(name=names[index], data_type=ELEMENT[kinds[index].dtype])
        tensor.dims.extend(kinds[index].shape)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="memory")
    assert onnx.load_from_string(edited) == wanted
    assert found == {index: names[index] for index in chosen}


@given(st.dictionaries(NAMES, TYPES, max_size=6))
def test_input_names_are_the_graphs(inputs: dict[str, TensorType]) -> None:
    assert input_names(model_of(inputs).SerializeToString()) == list(inputs)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_as_such(raw: bytes) -> None:
    try:
        edited, _ = with_constants(raw, {0: TensorType("f32", (2,))})
    except FormatError:
        return
    assert len(edited) > len(raw)  # by chance a graph with an input


@given(st.data())
def test_a_model_that_is_cut_short_is_refused_or_edited_as_far_as_it_goes(data: st.DataObject) -> None:
    whole = model_of({"x": TensorType("f32", (2, 3))}).SerializeToString()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with contextlib.suppress(FormatError):
        with_constants(whole[:cut], {0: TensorType("f32", (2, 3))})


def test_an_input_that_is_not_there_is_named() -> None:
    model = model_of({"x": TensorType("f32", ())}).SerializeToString()
    with pytest.raises(FormatError, match="has 1 inputs, but input 3 was asked for"):
        with_constants(model, {3: TensorType("f32", ())})


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", "no graph"),
        (b"\x3a\x05ab", "ends inside a field"),
        (b"\x3a", "ends inside a number"),
        (b"\xff" * 11, "more than ten bytes"),
        (b"\x3b", "wire type 3"),
        (b"\x3a\x02\x5a\x00", "an input has no name"),
        (b"\x3a\x05\x5a\x03\x0a\x01\xff", "name is no text"),
    ],
)
def test_each_way_of_being_damaged_is_told(raw: bytes, fault: str) -> None:
    with pytest.raises(FormatError, match=fault):
        with_constants(raw, {0: TensorType("f32", ())})


def test_the_probe_is_a_valid_model() -> None:
    onnx.checker.check_model(onnx.load_from_string(identity_model(18)))
