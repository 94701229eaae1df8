from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npurt import cli as npurt_cli
from npurt.cli import main
from tests.npurt.cli.conftest import Cli


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in npurt_cli.COMMANDS)


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: npurt" in captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import npurt

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"npurt {npurt.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--lern-rate", "1"], "unknown argument --lern-rate"),
        (["train", "--step", "1"], "did you mean --steps?"),
        (["train", "--steps"], "expected one argument"),
        (["train"], "--bundle: is needed"),
        (["verify"], "required: BUNDLE"),
    ],
)
def test_mistakes_in_the_arguments(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error[usage]: ")
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_error_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--json"]) == 2
    error = json.loads(capsys.readouterr().err)
    assert error["code"] == "usage"
    assert error["exit_code"] == 2
    assert {"where": "--data", "what": "is needed"} in error["problems"]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(*_: Any) -> int:
        raise error

    monkeypatch.setattr("npurt.cli.doctor.run", run)


def test_fault_of_our_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NPURT_DEBUG", raising=False)
    fail_with(monkeypatch, ZeroDivisionError("oh"))
    assert main(["doctor"]) == 70
    said = capsys.readouterr().err
    assert said.startswith("error[internal]: ZeroDivisionError: oh")
    assert "NPURT_DEBUG=1" in said
    assert "Traceback" not in said
    monkeypatch.setenv("NPURT_DEBUG", "1")
    assert main(["doctor"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError(), 4, "error[resource]: out of memory"),
        (OSError(28, "No space left on device", "x"), 4, "error[resource]: cannot go on: No space left on device"),
        (PermissionError(13, "Permission denied", "x"), 1, "error[file]: cannot go on: Permission denied"),
    ],
)
def test_failures_of_the_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int, said: str
) -> None:
    fail_with(monkeypatch, error)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err.startswith(said)


def test_closed_pipe_is_no_fault() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "npurt", "doctor"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == ""


def test_closed_streams_and_narrow_encodings_are_no_fault() -> None:
    command = f"exec {sys.executable} -m npurt doctor"
    assert subprocess.run(f"{command} >&- 2>&-", shell=True, check=False, timeout=60).returncode == 0
    narrow = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", "from npurt.cli import _prepare_streams as p; p(); print('⟦')"],
        env=narrow,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "\\u27e6\n"


def test_eval_of_the_base_model_and_of_an_adapter(cli: Cli) -> None:
    base = cli("eval", "--json")
    assert base.returncode == 0, base.stderr
    cli("train", "--steps", "30")
    adapted = json.loads(cli("eval", "--json", "--adapter", str(cli.out)).stdout)
    assert adapted["loss"] < json.loads(base.stdout)["loss"]
    assert adapted["tokens"] == 240
    assert adapted["adapter"] == str(cli.out)
    text = cli("eval").stdout
    assert text.startswith("held-out loss")
    assert "perplexity" in text


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPURT_STEPZ", "3")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "onnxruntime  runs models" in text
    assert "NPURT_STEPZ" in text
    assert main(["doctor", "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["onnxruntime"]["state"] == "ok"
    assert findings["libraries"]["state"] == "ok"
    assert findings["variables"]["state"] == "note"


def test_doctor_without_onnxruntime(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["doctor"]) == 4
    assert "pip install 'npurt[cpu]'" in capsys.readouterr().out


def test_import_is_quick_and_light(tmp_path: Path) -> None:
    code = (
        "import sys, npurt; print(sorted(name for name in sys.modules if name.split('.')[0] in {'numpy', 'npubundle'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_public_names() -> None:
    import npurt

    for name in set(npurt.__all__) - {"Bundle"}:
        assert getattr(npurt, name) is not None
    assert set(dir(npurt)) == set(npurt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Trainee'"):
        npurt.Trainee  # noqa: B018


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_during_the_first_imports_is_quiet(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "difflib.py").write_text(f"import signal; signal.raise_signal({int(number)})")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "npurt", "--version"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_signal_whose_exception_a_library_rewords(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: Any) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("lost") from error
        return 0

    monkeypatch.setattr("npurt.cli.doctor.run", run)
    assert main(["doctor"]) == 143
    assert capsys.readouterr().err == "interrupted\n"
