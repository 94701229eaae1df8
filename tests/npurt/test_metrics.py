from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from npubundle.errors import FileError
from npurt import EvalReport, StepReport
from npurt.metrics import RunLog, versions


def events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_appended_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.jsonl"
    with RunLog(path) as log:
        log.write("run", {"weights": "models/ärger"})
        assert len(events(path)) == 1  # at once, not at the end
        log.step(StepReport(1, 2.0, 0.5, 1e-3, 100.0, 10, 12, 0.12, EvalReport(1.5, 0.25, 8)))
    with RunLog(path) as log:
        log.write("end", {"status": "finished"})
    found = events(path)
    assert [event["event"] for event in found] == ["run", "step", "evaluation", "end"]
    assert all(isinstance(event["time"], float) for event in found)
    assert found[1]["loss"] == 2.0
    assert "evaluation" not in found[1]
    assert found[2] | {"time": 0} == {
        "event": "evaluation",
        "time": 0,
        "step": 1,
        "loss": 1.5,
        "accuracy": 0.25,
        "tokens": 8,
        "perplexity": pytest.approx(4.4817, rel=1e-4),
    }


def test_perplexity_without_bound_is_null_in_json() -> None:
    assert EvalReport(1e6, 0.0, 1).to_dict()["perplexity"] is None


def test_without_a_path_nothing_happens() -> None:
    with RunLog(None) as log:
        assert not log.is_open
        log.write("run", {})


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot open the log file"):
        RunLog(tmp_path)


def test_disk_that_fills_up_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with RunLog(tmp_path / "run.jsonl") as log:
        log.on_fault = told.append
        monkeypatch.setattr(os, "write", full)
        log.write("step", {})
        log.write("step", {})
    assert told == [f"the log file {tmp_path / 'run.jsonl'} ends here: No space left on device"]


def test_versions_name_what_is_installed() -> None:
    assert versions().keys() >= {"python", "npurt", "npubundle", "numpy"}


def test_a_pipe_without_a_reader_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(FileError, match="open the log file"):
        RunLog(tmp_path / "log")
