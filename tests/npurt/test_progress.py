from __future__ import annotations

import io
import json

import pytest

from npurt import EvalReport, StepReport, progress
from npurt.progress import Progress, Style, wants_color


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(step: int, *, evaluation: EvalReport | None = None) -> StepReport:
    return StepReport(step, 2.5 / step, 0.5, 1e-3, 100.0, 10, 12, 3.0, evaluation)


def shown(style: Style, *, log_every: int = 1, stream: io.StringIO | None = None, total: int = 4) -> str:
    stream = stream or io.StringIO()
    display = Progress(style, stream, environ={}, log_every=log_every)
    with display.phase("data", "train.jsonl"):
        pass
    display.note("40 rows")
    with display.training(total):
        for step in range(1, total + 1):
            display.step(report(step, evaluation=EvalReport(1.0, 0.5, 8) if step == total else None))
    display.warn("careful")
    return stream.getvalue()


def test_plain_has_a_line_for_every_step() -> None:
    lines = shown("plain").splitlines()
    assert lines[0].startswith("#1 [data] train.jsonl DONE")
    assert lines[1] == "40 rows"
    assert lines[2] == "step 1/4  loss 2.5000  grad norm 0.5  lr 0.001  100 tokens/s  9s left"
    assert lines[-3:-1] == [
        "step 4/4  loss 0.6250  grad norm 0.5  lr 0.001  100 tokens/s",
        "  held-out loss 1.0000, perplexity 2.718, accuracy 50.00 %, 8 tokens",
    ]
    assert lines[-1] == "warning: careful"
    assert "\x1b" not in "".join(lines)


def test_plain_with_every_second_step_and_the_last() -> None:
    steps = [line.split()[1] for line in shown("plain", log_every=2, total=5).splitlines() if line.startswith("step")]
    assert steps == ["2/5", "4/5", "5/5"]


def test_json_has_an_object_for_every_event() -> None:
    events = [json.loads(line) for line in shown("json").splitlines()]
    assert [event["event"] for event in events] == ["phase", "note", "step", "step", "step", "step", "warning"]
    assert events[2]["loss"] == 2.5
    assert events[5]["evaluation"]["accuracy"] == 0.5
    assert events[5]["total_steps"] == 4


def test_quiet_shows_warnings_only() -> None:
    assert shown("quiet") == "warning: careful\n"


def test_bar_is_drawn_in_place_and_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REDRAW", 0.0)
    monkeypatch.setenv("COLUMNS", "60")
    text = shown("auto", stream=Terminal())
    bars = [part for part in text.split("\r\x1b[2K") if "█" in part or "░" in part]
    assert len(bars) >= 4
    for bar in bars:
        plain = bar.replace("\x1b[32m", "").replace("\x1b[0m", "").splitlines()[-1]
        assert len(plain) < 60
    assert text.rstrip().endswith("careful")


def test_dumb_terminals_and_pipes_get_plain_lines() -> None:
    assert Progress("auto", Terminal(), environ={"TERM": "dumb"}).style == "plain"
    assert Progress("auto", io.StringIO(), environ={}).style == "plain"
    assert Progress("auto", Terminal(), environ={"TERM": "xterm"}).style == "tty"


@pytest.mark.parametrize(
    ("environ", "terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_color(environ: dict[str, str], terminal: bool, expected: bool) -> None:
    assert wants_color(Terminal() if terminal else io.StringIO(), environ) is expected


def test_long_phase_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT", 0.01)
    stream = io.StringIO()
    display = Progress("plain", stream, environ={})
    with display.phase("weights", "models/llama"):
        while "RUNNING" not in stream.getvalue():
            pass
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("#1 [weights] models/llama RUNNING")
    assert lines[-1].startswith("#1 [weights] models/llama DONE")


def test_long_step_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT", 0.01)
    stream = io.StringIO()
    display = Progress("plain", stream, environ={})
    with display.training(3):
        display.step(report(1))
        while "RUNNING" not in stream.getvalue():
            pass
    assert "step 2/3 RUNNING" in stream.getvalue()


def test_phase_that_fails() -> None:
    stream = io.StringIO()
    display = Progress("plain", stream, environ={})
    with pytest.raises(KeyError), display.phase("data", "x"):
        raise KeyError
    with pytest.raises(KeyboardInterrupt), display.phase("data", "y"):
        raise KeyboardInterrupt
    assert "x FAILED" in stream.getvalue()
    assert "y INTERRUPTED" in stream.getvalue()


@pytest.mark.parametrize(("last", "reached"), [(1, []), (2, ["begun"]), (3, ["begun", "on"])])
def test_phase_is_ended_by_what_its_check_raises(last: int, reached: list[str]) -> None:
    calls: list[str] = []
    found: list[str] = []

    def check() -> None:
        calls.append("check")
        if len(calls) == last:
            raise KeyboardInterrupt

    def work() -> None:
        with display.phase("data", "z") as advance:
            found.append("begun")
            advance(1, 2)
            found.append("on")

    display = Progress("plain", stream := io.StringIO(), environ={}, check=check)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert found == reached
    assert "z INTERRUPTED" in stream.getvalue()


class Deserted(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_reader_that_went_away_is_no_error() -> None:
    assert shown("plain", stream=Deserted()) == ""


@pytest.mark.parametrize(("seconds", "text"), [(7.9, "7s"), (192, "3m12s"), (7500, "2h05m")])
def test_durations(seconds: float, text: str) -> None:
    assert progress._clock(seconds) == text
