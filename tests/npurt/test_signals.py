from __future__ import annotations

import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from npurt.signals import Interrupted, Signals


class Thing:
    """Something to hold a weak reference to."""


class Finalized:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def in_a_callback() -> None:
    thing = Thing()
    watch = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
    del thing
    assert watch() is None


def caught() -> None:
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("lose", [Finalized, in_a_callback, caught])
def test_a_signal_whose_exception_is_lost_is_remembered(
    lose: Callable[[], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with Signals() as signals:
        signals.check()
        lose()
        assert signals.interrupted
        assert signals.exit_code == 143
        with pytest.raises(Interrupted):
            signals.check()
    assert capsys.readouterr().err == ""


def test_what_is_to_finish_does_not_begin_after_a_signal() -> None:
    with Signals() as signals:
        caught()
        with pytest.raises(Interrupted), signals.finishing_with(lambda: pytest.fail("asked to finish")):
            pytest.fail("begun")


def test_a_signal_ends_what_is_to_finish_without_interrupting_it() -> None:
    asked = []
    with Signals() as signals, signals.finishing_with(lambda: asked.append("finish")):
        signal.raise_signal(signal.SIGINT)
        signals.check()
    assert asked == ["finish"]
    assert signals.received is signal.SIGINT
    assert not signals.interrupted


def test_a_command_that_is_done_cannot_be_interrupted() -> None:
    with Signals() as signals:
        signals.finish()
        signal.raise_signal(signal.SIGINT)
    assert not signals.interrupted


def test_what_else_python_discards_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", told.append)

    class Faulty:
        def __del__(self) -> None:
            raise ZeroDivisionError

    with Signals():
        Faulty()
    assert [discarded.exc_type for discarded in told] == [ZeroDivisionError]
