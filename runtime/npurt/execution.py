"""Running phases: one instruction after the other, or, where a phase has several queues, each queue in its own thread.

A phase that was started may still be at work when the next one starts; so do the update of the last layer and the
forward pass of the first overlap. What the instructions of both share keeps them in order, as within a phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from npubundle.program import Instruction, Move, Program, Queue, Repeat
from npubundle.schedule import access_of, accesses, queue_of, waits
from npurt.queues import Queues, Ticket
from npurt.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction that is ready to run."""

    instruction: Instruction
    run: Callable[[], None]

    @property
    def queue(self) -> Queue:
        """Where it runs."""
        return queue_of(self.instruction)

    @property
    def label(self) -> str:
        """For people: the part, or what is moved, with its layer."""
        i = self.instruction
        name = i.source if isinstance(i, Move) else i.body[0].part if isinstance(i, Repeat) else i.part
        return name if i.layer is None else f"{name} ({i.layer})"


class Execution:
    """Phases of a program, handed in and run. `concurrent`: whether queues may run at the same time."""

    def __init__(self, program: Program, *, concurrent: bool) -> None:
        self._program = program
        self._concurrent = concurrent
        self._queues = Queues()
        #: Phases that may still be at work, at most two, with a ticket for each instruction.
        self._flight: list[tuple[str, list[Ticket]]] = []
        self._after: dict[tuple[str | None, str], list[tuple[int, ...]]] = {}
        self._sharing: dict[tuple[str, str, bool], tuple[int, ...]] = {}

    def record(self, timeline: Timeline | None) -> None:
        """Note from now on what runs when; None: no longer."""
        self._queues.timeline = timeline

    def run(self, phase: str, steps: Sequence[Step]) -> None:
        """Run a phase to its end, or only start it where it has several queues. Raises what a step raises."""
        if self._concurrent and len({step.queue for step in steps}) > 1:
            self._start(phase, steps)
            return
        self.finish()
        for step in steps:
            started = time.perf_counter()
            step.run()
            if self._queues.timeline is not None:
                self._queues.timeline.add(step.queue, step.label, started, time.perf_counter())

    def _start(self, phase: str, steps: Sequence[Step]) -> None:
        while len(self._flight) > 1:
            self._wait(self._flight[0][1])
            self._flight = self._flight[1:]
        before, earlier = self._flight[-1] if self._flight else (None, [])
        tickets = list(earlier)
        for step, after in zip(steps, self._waits(before, phase), strict=True):
            tickets.append(self._queues.submit(step.queue, step.run, step.label, [tickets[n] for n in after]))
        self._flight.append((phase, tickets[len(earlier) :]))

    def _waits(self, before: str | None, phase: str) -> list[tuple[int, ...]]:
        """What each instruction waits for, counted from the beginning of the phase before, if that may be at work."""
        if (before, phase) not in self._after:
            earlier = () if before is None else self._program.phases[before]
            both = [*earlier, *self._program.phases[phase]]
            self._after[before, phase] = waits(self._program, both)[len(earlier) :]
        return self._after[before, phase]

    def sync(self, name: str, *, writes: bool) -> None:
        """Wait until a buffer or view may be read, or written, from outside. Raises what a step has raised."""
        for phase, tickets in tuple(self._flight):
            self._wait([tickets[index] for index in self._conflicting(phase, name, writes=writes)])

    def _conflicting(self, phase: str, name: str, *, writes: bool) -> tuple[int, ...]:
        key = (phase, name, writes)
        if key not in self._sharing:
            mine = access_of(self._program, name, writes=writes)
            body = enumerate(self._program.phases[phase])
            found = (index for index, i in body if any(mine.conflicts(a) for a in accesses(self._program, i)))
            self._sharing[key] = tuple(found)
        return self._sharing[key]

    def finish(self) -> None:
        """Wait until nothing is at work. Raises what a step has raised."""
        for _, tickets in tuple(self._flight):
            self._wait(tickets)
        self._flight = []

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        try:
            self._queues.wait(tickets)
        except BaseException:
            self._flight = []
            raise

    def close(self) -> None:
        """End the threads, when what they have is done; failures that nobody waited for are dropped."""
        self._queues.close()
        self._flight = []
