"""What a run shows of itself on standard error: numbered phases, in the manner of BuildKit, then lines or a bar.

`tty` draws in place, `plain` writes a line for every few steps, `json` an object for each event, `quiet` nothing.
Whatever takes longer than half a minute says that it is still alive.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, TextIO, get_args

from npurt.reports import StepReport

Style = Literal["auto", "tty", "plain", "json", "quiet"]
STYLES: tuple[str, ...] = get_args(Style)

#: Seconds after which something that is still running says so.
HEARTBEAT = 30.0
_REDRAW = 0.1  # seconds between two pictures of the bar
_BAR_WIDTH = 24
_RATE_OVER = 20  # steps whose mean time predicts the rest


def wants_color(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to colour what goes to a stream: NO_COLOR, then FORCE_COLOR, then whether it is a terminal that can."""
    match environ:
        case {"NO_COLOR": value} if value:
            return False
        case {"FORCE_COLOR": value} if value:
            return value != "0"
        case {"TERM": "dumb"}:
            return False
    return stream.isatty()


class Progress:
    """Shows phases, notes and steps. Threads may call it; a stream that nobody reads any more is no error.

    `check` is called as a phase begins, goes on and ends; what it raises ends the phase.
    """

    def __init__(
        self,
        style: Style,
        stream: TextIO,
        *,
        environ: Mapping[str, str] = os.environ,
        log_every: int = 1,
        check: Callable[[], None] | None = None,
    ) -> None:
        terminal = stream.isatty() and environ.get("TERM") != "dumb"
        self.style: Style = ("tty" if terminal else "plain") if style == "auto" else style
        self.color = wants_color(stream, environ) and self.style in {"tty", "plain"}
        self._stream = stream
        self._log_every = log_every
        self._check = check or (lambda: None)
        self._phases = 0
        self._lock = threading.RLock()
        self._line = ""  # what stands on the terminal's last line and is drawn again after each note
        self._drawn = 0.0
        self._seconds: deque[float] = deque(maxlen=_RATE_OVER)

    @contextmanager
    def phase(self, group: str, name: str) -> Iterator[Callable[[int, int], None]]:
        """Something before or after the steps: `#2 [weights] models/llama DONE 1.3s`.

        Gives a function to call with (done, all) as the work goes on.
        """
        self._phases += 1
        label = f"#{self._phases} [{group}] {name}"
        started = time.monotonic()
        share = ""

        def tell(state: str) -> None:
            self._phase(label, state, time.monotonic() - started)

        def beat() -> None:
            tell(f"{share}RUNNING")

        def advance(done: int, total: int) -> None:
            nonlocal share
            share = f"{done}/{total} "
            self._check()
            if self.style == "tty" and time.monotonic() - self._drawn >= _REDRAW:
                self._draw(f"{label} {share}")

        if self.style == "tty":
            self._draw(label)
        with self._heart(beat):
            try:
                self._check()
                yield advance
                self._check()
            except BaseException as error:
                tell("FAILED" if isinstance(error, Exception) else "INTERRUPTED")
                raise
        tell("DONE")

    @contextmanager
    def training(self, total: int) -> Iterator[None]:
        """The steps: a heartbeat where a single one takes long, and the bar gone at the end."""
        self._total = total
        self._step = 0
        self._moved = time.monotonic()

        def still_alive() -> None:
            waited = time.monotonic() - self._moved
            if waited >= HEARTBEAT:
                self._phase(f"step {self._step + 1}/{total}", "RUNNING", waited)

        try:
            with self._heart(still_alive):
                yield
        finally:
            if self.style == "tty":
                self._draw("")

    def step(self, report: StepReport) -> None:
        """An optimizer step is done."""
        self._step, self._moved = report.step, time.monotonic()
        self._seconds.append(report.seconds)
        last = report.step == self._total
        if self.style == "json":
            self._emit({"event": "step", "total_steps": self._total} | report.to_dict())
        elif self.style == "plain" and (last or report.step % self._log_every == 0 or report.evaluation):
            self._print(f"{self._of_total(report)}  {self._figures(report)}")
        elif self.style == "tty":
            if report.evaluation:
                self.note(f"{self._of_total(report)}  {report.evaluation}")
            if last or time.monotonic() - self._drawn >= _REDRAW:
                self._draw(self._bar(report))

    def note(self, text: str) -> None:
        """Lines of their own."""
        if self.style == "json":
            self._emit({"event": "note", "text": text})
        elif self.style != "quiet":
            self._print(text)

    def warn(self, text: str) -> None:
        """A line that stands out; shown in every style, also when quiet."""
        if self.style == "json":
            self._emit({"event": "warning", "text": text})
        else:
            self._print(f"\x1b[33mwarning:\x1b[0m {text}" if self.color else f"warning: {text}")

    def _phase(self, label: str, state: str, seconds: float) -> None:
        if self.style == "json":
            self._emit({"event": "phase", "phase": label, "state": state, "seconds": round(seconds, 3)})
        elif self.style == "tty" and state.endswith("RUNNING"):
            self._draw(f"{label} {state.removesuffix('RUNNING')}{seconds:.0f}s")
        elif self.style != "quiet":
            self._line = ""
            self._print(f"{label} {state} {seconds:.1f}s")

    @contextmanager
    def _heart(self, beat: Callable[[], None]) -> Iterator[None]:
        """Call `beat` every half minute, on a terminal every second, while the block runs."""
        done = threading.Event()
        every = 1.0 if self.style == "tty" else HEARTBEAT

        def run() -> None:
            while not done.wait(every):
                beat()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _of_total(self, report: StepReport) -> str:
        return f"step {report.step}/{self._total}"

    def _figures(self, report: StepReport) -> str:
        figures = (
            f"loss {report.loss:.4f}  grad norm {report.grad_norm:.3g}  lr {report.lr:.3g}  "
            f"{report.tokens_per_s:,.0f} tokens/s"
        )
        left = (self._total - report.step) * sum(self._seconds) / len(self._seconds)
        figures += f"  {_clock(left)} left" if report.step < self._total else ""
        return f"{figures}\n  {report.evaluation}" if report.evaluation and self.style == "plain" else figures

    def _bar(self, report: StepReport) -> str:
        share = report.step / self._total
        filled = round(share * _BAR_WIDTH)
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
        line = f"{bar} {share:4.0%}  {self._of_total(report)}  {self._figures(report)}"
        line = line[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be drawn over
        return f"\x1b[32m{line[:_BAR_WIDTH]}\x1b[0m{line[_BAR_WIDTH:]}" if self.color else line

    def _print(self, text: str) -> None:
        with self._lock:
            erase = "\r\x1b[2K" if self.style == "tty" else ""
            self._write(f"{erase}{text}\n{self._line}")

    def _draw(self, line: str) -> None:
        """Replace the terminal's last line."""
        with self._lock:
            self._line, self._drawn = line, time.monotonic()
            self._write(f"\r\x1b[2K{line}")

    def _emit(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            self._write(json.dumps(event, ensure_ascii=False) + "\n")

    def _write(self, text: str) -> None:
        with suppress(BrokenPipeError):
            self._stream.write(text)
            self._stream.flush()


def _clock(seconds: float) -> str:
    """A duration for people: 42s, 3m12s, 2h05m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
