"""SIGINT and SIGTERM: the first asks for a clean stop, the second ends the process at once.

A clean stop during training means finishing the micro-step at hand and saving; before that there is nothing to save, so
the same signal interrupts whatever is being read or loaded.

The exception that interrupts can be lost. Python discards what the callback of a weak reference raises, and importing a
module runs one; so it does with finalizers, and libraries catch what they should let pass. The signal is therefore
remembered: `check` raises again between two steps of the work, and `interrupted` decides about the exit code.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from npubundle.errors import ExitCode

_HANDLED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal came, with nothing to save.

    Not a plain KeyboardInterrupt: once one has passed through `exec`, `python -m` ends by SIGINT, whatever `main` says.
    """


class Signals:
    """Holds the handlers while a command runs; `with Signals() as signals:`, in the main thread.

    Handlers are installed even where the parent process ignored SIGINT (shells do so for jobs in the background): a
    signal that somebody sends is meant.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        #: Whether a signal came that interrupts the command.
        self.interrupted = False
        self._finish: Callable[[], None] | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_hook = sys.unraisablehook

    def install(self) -> None:
        """Install the handlers; for good, where it is not `with` that does."""
        self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._on_discarded
        for number in _HANDLED:
            self._previous[number] = signal.signal(number, self._on_signal)

    def __enter__(self) -> Self:
        """Install the handlers."""
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._previous_hook

    def check(self) -> None:
        """Raise `Interrupted` if a signal is to interrupt the command, and its first exception was lost."""
        if self.interrupted:
            raise Interrupted

    @contextmanager
    def finishing_with(self, finish: Callable[[], None]) -> Iterator[None]:
        """While the block runs, the first signal calls `finish` and interrupts nothing.

        After a signal that came earlier the block does not begin: raises `Interrupted`.
        """
        self._finish = finish
        try:
            self.check()
            yield
        finally:
            self._finish = None

    def finish(self) -> None:
        """The command is done: a signal interrupts nothing any more. A second one still ends the process."""
        self._finish = _nothing

    @property
    def exit_code(self) -> ExitCode:
        """The exit code that tells which signal ended the run: 128 and its number."""
        return ExitCode.TERMINATED if self.received is signal.SIGTERM else ExitCode.INTERRUPTED

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            # Not by the default action, which the first process of a container never gets.
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if self._finish is None:
            self.interrupted = True
            raise Interrupted
        self._finish()

    def _on_discarded(self, discarded: sys.UnraisableHookArgs) -> None:
        if not issubclass(discarded.exc_type, Interrupted):
            self._previous_hook(discarded)


def _nothing() -> None:
    """What is done already needs no finishing."""
