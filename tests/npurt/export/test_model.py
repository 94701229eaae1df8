"""Full model folders: what is in them, in which dtypes and files, and that they appear whole or not at all."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from npubundle.errors import FileError, ResourceError
from npurt import DivergedError, UsageError
from npurt.export import tensor_file
from npurt.export.model import save_model
from npurt.export.tensor_file import Entry, rounded
from npurt.shards import WeightsError
from npurt.weights import EMBEDDING, HEAD, INDEX, SINGLE, Checkpoint
from tests.npurt.test_weights import folder_of, header_of, sharded

Array = NDArray[Any]
BF16 = ml_dtypes.bfloat16
random = np.random.default_rng(5)


def values(*shape: int, dtype: Any = np.float32) -> Array:
    return random.normal(size=shape).astype(dtype)


TENSORS: dict[str, Array] = {
    EMBEDDING: values(11, 6, dtype=BF16),
    "model.layers.0.w": values(6, 4, dtype=BF16),
    "model.layers.1.w": values(6, 4, dtype=np.float16),
    "model.norm": values(6),
    "model.steps": np.arange(3),
}
SHARDS = {
    "model-00001-of-00002.safetensors": {name: TENSORS[name] for name in (EMBEDDING, "model.steps")},
    "model-00002-of-00002.safetensors": {name: TENSORS[name] for name in list(TENSORS)[1:4]},
}


@pytest.fixture
def whole(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(folder_of(tmp_path / "base", TENSORS))


@pytest.fixture
def parted(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(sharded(tmp_path / "base", SHARDS))


def in_one(array: Array) -> Callable[[], Iterable[Array]]:
    return lambda: [array.astype(np.float32)]


def everything(folder: Path) -> dict[str, Array]:
    return {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}


def same(found: Array, wanted: Array) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["whole", "parted"])
def test_each_tensor_keeps_its_file_its_dtype_and_unless_replaced_its_bits(
    base: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(base)
    new = values(6, 4)
    report = save_model(
        tmp_path / "out", checkpoint, {"model.layers.0.w": lambda: [new[:1], new[1:]], "model.norm": in_one(new[:, 0])}
    )
    written = Checkpoint.open(tmp_path / "out")
    for name, stored in checkpoint.tensors.items():
        assert written.tensors[name].path.name == stored.path.name
    found = everything(tmp_path / "out")
    for name in (EMBEDDING, "model.layers.1.w", "model.steps"):
        assert same(found[name], TENSORS[name])
    assert same(found["model.layers.0.w"], new.astype(BF16))
    assert same(found["model.norm"], new[:, 0])
    assert (report.tensors, report.replaced) == (5, 2)
    assert report.size == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert report.files == tuple(sorted(path.name for path in (tmp_path / "out").iterdir()))
    assert (INDEX in report.files) == (base == "parted")


def test_files_are_what_the_library_writes(whole: Checkpoint, tmp_path: Path) -> None:
    save_model(tmp_path / "out", whole, {})
    path = tmp_path / "out" / SINGLE
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    widths = {"I64": 8, "F32": 4, "F16": 2, "BF16": 2}
    assert all(e["data_offsets"][0] % widths[e["dtype"]] == 0 for n, e in header.items() if n != "__metadata__")


def test_largest_file(whole: Checkpoint, tmp_path: Path) -> None:
    report = save_model(tmp_path / "out", whole, {}, max_shard_size=140)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in TENSORS.values())}
    assert list(index["weight_map"]) == sorted(TENSORS)
    shards = [name for name in report.files if name.endswith(".safetensors")]
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name in shards:
        assert sum(array.nbytes for array in load_file(tmp_path / "out" / name).values()) <= 140
    assert all(same(array, TENSORS[name]) for name, array in everything(tmp_path / "out").items())
    again = Checkpoint.open(tmp_path / "out")
    assert SINGLE in save_model(tmp_path / "one", again, {}, max_shard_size=1 << 20).files
    alone = save_model(tmp_path / "each", again, {}, max_shard_size=1)
    assert len(alone.files) == len(TENSORS) + 2, "a tensor that is larger has a file of its own"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_another_dtype(whole: Checkpoint, tmp_path: Path, dtype: str) -> None:
    new = values(6, 4)
    save_model(tmp_path / "out", whole, {"model.layers.0.w": in_one(new)}, dtype=dtype)
    wanted = {name: array.astype(np.float32) for name, array in (TENSORS | {"model.layers.0.w": new}).items()}
    kind = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    for name, array in everything(tmp_path / "out").items():
        assert same(array, TENSORS[name] if name == "model.steps" else wanted[name].astype(kind)), name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}),
        ({"dtype": "bfloat16"}, {"dtype": "float16"}),
        ({}, {"torch_dtype": "float16"}),
        (
            {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "quantization_config": {"dtype": "x"}},
            {"dtype": "float16", "text_config": {"dtype": "float16"}, "quantization_config": {"dtype": "x"}},
        ),
    ],
)
def test_the_configuration_follows_the_dtype(
    whole: Checkpoint, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    text = json.dumps(before | {"hidden_size": 6})
    (whole.folder / "config.json").write_text(text)
    base = Checkpoint.open(whole.folder)
    save_model(tmp_path / "same", base, {})
    assert (tmp_path / "same" / "config.json").read_text() == text
    save_model(tmp_path / "other", base, {}, dtype="float16")
    assert json.loads((tmp_path / "other" / "config.json").read_text()) == after | {"hidden_size": 6}


def test_ties_round_to_even_and_nothing_is_cut_off() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x00018000], np.uint32)
    (made,) = rounded(bits.view(np.float32), Entry("t", "BF16", (6,)), remedy="")
    assert [hex(value) for value in made] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80", "0xbf82", "0x2"]
    (half,) = rounded(np.array([2049.0, 2051.0, 2**-25, 3 * 2**-25], np.float32), Entry("t", "F16", (4,)), remedy="")
    assert half.view(np.float16).tolist() == [2048.0, 2052.0, 0.0, 2**-23]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("model.norm", np.nan),
        ("model.norm", -np.inf),
        ("model.layers.0.w", np.inf),
        ("model.layers.0.w", np.finfo(np.float32).max),
        ("model.layers.1.w", 65520.0),
        ("model.layers.1.w", np.nan),
    ],
)
def test_values_that_are_not_finite_are_never_written(whole: Checkpoint, tmp_path: Path, name: str, bad: float) -> None:
    new = values(*TENSORS[name].shape)
    new.flat[-1] = bad
    with pytest.raises(DivergedError, match=f"refused to export {name}"):
        save_model(tmp_path / "out", whole, {name: in_one(new)})
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    if name == "model.layers.1.w":
        new.flat[-1] = 65519.0
        save_model(tmp_path / "out", whole, {name: in_one(new)})


@pytest.mark.parametrize("dtype", [None, "float16", "float32"])
def test_base_values_that_are_not_finite_are_not_passed_on(tmp_path: Path, dtype: str | None) -> None:
    large = np.array([1.0, 3e38], np.float32).astype(BF16)
    base = Checkpoint.open(folder_of(tmp_path / "large", {"t": large}))
    if dtype == "float16":
        with pytest.raises(DivergedError, match="not finite in F16") as caught:
            save_model(tmp_path / "out", base, {}, dtype=dtype)
        assert "--dtype bfloat16" in str(caught.value.remedy)
    else:
        save_model(tmp_path / "out", base, {}, dtype=dtype)
    broken = Checkpoint.open(folder_of(tmp_path / "broken", {"t": np.array([1, np.nan], BF16)}))
    with pytest.raises(DivergedError, match="refused to export t"):
        save_model(tmp_path / "out2", broken, {}, dtype=dtype)


def test_dtypes_that_npurt_does_not_compute_with(tmp_path: Path) -> None:
    base = Checkpoint.open(folder_of(tmp_path / "base", {"t": values(2), "scale": np.ones(3)}))
    save_model(tmp_path / "same", base, {})
    assert same(everything(tmp_path / "same")["scale"], np.ones(3))
    with pytest.raises(UsageError, match="scale has dtype F64") as caught:
        save_model(tmp_path / "out", base, {}, dtype="bfloat16")
    assert "--dtype" in str(caught.value.remedy)
    eight = np.arange(4, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    header = {"q": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    eighths = Checkpoint.open(header_of(tmp_path / "eight", header, eight.tobytes()))
    save_model(tmp_path / "eighths", eighths, {})
    assert (tmp_path / "eighths" / SINGLE).read_bytes().endswith(eight.tobytes())
    odd = {"q": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    with pytest.raises(WeightsError, match="dtype F4"):
        save_model(tmp_path / "out", Checkpoint.open(header_of(tmp_path / "odd", odd, b"xx")), {})
    with pytest.raises(UsageError, match="one of float32"):
        save_model(tmp_path / "out", base, {}, dtype="int8")
    with pytest.raises(UsageError, match="positive"):
        save_model(tmp_path / "out", base, {}, max_shard_size=0)


def test_replacements_that_do_not_fit_are_faults_of_the_caller(whole: Checkpoint, tmp_path: Path) -> None:
    wrong: dict[str, Callable[[], Iterable[Array]]] = {"nope": in_one(values(1)), "model.steps": in_one(values(3))}
    for name, content in wrong.items():
        with pytest.raises(ValueError, match=name):
            save_model(tmp_path / "out", whole, {name: content})
    with pytest.raises(ValueError, match="24 bytes, 20 were made"):
        save_model(tmp_path / "out", whole, {"model.norm": in_one(values(5))})
    with pytest.raises(ValueError, match="float32, not float64"):
        save_model(tmp_path / "out", whole, {"model.norm": lambda: [np.zeros(6)]})
    assert not (tmp_path / "out").exists()


def test_tensors_without_values(tmp_path: Path) -> None:
    base = Checkpoint.open(folder_of(tmp_path / "base", {"none": np.zeros((0, 4), np.float32), "t": values(2)}))
    save_model(tmp_path / "out", base, {"none": in_one(np.zeros((0, 4)))})
    assert everything(tmp_path / "out")["none"].shape == (0, 4)


# -- tied heads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {}])
def test_a_stored_head_follows_the_embedding_that_it_is_tied_to(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = sharded(tmp_path / "base", {"a.safetensors": {EMBEDDING: values(9, 4, dtype=BF16)}})
    one = load_file(folder / "a.safetensors")[EMBEDDING]
    sharded(folder, {"a.safetensors": {EMBEDDING: one}, "b.safetensors": {HEAD: one}})
    (folder / "config.json").write_text(json.dumps(config))
    new = values(9, 4)
    report = save_model(tmp_path / "out", Checkpoint.open(folder), {EMBEDDING: in_one(new)})
    found = everything(tmp_path / "out")
    assert same(found[HEAD], new.astype(BF16))
    assert same(found[HEAD], found[EMBEDDING])
    assert report.replaced == 2
    save_model(tmp_path / "both", Checkpoint.open(folder), {EMBEDDING: in_one(new), HEAD: in_one(new + 1)})
    assert same(everything(tmp_path / "both")[HEAD], (new + 1).astype(BF16))


def test_a_head_that_is_not_stored_stays_so_and_one_of_its_own_stays_as_it_was(tmp_path: Path) -> None:
    embedding, head = values(9, 4), values(9, 4)
    new = {EMBEDDING: in_one(values(9, 4))}
    save_model(tmp_path / "a", Checkpoint.open(folder_of(tmp_path / "tied", {EMBEDDING: embedding})), new)
    assert list(everything(tmp_path / "a")) == [EMBEDDING]
    untied = folder_of(tmp_path / "untied", {EMBEDDING: embedding, HEAD: head})
    save_model(tmp_path / "b", Checkpoint.open(untied), new)
    assert same(everything(tmp_path / "b")[HEAD], head)
    equal = folder_of(tmp_path / "equal", {EMBEDDING: embedding, HEAD: embedding})
    (equal / "config.json").write_text('{"tie_word_embeddings": false}')
    save_model(tmp_path / "c", Checkpoint.open(equal), new)
    assert same(everything(tmp_path / "c")[HEAD], embedding)


# -- the other files --------------------------------------------------------------------------------------------------

TAKEN = {
    "tokenizer.json": b'{"x": "\xc3\xa4"}',
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}\n",
    "added_tokens.json": b"{}",
    "vocab.json": b"{}",
    "merges.txt": b"a b\r\n",
    "tokenizer.model": b"\x00\xff",
    "chat_template.jinja": b"{{ x }}\r\n",
    "additional_chat_templates/tool.jinja": b"{{ y }}",
    "generation_config.json": b'{"eos_token_id": 2}',
    "LICENSE.txt": b"terms",
}
LEFT = ("README.md", "additional_chat_templates/run.py", "modeling_x.py", "optimizer.pt", "pytorch_model.bin")


def test_what_loaders_need_is_copied_as_it_is_and_the_rest_is_named(whole: Checkpoint, tmp_path: Path) -> None:
    (whole.folder / "additional_chat_templates").mkdir()
    for name in (*TAKEN, *LEFT, ".gitattributes", "spare.safetensors"):
        (whole.folder / name).write_bytes(TAKEN.get(name, b"?"))
    (whole.folder / "tokenizer.json").rename(tmp_path / "blob")  # as hub caches keep files
    (whole.folder / "tokenizer.json").symlink_to(tmp_path / "blob")
    report = save_model(tmp_path / "out", whole, {})
    for name, data in TAKEN.items():
        path = tmp_path / "out" / name
        assert path.read_bytes() == data
        assert not path.is_symlink()
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {*TAKEN, "config.json", SINGLE}
    (note,) = report.notes
    assert note == f"left out of the copy: {', '.join(sorted([*LEFT, 'spare.safetensors']))}"


def test_a_companion_that_is_no_file_is_refused(whole: Checkpoint, tmp_path: Path) -> None:
    os.mkfifo(whole.folder / "tokenizer.json")
    with pytest.raises(FileError, match="not a regular file"):
        save_model(tmp_path / "out", whole, {})


# -- the folder -------------------------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_refused(
    whole: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileError, match=r"not empty: config\.json, model\.safetensors") as caught:
        save_model(whole.folder, whole, {})
    assert "base-2" in str(caught.value.remedy)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="is a file"):
        save_model(tmp_path / "file", whole, {})
    with pytest.raises(FileError, match="name too long"):
        save_model(tmp_path / ("x" * 300), whole, {})
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mounted")
    with pytest.raises(FileError, match="mount point") as caught:
        save_model(tmp_path / "mounted", whole, {})
    assert "mounted/model" in str(caught.value.remedy)


def test_an_empty_folder_and_a_link_to_one_will_do(whole: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    report = save_model(tmp_path / "link", whole, {})
    assert report.folder == tmp_path / "link"
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == ["config.json", SINGLE]
    save_model(tmp_path / "not" / "yet" / "there", whole, {})


def test_a_full_disk_leaves_nothing(whole: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr("npurt.export.model.write_file", full)
    with pytest.raises(ResourceError, match="cannot export the model: No space left"):
        save_model(tmp_path / "out", whole, {})
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_room_is_looked_for_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    base = Checkpoint.open(folder_of(tmp_path / "base", {"t": values(1 << 18)}))
    usage = shutil.disk_usage(tmp_path)._replace(free=2 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match="not enough space on the disk to export the model"):
        save_model(tmp_path / "out", base, {"t": lambda: pytest.fail("it was made")})
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_memory_holds_a_piece_of_a_tensor(tmp_path: Path) -> None:
    save_file({"large": np.ones((2048, 4096), np.float32)}, str(tmp_path / SINGLE))
    (tmp_path / "config.json").write_text("{}")
    base = Checkpoint.open(tmp_path)
    new = np.full((2048, 4096), 2, np.float32)
    tracemalloc.start()
    try:
        save_model(tmp_path / "kept", base, {})
        save_model(tmp_path / "new", base, {"large": lambda: [new]}, dtype="bfloat16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, f"{peak:,} bytes for a tensor of {new.nbytes:,}"
    assert (everything(tmp_path / "new")["large"] == 2).all()


def test_progress_counts_tensors(whole: Checkpoint, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    save_model(tmp_path / "out", whole, {}, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(TENSORS)) for done in range(len(TENSORS) + 1)]


def test_a_header_that_no_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "MAX_HEADER", 64)
    with pytest.raises(ValueError, match="longer than readers accept"):
        tensor_file.file_size([Entry("a" * 64, "F32", (1,))])
