"""SIGINT and SIGTERM: the first asks for a clean stop, the second ends the process at once.

A clean stop during training means finishing the micro-step at hand and saving; before that there is nothing to save, so
the same signal interrupts whatever is being read or loaded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from npubundle.errors import ExitCode

_HANDLED = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Holds the handlers while a command runs; `with Signals() as signals:`, in the main thread.

    Handlers are installed even where the parent process ignored SIGINT (shells do so for jobs in the background): a
    signal that somebody sends is meant.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._finish: Callable[[], None] | None = None
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        """Install the handlers."""
        for number in _HANDLED:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def finishing_with(self, finish: Callable[[], None]) -> Iterator[None]:
        """While the block runs, the first signal calls `finish` and interrupts nothing.

        A signal that came before the block begins has the same effect.
        """
        self._finish = finish
        if self.received is not None:
            finish()
        try:
            yield
        finally:
            self._finish = None

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
            raise KeyboardInterrupt
        self._finish()
