from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import npucc.cache
import npucc.cli.options
from npucc.cli import main
from npucc.graph import Graph
from tests.npucc import tiny
from tests.npucc.cli.conftest import Run

HELP = """
import sys
from npucc.cli import main
for words in (["--help"], ["build", "--help"], ["plan", "--help"], ["--version"]):
    assert main(words) == 0
heavy = {"torch", "transformers", "onnx", "onnxruntime", "numpy"} & set(sys.modules)
print("imported:", sorted(heavy))
"""


def test_help_imports_nothing_heavy() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run(
        [sys.executable, "-c", HELP], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.endswith("imported: []\n")
    for command in ("build", "plan", "inspect", "verify", "keygen"):
        assert f"\n  {command} " in ran.stdout


def test_the_version_is_told(run: Run) -> None:
    assert run("--version").out == f"npucc {version('npucc')}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "error[usage]: No such command 'frobnicate'.\n  hint: npucc --help\n"),
        (["verify"], "error[usage]: Missing argument 'BUNDLE'.\n  hint: npucc verify --help\n"),
        ([], "error[usage]: Missing command.\n  hint: npucc --help\n"),
    ],
)
def test_what_typer_refuses_looks_like_every_other_error(run: Run, words: list[str], said: str) -> None:
    refused = run(*words)
    assert (refused.code, refused.out, refused.err) == (2, "", said)


def test_a_fault_of_ours_is_a_message_and_a_code(run: Run, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Graph) -> bytes:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("npucc.targets.cpu.compile_part", broken)
    words = ["build", *options, "--rank", "11", "--progress", "quiet"]
    refused = run(*words)
    assert refused.code == 70
    assert refused.err == (
        "error[internal]: ZeroDivisionError: a bug\n  hint: set NPUCC_DEBUG=1 for a traceback, and report it\n"
    )
    monkeypatch.setenv("NPUCC_DEBUG", "1")
    assert "Traceback (most recent call last)" in run(*words).err


def test_a_reader_that_went_away_is_no_fault(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "npucc", "keygen", "--out", "dev"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_out_of_memory_is_a_resource(run: Run, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(_: Graph) -> bytes:
        raise MemoryError

    monkeypatch.setattr("npucc.targets.cpu.compile_part", greedy)
    refused = run("build", *options, "--rank", "11")
    assert refused.code == 4
    assert "error[resource]: out of memory" in refused.err


def test_the_variable_of_the_cache_has_one_name() -> None:
    assert npucc.cli.options.CACHE_VARIABLE == npucc.cache.ENVIRONMENT_VARIABLE


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_swallows_what_is_printed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed: str
) -> None:
    monkeypatch.setattr(sys, closed, None)
    assert run("keygen", "--out", tmp_path / "key").code == 0
    again = run("keygen", "--out", tmp_path / "key")
    assert (again.code, again.out) == (1, "")
    getattr(sys, closed).close()


@pytest.mark.parametrize("output", ["none/out.npub", "folder.npub", "file"])
def test_a_place_where_no_bundle_can_be_is_found_before_the_work(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.npub").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("npucc.build.build", lambda *_, **__: pytest.fail("built"))
    (tmp_path / "config.json").write_text(json.dumps(tiny.config()))
    assert main(["build", "--model", "config.json", "--rank", "2", "--seq-len", "8", "-o", output]) == 1
    shown = capsys.readouterr().err
    assert output.partition("/")[0] in shown
    assert "hint" in shown
