"""SIGINT and SIGTERM: the first unwinds what is running, the second ends the process at once.

The exception that unwinds can be lost. Python discards what the callback of a weak reference raises, and importing a
module runs one; so it does with finalizers, and libraries catch what they should let pass. The signal is therefore
remembered: `check` raises again between two steps of the work, and it decides about the exit code.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A signal came: temporary files are removed on the way out.

    Not a plain KeyboardInterrupt: once one has passed through `exec`, `python -m` ends by SIGINT, whatever `main` says.
    """


class _Process:
    """What the signals of this process have come to."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.done = False

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            # Not by the default action, which the first process of a container never gets.
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if not self.done:
            raise Interrupted


_process = _Process()


def install() -> None:
    """Handle signals from now on, for as long as the process lives. For the main thread.

    Also where the parent process ignored SIGINT, as shells do for jobs in the background: a signal that somebody sends
    is meant.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _process.on_signal)
    told = sys.unraisablehook

    def hook(discarded: sys.UnraisableHookArgs) -> None:
        if not issubclass(discarded.exc_type, Interrupted):
            told(discarded)

    sys.unraisablehook = hook


def check() -> None:
    """Raise `Interrupted` if a signal came, and its first exception was lost. Any thread may call it."""
    if _process.received is not None:
        raise Interrupted


def exit_code(otherwise: int) -> int:
    """What to end the process with: 128 and the number of the signal that came, without one `otherwise`."""
    return otherwise if _process.received is None else 128 + _process.received


def finish() -> None:
    """The work is done: a signal interrupts nothing any more. A second one still ends the process."""
    _process.done = True
