from __future__ import annotations

import dataclasses
import datetime as dt
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from npubundle.errors import ExitCode
from npurt.data import IGNORED, DataOptions, Pack, PackedDataset, load
from npurt.errors import DataError, MismatchError, UsageError

SENTENCE = "What is the capital of France? The capital of France is Paris. "


def rows(count: int) -> list[dict[str, str]]:
    return [{"text": f"{number} {SENTENCE * (number % 4 + 1)}"} for number in range(count)]


@pytest.fixture
def folder(model_folder: Callable[..., Path]) -> Path:
    return model_folder("chatml")


@pytest.fixture
def data(write_rows: Callable[..., Path]) -> Path:
    return write_rows(*rows(40))


def signature(pack: Pack) -> bytes:
    return b"".join(array.tobytes() for array in (pack.tokens, pack.positions, pack.segments, pack.labels))


def stream(dataset: PackedDataset, count: int) -> list[bytes]:
    return [signature(dataset.next_pack()) for _ in range(count)]


def test_the_stream_has_every_pack_once_an_epoch_in_new_orders(folder: Path, data: Path) -> None:
    dataset = load(data, folder, 128)
    every = sorted(signature(pack) for pack in dataset)
    assert len(every) == len(dataset) == dataset.counts.packs > 5
    first, second = stream(dataset, len(dataset)), stream(dataset, len(dataset))
    assert sorted(first) == sorted(second) == every
    assert first != second
    assert stream(load(data, folder, 128), len(dataset)) == first
    assert stream(load(data, folder, 128, DataOptions(seed=1)), len(dataset)) != first
    assert dataset.epochs_done == 2


def test_without_shuffling_packs_come_as_in_the_file(folder: Path, data: Path) -> None:
    dataset = load(data, folder, 128, DataOptions(shuffle=False))
    in_order = [signature(pack) for pack in dataset]
    assert stream(dataset, 2 * len(dataset)) == in_order * 2


@pytest.mark.parametrize("taken", [0, 1, 7, 11, 12, 13, 30])
def test_a_restored_stream_goes_on_with_the_next_pack(taken: int, folder: Path, data: Path) -> None:
    uninterrupted = load(data, folder, 256)
    stream(uninterrupted, taken)
    saved = json.loads(json.dumps(uninterrupted.state()))
    expected = stream(uninterrupted, 25)
    resumed = load(data, folder, 256)
    resumed.restore(saved)
    assert resumed.state()["index"] == saved["index"]
    assert stream(resumed, 25) == expected


def test_iterating_leaves_the_stream_alone(folder: Path, data: Path) -> None:
    dataset, other = load(data, folder, 128), load(data, folder, 128)
    stream(dataset, 3)
    stream(other, 3)
    assert [signature(pack) for pack in dataset] == [signature(pack) for pack in other]
    assert stream(dataset, 3) == stream(other, 3)


@pytest.mark.parametrize(
    ("options", "seq_len", "named"),
    [
        (DataOptions(seed=1), 128, "seed"),
        (DataOptions(), 64, "digest"),
        (DataOptions(pack=False), 128, "digest"),
        (DataOptions(shuffle=False), 128, "digest"),
    ],
)
def test_a_state_of_another_stream_is_refused(
    options: DataOptions, seq_len: int, named: str, folder: Path, data: Path
) -> None:
    saved = load(data, folder, 128).state()
    other = load(data, folder, seq_len, options)
    before = other.state()
    with pytest.raises(MismatchError) as caught:
        other.restore(saved)
    assert [problem.where for problem in caught.value.problems] == [named]
    assert caught.value.exit_code == ExitCode.MISMATCH
    assert other.state() == before


def test_changed_data_are_refused(folder: Path, data: Path, write_rows: Callable[..., Path]) -> None:
    saved = load(data, folder, 128).state()
    changed = rows(40)
    changed[17]["text"] += "!"
    with pytest.raises(MismatchError):
        load(write_rows(*changed, name="other.jsonl"), folder, 128).restore(saved)
    moved = load(write_rows(*rows(40), name="moved.jsonl"), folder, 128)
    moved.restore(saved)  # the same rows under another name are the same data


@pytest.mark.parametrize("change", [{"epoch": -1}, {"epoch": "1"}, {"index": 10_000}, {"index": None}])
def test_a_damaged_state_is_refused(change: dict[str, object], folder: Path, data: Path) -> None:
    dataset = load(data, folder, 128)
    with pytest.raises(MismatchError) as caught:
        dataset.restore({**dataset.state(), **change})
    assert [problem.where for problem in caught.value.problems] == list(change)
    with pytest.raises(MismatchError):
        dataset.restore({})


def test_packed_and_alone_hold_the_same_documents(folder: Path, data: Path) -> None:
    def documents(dataset: PackedDataset) -> list[tuple[bytes, bytes]]:
        found = []
        for pack in dataset:
            for segment in range(1, int(pack.segments.max()) + 1):
                here = pack.segments == segment
                found.append((pack.tokens[here].tobytes(), pack.labels[here].tobytes()))
        return sorted(found)

    packed, alone = load(data, folder, 512), load(data, folder, 512, DataOptions(pack=False))
    assert documents(packed) == documents(alone)
    assert len(packed) < len(alone) == 40


