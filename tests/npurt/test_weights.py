"""Reading model folders: dtypes, layout transforms, shards, and every way in which files can be wrong."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from npubundle.program import Source
from npurt import shards
from npurt.errors import DataError
from npurt.shards import WeightsError
from npurt.weights import INDEX, SINGLE, Checkpoint, same_content

Array = NDArray[Any]
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def folder_of(path: Path, tensors: dict[str, Array]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file(tensors, path / SINGLE)
    return path


def sharded(path: Path, shards_of: dict[str, dict[str, Array]], **index: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    for name, tensors in shards_of.items():
        save_file(tensors, path / name)
    weight_map = {tensor: name for name, tensors in shards_of.items() for tensor in tensors}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map} | index))
    return path


def header_of(path: Path, header: Any, body: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / SINGLE).write_bytes(len(raw).to_bytes(8, "little") + raw + body)
    return path


@pytest.mark.parametrize("chunk", [shards.CHUNK, 64])
@pytest.mark.parametrize("target", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("stored", DTYPES.values(), ids=DTYPES)
def test_every_dtype_becomes_every_dtype(
    tmp_path: Path, stored: Any, target: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK", chunk)
    values = np.random.default_rng(0).normal(size=(37, 11)).astype(stored)
    checkpoint = Checkpoint.open(
        folder_of(tmp_path / "m", {"t": values, "v": values[0], "s": np.asarray(values[0, 0])})
    )
    for name, wanted in {"t": values, "v": values[0], "s": values[0, 0]}.items():
        result = np.empty(wanted.shape, target)
        checkpoint.fill(Source(name), result)
        np.testing.assert_array_equal(result, wanted.astype(target))


TRANSFORMS = st.lists(st.sampled_from(["transpose", "rows"]), max_size=5)


@settings(deadline=None)
@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), TRANSFORMS, st.data())
def test_transforms_apply_in_order(
    shared_folder: Path, shape: tuple[int, int], names: list[str], data: st.DataObject
) -> None:
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    checkpoint = Checkpoint.open(folder_of(shared_folder, {"t": values}))
    wanted: Array = values
    transforms: list[tuple[str | int, ...]] = []
    for name in names:
        if name == "transpose":
            wanted = wanted.T
            transforms.append((name,))
        else:
            start = data.draw(st.integers(0, wanted.shape[0]))
            stop = data.draw(st.integers(start, wanted.shape[0]))
            wanted = wanted[start:stop]
            transforms.append((name, start, stop))
    result = np.full(wanted.shape, np.nan, np.float32)
    checkpoint.fill(Source("t", tuple(transforms)), result)
    np.testing.assert_array_equal(result, wanted)


def test_rows_of_a_vector(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder_of(tmp_path / "m", {"t": np.arange(9, dtype=np.float32)}))
    result = np.empty(3, np.float32)
    checkpoint.fill(Source("t", (("rows", 2, 8), ("rows", 1, 4))), result)
    np.testing.assert_array_equal(result, [3, 4, 5])


def test_several_targets_are_filled_from_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(20, dtype=np.float32).reshape(5, 4)
    checkpoint = Checkpoint.open(folder_of(tmp_path / "m", {"t": values}))
    readings = []

    def counted(*arguments: Any) -> Iterator[tuple[int, Array]]:
        readings.append(arguments)
        return shards.read_rows(*arguments)

    monkeypatch.setattr("npurt.weights.read_rows", counted)
    whole, part, turned = np.empty((5, 4), np.float32), np.empty((2, 4), np.float32), np.empty((4, 5), np.float32)
    checkpoint.fill_all(
        [(Source("t"), whole), (Source("t", (("rows", 3, 5),)), part), (Source("t", (("transpose",),)), turned)]
    )
    assert len(readings) == 1
    np.testing.assert_array_equal(whole, values)
    np.testing.assert_array_equal(part, values[3:])
    np.testing.assert_array_equal(turned, values.T)


def test_only_the_rows_that_are_wanted_are_read(tmp_path: Path) -> None:
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    checkpoint = Checkpoint.open(folder_of(tmp_path / "m", {"t": values}))
    os.truncate(tmp_path / "m" / SINGLE, (tmp_path / "m" / SINGLE).stat().st_size - 4 * 4 * 5)
    result = np.empty((3, 4), np.float32)
    checkpoint.fill(Source("t", (("rows", 2, 5),)), result)  # the lost rows are not needed
    np.testing.assert_array_equal(result, values[2:5])
    with pytest.raises(WeightsError, match="became shorter while it was read"):
        checkpoint.fill(Source("t"), np.empty((10, 4), np.float32))


def test_transforms_that_do_not_give_the_targets_shape_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder_of(tmp_path / "m", {"t": np.zeros((3, 2), np.float32)}))
    for transforms, shape in (((("transpose",),), (3, 2)), ((("rows", 1, 4),), (3, 2)), ((), (2,))):
        with pytest.raises(WeightsError, match="its transforms give"):
            checkpoint.fill(Source("t", transforms), np.empty(shape, np.float32))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    a, b = np.ones((2, 2), np.float32), np.zeros(3, np.float16)
    checkpoint = Checkpoint.open(sharded(tmp_path / "m", {"one.safetensors": {"a": a}, "two.safetensors": {"b": b}}))
    assert {name: (t.dtype, t.shape) for name, t in checkpoint.tensors.items()} == {
        "a": ("F32", (2, 2)),
        "b": ("F16", (3,)),
    }
    result = np.ones(3, np.float32)
    checkpoint.fill(Source("b"), result)
    assert not result.any()


@pytest.mark.parametrize("name", ["../m/one.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "a\0b"])
def test_an_index_names_files_beside_it_and_no_others(tmp_path: Path, name: str) -> None:
    folder = sharded(tmp_path / "m", {"one.safetensors": {"a": np.ones(1, np.float32)}}, weight_map={"a": name})
    with pytest.raises(WeightsError, match="outside its folder"):
        Checkpoint.open(folder)


def test_an_index_must_agree_with_its_files(tmp_path: Path) -> None:
    one = {"one.safetensors": {"a": np.ones(1, np.float32)}}
    for weight_map, fault in (
        ({"a": "one.safetensors", "b": "one.safetensors"}, "has b in one.safetensors, which does not contain it"),
        ({"a": "gone.safetensors"}, "cannot read a file of weights"),
        (["a"], "no weight_map"),
        ({"a": 1}, "no weight_map"),
    ):
        with pytest.raises(WeightsError, match=fault):
            Checkpoint.open(sharded(tmp_path / "m", one, weight_map=weight_map))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tensor = {"a": np.ones(1, np.float32)}
    two = {
        "one.safetensors": tensor | {"c": np.ones(1, np.float32)},
        "two.safetensors": tensor | {"b": np.ones(1, np.float32)},
    }
    with pytest.raises(WeightsError, match=r"a is in one\.safetensors, the index has it in two\.safetensors"):
        Checkpoint.open(sharded(tmp_path / "m", two))


def test_missing_files_have_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such folder") as caught:
        Checkpoint.open(tmp_path / "nowhere")
    assert "--weights" in (caught.value.remedy or "")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(WeightsError, match="has neither") as caught:
        Checkpoint.open(empty)
    assert caught.value.exit_code == DataError.exit_code
    save_file({"a": np.ones(1, np.float32)}, empty / SINGLE)
    with pytest.raises(DataError, match="cannot be read"):
        Checkpoint.open(empty)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(WeightsError, match="pickled") as caught:
        Checkpoint.open(tmp_path)
    assert "safe_serialization=True" in (caught.value.remedy or "")


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "cut short": ({"a": F32}, b"1234", "4 bytes are missing"),
    "too long": ({"a": F32}, b"123456789", "1 bytes follow the last tensor"),
    "no JSON": (b"{nonsense}", b"", "not valid JSON"),
    "no object": ([1], b"", "must be an object"),
    "duplicate key": (b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{}}', b"1234", "twice"),
    "size and shape differ": ({"a": F32 | {"shape": [3]}}, b"12345678", "the size of a is not that of its shape"),
    "ends before it begins": ({"a": F32 | {"data_offsets": [8, 0]}}, b"12345678", "the size of a"),
    "negative size": ({"a": F32 | {"shape": [-2]}}, b"12345678", "at least 0"),
    "gap": ({"a": F32, "b": F32 | {"data_offsets": [12, 20]}}, bytes(20), "b does not start where"),
    "overlap": ({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, bytes(12), "b does not start where"),
    "late start": ({"a": F32 | {"data_offsets": [8, 16]}}, bytes(16), "does not start where the header ends"),
    "missing offsets": ({"a": {"dtype": "F32", "shape": [2]}}, b"12345678", "data_offsets: is missing"),
}


@pytest.mark.parametrize(("header", "body", "fault"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_says_how(tmp_path: Path, header: Any, body: bytes, fault: str) -> None:
    with pytest.raises(WeightsError, match="damaged") as caught:
        Checkpoint.open(header_of(tmp_path / "m", header, body))
    assert fault in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"1234567", (1 << 40).to_bytes(8, "little"), (10).to_bytes(8, "little") + b"{}"])
def test_a_header_that_is_not_there_is_never_read(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / SINGLE).write_bytes(raw)
    with pytest.raises(WeightsError, match="cut short, or no safetensors file"):
        Checkpoint.open(tmp_path)


def test_dtypes_that_cannot_be_trained_are_still_listed(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder_of(tmp_path / "m", {"a": np.ones(2, np.int64)}))
    assert checkpoint.tensors["a"].dtype == "I64"


def test_same_content_compares_bits(tmp_path: Path) -> None:
    a = np.arange(6, dtype=np.float32).reshape(3, 2)
    tensors = {"a": a, "same": a.copy(), "other": a + np.float32(1), "shape": a.reshape(2, 3), "dtype": a.astype("f2")}
    stored = Checkpoint.open(folder_of(tmp_path / "m", tensors)).tensors
    assert [name for name in tensors if same_content(stored["a"], stored[name])] == ["a", "same"]


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")
