from __future__ import annotations

import io
import json
import time

import pytest

import npucc.progress
from npucc.progress import Progress, Style


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(style: Style, stream: io.StringIO | None = None) -> str:
    """What a step, a cached step and a note look like."""
    progress = Progress(style, stream := stream or io.StringIO())
    with progress.step("bwd", "layer"):
        pass
    progress.cached("fwd", "embed")
    progress.note("2/2 parts")
    return stream.getvalue()


def test_plain_lines() -> None:
    assert shown("plain") == "#1 [bwd] layer DONE 0.0s\n#2 [fwd] embed CACHED\n2/2 parts\n"


def test_a_terminal_shows_the_running_step_in_place() -> None:
    assert shown("tty") == (
        "\r\x1b[2K#1 [bwd] layer \r\x1b[2K#1 [bwd] layer DONE 0.0s\n"
        "\r\x1b[2K#2 [fwd] embed CACHED\n\r\x1b[2K2/2 parts \n"
    )


def test_quiet_is_quiet() -> None:
    assert shown("quiet") == ""


def test_json_lines() -> None:
    lines = [json.loads(line) for line in shown("json").splitlines()]
    assert [(line["step"], line["state"]) for line in lines] == [
        ("#1 [bwd] layer", "START"), ("#1 [bwd] layer", "DONE"), ("#2 [fwd] embed", "CACHED"), ("2/2 parts", "")
    ]  # fmt: skip
    assert lines[1]["seconds"] >= 0


@pytest.mark.parametrize(
    ("stream", "term", "style"),
    [(Terminal(), "xterm", "tty"), (Terminal(), "dumb", "plain"), (io.StringIO(), "xterm", "plain")],
)
def test_a_terminal_is_recognised(stream: io.StringIO, term: str, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    assert Progress("auto", stream).style == style


def test_a_step_that_fails_says_so() -> None:
    progress = Progress("plain", stream := io.StringIO())
    with pytest.raises(ZeroDivisionError), progress.step("bwd", "layer"):
        raise ZeroDivisionError
    assert stream.getvalue() == "#1 [bwd] layer FAILED 0.0s\n"


def test_a_long_step_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npucc.progress, "HEARTBEAT", 0.01)
    progress = Progress("plain", stream := io.StringIO())
    with progress.step("bwd", "layer"):
        while "RUNNING" not in stream.getvalue():
            time.sleep(0.005)
    assert stream.getvalue().splitlines()[-1].startswith("#1 [bwd] layer DONE")
