"""What a build tells about itself while it runs, on standard error, in the manner of BuildKit."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from npucc import signals

Style = Literal["auto", "tty", "plain", "json", "quiet"]
#: Seconds after which a step that is still running says so.
HEARTBEAT = 30.0


class Progress:
    """Numbered steps: `#7 [layer] layer.backward DONE 1.2s`. On a terminal the running step is shown in place.

    Between two steps is where a build ends after a signal whose exception was lost.
    """

    def __init__(self, style: Style = "auto", stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.style: Style = ("tty" if terminal else "plain") if style == "auto" else style
        self.steps = 0
        self._lock = threading.Lock()

    @contextmanager
    def step(self, group: str, name: str) -> Iterator[None]:
        """A step that takes time; a heartbeat shows that it is still alive."""
        signals.check()
        self.steps += 1
        label = f"#{self.steps} [{group}] {name}"
        started = time.monotonic()
        done = threading.Event()
        beat = threading.Thread(target=self._beat, args=(label, started, done), daemon=True)
        self._show(label, "START", running=True)
        beat.start()
        try:
            yield
        except BaseException:
            self._end(done, beat)
            self._show(label, "FAILED", seconds=time.monotonic() - started)
            raise
        self._end(done, beat)
        self._show(label, "DONE", seconds=time.monotonic() - started)
        signals.check()

    def cached(self, group: str, name: str) -> None:
        """A step that had nothing to do."""
        signals.check()
        self.steps += 1
        self._show(f"#{self.steps} [{group}] {name}", "CACHED")

    def note(self, text: str) -> None:
        """A line of its own."""
        signals.check()
        self._show(text, "")

    def _end(self, done: threading.Event, beat: threading.Thread) -> None:
        done.set()
        beat.join()

    def _beat(self, label: str, started: float, done: threading.Event) -> None:
        while not done.wait(HEARTBEAT):
            self._show(label, "RUNNING", seconds=time.monotonic() - started)

    def _show(self, label: str, state: str, *, seconds: float | None = None, running: bool = False) -> None:
        if self.style == "quiet":
            return
        with self._lock:
            took = "" if seconds is None else f" {seconds:.1f}s"
            if self.style == "json":
                line = {"step": label, "state": state} | ({} if seconds is None else {"seconds": round(seconds, 3)})
                print(json.dumps(line), file=self.stream, flush=True)
            elif self.style == "tty":
                end = "" if running else "\n"
                print(f"\r\x1b[2K{label} {'' if running else state}{took}", end=end, file=self.stream, flush=True)
            elif not running:
                print(f"{label} {state}{took}".rstrip(), file=self.stream, flush=True)
