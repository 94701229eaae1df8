"""Who has to wait for whom: from the memory that instructions touch to the instructions that must be done before them.

Instructions of one queue run in the order of the list. Those of other queues may run at any time, but for what `after`
names. Two instructions conflict if one writes bytes that the other reads or writes; the later one in the list must
then wait. The list's order is thereby the meaning of a program, and queues only say what may overlap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from npubundle.program import Instruction, Move, Program, Queue, Repeat
from npubundle.tensor import ITEM_SIZE


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes `start` to `stop` of a place (a buffer, or the arena of a space) that an instruction reads or writes."""

    place: str
    start: int
    stop: int
    writes: bool

    def conflicts(self, other: Access) -> bool:
        """Whether their order matters."""
        apart = self.place != other.place or self.start >= other.stop or other.start >= self.stop
        return not apart and (self.writes or other.writes)


def queue_of(instruction: Instruction) -> Queue:
    """The queue that an instruction runs on. All calls of a repeat are on one."""
    return instruction.body[0].queue if isinstance(instruction, Repeat) else instruction.queue


def accesses(program: Program, instruction: Instruction) -> list[Access]:
    """What an instruction touches. An element that a repeat picks counts as the whole buffer."""
    if isinstance(instruction, Move):
        return [access_of(program, instruction.source), access_of(program, instruction.target, writes=True)]
    calls = instruction.body if isinstance(instruction, Repeat) else (instruction,)
    found = [access_of(program, instruction.count)] if isinstance(instruction, Repeat) else []
    for call in calls:
        found += [access_of(program, operand.buffer) for operand in call.args]
        found += [access_of(program, operand.buffer, writes=True) for operand in call.results]
    return list(dict.fromkeys(found))


def access_of(program: Program, name: str, *, writes: bool = False) -> Access:
    """The bytes of a buffer or view, wherever they lie."""
    buffer, root = program.buffers[name], program.root(name)
    start = buffer.view_offset * ITEM_SIZE[buffer.type.dtype]
    if root.role == "activation":
        place = root.name if root.arena_offset is None else f"[arena of the {root.space}]"
        start += root.arena_offset or 0
    else:
        place = root.name
    return Access(place, start, start + buffer.type.nbytes, writes)


def waits(program: Program, instructions: Sequence[Instruction]) -> list[tuple[int, ...]]:
    """For each instruction, those before it on other queues that it must wait for, but for what others imply.

    The list may be that of several phases, one after the other.
    """
    touched: dict[str, list[tuple[Access, int]]] = {}
    queues = [queue_of(instruction) for instruction in instructions]
    known: dict[Queue, dict[Queue, int]] = {}  # for each queue, how far it has seen the others come
    seen: list[dict[Queue, int]] = []  # the same when an instruction was reached
    found: list[tuple[int, ...]] = []
    for index, instruction in enumerate(instructions):
        mine = queues[index]
        last: dict[Queue, int] = {}
        for access in accesses(program, instruction):
            before = touched.setdefault(access.place, [])
            for other, number in before:
                if number != index and other.conflicts(access):
                    last[queues[number]] = max(last.get(queues[number], -1), number)
            # Whoever conflicts with what a write covers conflicts with the write, too, which waits for it.
            before[:] = [(o, n) for o, n in before if not _covered(o, n, access, index, queues)]
            before.append((access, index))
        reached = known.setdefault(mine, {})
        needed: list[int] = []
        for queue, number in sorted(last.items(), key=lambda item: -item[1]):
            if queue != mine and reached.get(queue, -1) < number:
                needed.append(number)
                for through, far in (*seen[number].items(), (queue, number)):
                    reached[through] = max(reached.get(through, -1), far)
        seen.append(dict(reached))
        found.append(tuple(sorted(needed)))
    return found


def _covered(other: Access, number: int, access: Access, index: int, queues: Sequence[Queue]) -> bool:
    """Whether an earlier access need not be remembered: by a write over it, or by the same access of the same queue."""
    inside = access.start <= other.start and other.stop <= access.stop
    if number == index or not inside:
        return False
    return access.writes or (not other.writes and queues[number] == queues[index])


def scheduled(program: Program) -> Program:
    """The program with `after` filled in, in every phase."""
    phases = {phase: tuple(_with_waits(program, body)) for phase, body in program.phases.items()}
    return dataclasses.replace(program, phases=phases)


def _with_waits(program: Program, body: Sequence[Instruction]) -> Iterator[Instruction]:
    for instruction, after in zip(body, waits(program, body), strict=True):
        yield dataclasses.replace(instruction, after=after)


def missing_waits(program: Program, phase: str) -> list[tuple[int, int]]:
    """Pairs (instruction, earlier instruction) of a phase that conflict and that nothing keeps apart."""
    body = program.phases[phase]
    queues = [queue_of(instruction) for instruction in body]
    reached: list[int] = []  # everything that is done when an instruction starts, as bits
    latest: dict[Queue, int] = {}
    for index, instruction in enumerate(body):
        done = 0
        for number in (*instruction.after, *([latest[queues[index]]] if queues[index] in latest else [])):
            if number < index:
                done |= reached[number] | 1 << number
        reached.append(done)
        latest[queues[index]] = index
    needed = waits(program, body)
    return [(index, n) for index, numbers in enumerate(needed) for n in numbers if not reached[index] >> n & 1]
