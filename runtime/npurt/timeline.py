"""When which queue did what: for people, as a trace that Perfetto and Chrome's tracing page open."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from npubundle.atomic import replacing
from npubundle.program import QUEUES, Queue


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work; times in seconds of `time.perf_counter`."""

    queue: Queue
    label: str
    start: float
    end: float


class Timeline:
    """Spans of all queues, in the order in which they ended. Safe to add to from several threads."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def add(self, queue: Queue, label: str, start: float, end: float) -> None:
        """Note a piece of work that has ended."""
        with self._lock:
            self._spans.append(Span(queue, label, start, end))

    @property
    def spans(self) -> tuple[Span, ...]:
        """What there is so far."""
        with self._lock:
            return tuple(self._spans)

    def busy(self) -> dict[Queue, float]:
        """Seconds in which each queue had work; those without any are left out."""
        found: dict[Queue, float] = {}
        for span in self.spans:
            found[span.queue] = found.get(span.queue, 0.0) + span.end - span.start
        return found

    def save(self, path: Path) -> None:
        """Write the trace (Chrome's Trace Event Format: complete events, microseconds, a row for each queue)."""
        document = {"displayTimeUnit": "ms", "traceEvents": [*_rows(), *_events(self.spans)]}
        with replacing(path) as file:
            file.write(json.dumps(document, separators=(",", ":")).encode())


def _rows() -> Iterable[dict[str, object]]:
    for number, queue in enumerate(QUEUES):
        yield {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": queue}}
        yield {"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def _events(spans: tuple[Span, ...]) -> Iterable[dict[str, object]]:
    first = min((span.start for span in spans), default=0.0)
    for span in spans:
        yield {
            "ph": "X",
            "pid": 0,
            "tid": QUEUES.index(span.queue),
            "name": span.label,
            "ts": round((span.start - first) * 1e6, 3),
            "dur": round((span.end - span.start) * 1e6, 3),
        }
