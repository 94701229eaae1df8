"""The examples of docs/reference/training-data.md are what the code gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from npurt.data import load
from npurt.data.jsonl import read_rows
from npurt.errors import DataError

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "training-data.md").read_text(encoding="utf-8")


def block(containing: str) -> str:
    blocks: list[str] = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    (found,) = (text for text in blocks if containing in text)
    return found.rstrip("\n")


def test_the_faults_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['{"text": "good"}'] * 9
    lines[2] = '{"text": 17}'
    lines[8] = '{"messages": [{"role": "user", "content": null}]}'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        read_rows([Path("train.jsonl")])
    assert caught.value.render() == block("error[data]")


def test_the_preview_shown(write_rows: Callable[..., Path], smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows({"prompt": "What is the capital of France?", "response": "Paris."})
    monkeypatch.chdir(path.parent)
    assert load(path.name, smollm2_dir, 128).preview() == block("⟦Paris.")


def test_the_python_example_runs(
    tmp_path: Path, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x", "response": "y"}\n')
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llama").symlink_to(smollm2_dir)
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out.splitlines()[-1].isdigit()
