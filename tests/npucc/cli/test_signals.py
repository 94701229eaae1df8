"""What becomes of a signal, also where its exception is lost. `kill()` sends it and does not wait for anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

import npucc.build
from npubundle import container
from npucc import signals
from npucc.progress import Progress
from tests.npucc.cli.conftest import Run

#: A command of its own, in the place of all others.
COMMAND = """
import json, os, signal, sys, weakref
import typer
from npucc import cli
from npucc.__main__ import main

class Thing:
    pass

class Finalized:
    def __del__(self):
        kill()

def kill(*_):
    signal.raise_signal({number})

@cli.app.command("wait")
def wait(as_json: bool = typer.Option(False, "--json")) -> None:
{body}

sys.exit(main())
"""

LOST = {
    "finalizer": "Finalized()",
    "callback": "thing = Thing(); watch = weakref.ref(thing, kill); del thing",
    "swallowed": "try: kill()\nexcept BaseException: pass",
    "reworded": "try: kill()\nexcept BaseException as error: raise RuntimeError('lost') from error",
}
SIGNALS = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


def waited(folder: Path, number: int, body: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What `npucc wait` does with this body. Run by `-m`, which has exit codes of its own for what is interrupted."""
    (folder / "waiting.py").write_text(COMMAND.format(number=int(number), body=textwrap.indent(body, "    ")))
    command = [sys.executable, "-m", "waiting", "wait", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(), check=False, capture_output=True, text=True, timeout=60
    )


def environment(first: Path | None = None) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in [str(first or ""), *sys.path] if p)}


@SIGNALS
def test_a_signal_is_told_as_json(tmp_path: Path, number: signal.Signals, code: int) -> None:
    done = waited(tmp_path, number, "kill()\nprint('went on')", "--json")
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert json.loads(done.stderr) == {"code": "interrupted", "exit_code": code}


@SIGNALS
@pytest.mark.parametrize("how", LOST)
def test_a_lost_exception_changes_nothing_about_the_exit_code(
    tmp_path: Path, how: str, number: signal.Signals, code: int
) -> None:
    done = waited(tmp_path, number, LOST[how])
    assert (done.returncode, done.stderr) == (code, "interrupted\n")


@SIGNALS
def test_the_exit_code_is_ours_after_an_interrupted_exec(tmp_path: Path, number: signal.Signals, code: int) -> None:
    done = waited(tmp_path, number, "exec('kill()')")
    assert (done.returncode, done.stderr) == (code, "interrupted\n")


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    done = waited(tmp_path, signal.SIGINT, "try: kill()\nfinally: signal.raise_signal(signal.SIGTERM)")
    assert (done.returncode, done.stderr) == (143, "")


@SIGNALS
def test_a_signal_during_the_first_imports_is_quiet(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "typer.py").write_text(f"import signal; signal.raise_signal({int(number)})")
    done = subprocess.run(
        [sys.executable, "-m", "npucc", "--help"],
        env=environment(tmp_path), check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


# -- in this process: a signal is remembered, and its exception is lost already ---------------------------------------


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> signals._Process:
    monkeypatch.setattr(signals, "_process", process := signals._Process())
    return process


def test_a_signal_before_the_bundle_is_in_place_leaves_none(
    run: Run, options: list[str], process: signals._Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def assemble(*arguments: object, **keywords: object) -> object:
        process.received = signal.SIGTERM
        return finished(*arguments, **keywords)  # type: ignore[arg-type]

    finished = npucc.build.assemble
    monkeypatch.setattr("npucc.build.assemble", assemble)
    made = run("build", *options, "--progress", "quiet")
    assert (made.code, made.out, made.err) == (143, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_after_that_leaves_the_bundle_and_tells_no_success(
    run: Run, options: list[str], process: signals._Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(*arguments: object) -> None:
        finished(*arguments)  # type: ignore[arg-type]
        process.received = signal.SIGINT

    finished = container.write
    monkeypatch.setattr(container, "write", write)
    made = run("build", *options, "--progress", "quiet", "-o", "out.npub")
    assert (made.code, made.out, made.err) == (130, "", "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out.npub"]


def test_a_build_ends_between_two_steps(process: signals._Process) -> None:
    progress = Progress("quiet")
    begun = []

    def step(name: str) -> None:
        with progress.step("layer", name):
            begun.append(name)
            process.received = signal.SIGINT

    for show in (partial(step, "first"), partial(step, "second"), partial(progress.note, "text")):
        with pytest.raises(signals.Interrupted):
            show()
    with pytest.raises(signals.Interrupted):
        progress.cached("layer", "third")
    assert begun == ["first"]


def test_work_that_is_done_cannot_be_interrupted(process: signals._Process) -> None:
    signals.finish()
    process.on_signal(signal.SIGINT, None)
    assert process.received is signal.SIGINT
