"""`npurt merge`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from npurt import UsageError
from npurt.cli import main
from npurt.cli.options import SIZE, Option, resolve
from npurt.export.peft import AdapterCard, save_adapter
from npurt.weights import SINGLE, Checkpoint
from tests.npurt.test_weights import folder_of

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
LORA = {
    f"base_model.model.{WEIGHT.removesuffix('.weight')}.lora_{matrix}.weight": np.ones(shape, np.float32)
    for matrix, shape in (("A", (2, 6)), ("B", (8, 2)))
}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    base = folder_of(tmp_path / "base", {WEIGHT: np.ones((8, 6), np.float32), "model.norm": np.ones(6, np.float32)})
    (base / "README.md").touch()
    card = AdapterCard.of(LORA, rank=2, alpha=4.0, base="org/other")
    adapter = save_adapter(tmp_path / "adapter", LORA, card)
    return ["merge", "--weights", str(base), "--adapter", str(adapter), "--out", str(tmp_path / "out")]


def test_it_prints_the_folder_and_says_what_it_did(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'out'}\n"
    assert "#1 [merge]" in captured.err
    assert "the adapter names org/other as its base model" in captured.err
    assert "left out of the copy: README.md" in captured.err
    assert "1 of 2 tensors replaced, 2 files, " in captured.err
    assert (load_file(tmp_path / "out" / SINGLE)[WEIGHT] == 5).all()


def test_json(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json", "--progress", "quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert len(found.pop("notes")) == 2
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert found == {
        "folder": str(tmp_path / "out"),
        "files": ["config.json", SINGLE],
        "tensors": 2,
        "replaced": 1,
        "size": size,
    }


def test_dtype_and_largest_file(words: list[str], tmp_path: Path) -> None:
    assert main([*words, "--dtype", "bfloat16", "--max-shard-size", "100B"]) == 0
    tensors = Checkpoint.open(tmp_path / "out").tensors
    assert {stored.dtype for stored in tensors.values()} == {"BF16"}
    assert len({stored.path for stored in tensors.values()}) == 2


def broken_config(folder: Path, **keys: Any) -> None:
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("out", 1, "not empty"),
        ("dtype", 2, "--dtype: must be one of float32, float16, bfloat16"),
        ("size", 2, "--max-shard-size: must be a size such as 5GB"),
        ("weights", 6, "neither model.safetensors nor"),
        ("adapter", 7, "bias: is 'all'"),
        ("values", 8, "refused to export"),
        ("space", 4, "not enough space"),
    ],
)
def test_exit_codes(
    what: str,
    code: int,
    said: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    match what:
        case "out":
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "x").touch()
        case "dtype":
            words += ["--dtype", "int8"]
        case "size":
            words += ["--max-shard-size", "5 apples"]
        case "weights":
            (tmp_path / "base" / SINGLE).unlink()
        case "adapter":
            broken_config(tmp_path, bias="all", use_dora=True)
        case "values":
            broken_config(tmp_path, lora_alpha=1e39)
        case "space":
            import shutil

            usage = shutil.disk_usage(tmp_path)._replace(free=0)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert main(words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert what == "out" or not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_leaves_nothing(words: list[str], tmp_path: Path, name: str, code: int) -> None:
    """It comes while the file of weights is forced to the disk."""
    script = (
        "import os, signal, sys\n"
        "from npurt.cli import main\n"
        "sync = os.fsync\n"
        "def fsync(handle):\n"
        f"    if '.safetensors' in os.readlink(f'/proc/self/fd/{{handle}}'): signal.raise_signal(signal.{name})\n"
        "    sync(handle)\n"
        "os.fsync = fsync\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("NPURT_")}
    done = subprocess.run(
        [sys.executable, "-c", script, *words], env=clean, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_file_that_cannot_grow_leaves_nothing(words: list[str], tmp_path: Path) -> None:
    """The system itself refuses: files of this process may have 256 bytes."""
    script = (
        "import resource, sys\n"
        "from npurt.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 4, done.stderr
    assert "error[resource]: cannot export the model: File too large" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize(
    ("word", "size"),
    [("5GB", 5 * 10**9), ("500MB", 500 * 10**6), ("1GiB", 1 << 30), ("1.5 kb", 1500), ("77", 77), ("2B", 2)],
)
def test_sizes(word: str, size: int, tmp_path: Path) -> None:
    option = Option("largest", SIZE, "size")
    assert resolve([option], {"largest": word}, config=None, environ={})["largest"] == size
    assert resolve([option], {}, config=None, environ={"NPURT_LARGEST": word})["largest"] == size
    (tmp_path / "run.toml").write_text(f'largest = "{word}"\n')
    assert resolve([option], {}, config=str(tmp_path / "run.toml"), environ={})["largest"] == size


@pytest.mark.parametrize("word", ["0", "-1", "5TB", "GB", "1e9", "1.5.5GB", "true", "0.1B", "[]"])
def test_what_is_no_size(word: str, tmp_path: Path) -> None:
    option = Option("largest", SIZE, "size")
    with pytest.raises(UsageError) as caught:
        resolve([option], {"largest": word}, config=None, environ={})
    assert "must be a size such as 5GB" in str(caught.value)
    (tmp_path / "run.toml").write_text(f"largest = {word if word in {'0', '-1', 'true', '[]'} else repr(word)}\n")
    with pytest.raises(UsageError, match="must be a size"):
        resolve([option], {}, config=str(tmp_path / "run.toml"), environ={})
