"""Queues of a program as threads: work of one queue runs in order, that of others meanwhile.

Whoever hands in work gets a ticket, and may name tickets of other queues that must be done before. A failure ends
everything that was handed in after it; it is raised where somebody waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from npubundle.program import Queue
from npurt.timeline import Timeline


@dataclass(slots=True, eq=False)
class Ticket:
    """Stands for work that was handed in."""

    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _Work:
    run: Callable[[], None]
    label: str
    after: Sequence[Ticket]
    ticket: Ticket


class Queues:
    """A thread for each queue, started when it first gets work. `timeline` notes when what ran."""

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self._waiting: dict[Queue, SimpleQueue[_Work | None]] = {}
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None

    def submit(self, queue: Queue, run: Callable[[], None], label: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Hand in work; it starts when all before it on this queue, and the tickets of `after`, are done."""
        if queue not in self._waiting:
            self._waiting[queue] = SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(queue,), name=f"queue-{queue}", daemon=True)
            self._threads.append(thread)
            thread.start()
        ticket = Ticket()
        self._waiting[queue].put(_Work(run, label, after, ticket))
        return ticket

    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Wait until these are done. Raises what the first failure raised, once all queues have passed it."""
        for ticket in tickets:
            ticket.done.wait()
        if self._failure is not None:
            self._drain()
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Let queues finish what they have, and end their threads."""
        for waiting in self._waiting.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._waiting.clear()
        self._threads.clear()

    def _drain(self) -> None:
        """Wait until nothing that was handed in before is left."""
        last = [self.submit(queue, lambda: None, "drain") for queue in self._waiting]
        for ticket in last:
            ticket.done.wait()

    def _serve(self, queue: Queue) -> None:
        while (work := self._waiting[queue].get()) is not None:
            for ticket in work.after:
                ticket.done.wait()
            try:
                if self._failure is None:
                    started = time.perf_counter()
                    work.run()
                    if self.timeline is not None:
                        self.timeline.add(queue, work.label, started, time.perf_counter())
            except BaseException as failure:  # noqa: BLE001 -- raised again where somebody waits
                if self._failure is None:
                    self._failure = failure
            finally:
                work.ticket.done.set()