def test_counts_add_up(folder: Path, write_rows: Callable[..., Path]) -> None:
    user = {"role": "user", "content": SENTENCE}
    assistant = {"role": "assistant", "content": "Paris."}
    path = write_rows(
        {"text": SENTENCE * 20},
        {"messages": [user, assistant]},
        {"messages": [user, assistant] * 8},
        {"prompt": SENTENCE * 20, "response": "Paris."},
        {"prompt": "Say it.", "response": SENTENCE * 20},
    )
    path.write_text("\n" + path.read_text())
    dataset = load(path, folder, 128)
    counts = dataset.counts
    packs = list(dataset)
    assert counts.rows == 5
    assert counts.blank_lines == 1
    assert counts.documents == sum(int(pack.segments.max()) for pack in packs)
    assert counts.packs == len(packs)
    assert counts.capacity == 128 * len(packs)
    assert counts.tokens == sum(int(np.count_nonzero(pack.segments)) for pack in packs)
    assert counts.supervised_tokens == sum(pack.supervised for pack in packs)
    assert (counts.rows_cut, counts.rows_split, counts.rows_dropped, counts.ends_lost) == (2, 1, 1, 1)
    assert dataset.notes == (f"{path}:5: no supervised token within 128 tokens",)
    assert dataset.largest_token == max(int(pack.tokens.max()) for pack in packs)
    assert json.loads(json.dumps(counts.as_dict()))["rows_cut"] == 2
    line = str(counts)
    for part in ("5 rows", "1 split", "1 dropped", "2 rows cut", "1 blank lines passed over"):
        assert part in line


def test_the_preview_shows_marks_and_counts(folder: Path, write_rows: Callable[..., Path]) -> None:
    path = write_rows({"prompt": "What is the capital of France?", "response": "Paris."})
    dataset = load(path, folder, 128)
    assert dataset.preview() == (
        f"{path}:1: {dataset.counts.tokens} tokens, {dataset.counts.supervised_tokens} supervised (in ⟦ ⟧)\n"
        "<|im_start|>system\nYou are a small model.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        f"<|im_start|>assistant\n⟦Paris.<|im_end|>⟧\n\n{dataset.counts}"
    )


def test_several_files_make_one_dataset(folder: Path, write_rows: Callable[..., Path]) -> None:
    whole = load(write_rows(*rows(6)), folder, 128)
    parts: list[str | Path] = [
        write_rows(*rows(6)[:2], name="a.jsonl"),
        str(write_rows(*rows(6)[2:], name="b.jsonl")),
    ]
    assert load(parts, folder, 128).digest == whole.digest
    assert load(str(parts[0]), str(folder), 128).counts.rows == 2


def test_mixed_shapes_make_one_dataset(folder: Path, write_rows: Callable[..., Path]) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    dataset = load(write_rows({"text": "a b"}, chat, {"prompt": "x", "completion": "y"}), folder, 128)
    assert dataset.counts.documents == 3


def test_the_templates_clock_can_be_fixed(model_folder: Callable[..., Path], write_rows: Callable[..., Path]) -> None:
    folder, path = model_folder("llama3"), write_rows({"prompt": "x", "response": "y"})
    day = dt.datetime(2026, 12, 1)  # noqa: DTZ001 -- as templates see it, without a zone
    dataset = load(path, folder, 128, DataOptions(clock=day))
    assert "Today Date: 01 Dec 2026" in dataset.preview()
    later = load(path, folder, 128, DataOptions(clock=day + dt.timedelta(days=1)))
    assert later.digest != dataset.digest
    again = load(path, folder, 128, DataOptions(clock=dt.datetime.fromisoformat(str(dataset.state()["clock"]))))
    again.restore(dataset.state())


@pytest.mark.parametrize(
    "change",
    [{"template": "jinja"}, {"loss_on": "prompt"}, {"overlong": "truncate"}],
    ids=lambda change: next(iter(change)),
)
def test_options_that_do_not_exist_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(change))} is one of") as caught:
        dataclasses.replace(DataOptions(), **change)  # type: ignore[arg-type]
    assert caught.value.exit_code == ExitCode.USAGE


def test_senseless_calls_are_refused(folder: Path, data: Path) -> None:
    with pytest.raises(UsageError, match="at least 2 tokens"):
        load(data, folder, 1)
    with pytest.raises(UsageError, match="no data files"):
        load([], folder, 128)


def test_overlong_rows_can_be_errors(folder: Path, data: Path) -> None:
    with pytest.raises(DataError, match="longer than the sequence"):
        load(data, folder, 24, DataOptions(overlong="error"))
    assert load(data, folder, 24, DataOptions(overlong="drop")).counts.rows_dropped > 0


def test_a_row_of_a_real_model(smollm2_dir: Path, write_rows: Callable[..., Path]) -> None:
    dataset = load(write_rows({"prompt": "What is the capital of France?", "response": "Paris."}), smollm2_dir, 64)
    (pack,) = dataset
    # ĊParis . <|im_end|>, each predicted from the token before it
    assert pack.labels[pack.labels != IGNORED].tolist()[-1] == 2
    assert pack.supervised == 3
    assert "⟦Paris.<|im_end|>⟧" in dataset.preview()


def test_importing_takes_neither_torch_nor_what_only_some_data_need() -> None:
    heavy = ["torch", "transformers", "jinja2", "tokenizers", "numpy.random"]
    script = f"import sys, npurt.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_plain_text_needs_no_jinja2(folder: Path, data: Path) -> None:
    loading = f"from npurt.data import load; load({str(data)!r}, {str(folder)!r}, 64)"
    script = f"import sys; {loading}; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
