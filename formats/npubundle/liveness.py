"""Where activations live: from a program's order of instructions to static offsets in one arena per phase and space.

Two activations may share bytes when one is dead before the other is first written. Placement is greedy, largest first,
at the lowest offset that is free over the whole life of the buffer (the "greedy by size" planner of TensorFlow Lite,
Pisarchyk and Lee 2020). The result depends on the program alone, so that it can be computed at build time and again
after a program was cut short for a check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from npubundle.program import SPACES, Buffer, Call, Instruction, Move, Program, Repeat, Space
from npubundle.schedule import scheduled

#: Cache-line (and AVX-512 vector) size: every activation starts at a multiple of it.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Life:
    """First and last instruction of a phase (both included) at which a buffer holds something that counts."""

    buffer: Buffer
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes the buffer takes in the arena, rounded up to the alignment."""
        return -(-self.buffer.type.nbytes // ALIGNMENT) * ALIGNMENT


def lives(program: Program, phase: str, space: Space = "device") -> list[Life]:
    """The life of every activation of a space that a phase touches, in order of first use."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, instruction in enumerate(program.phases[phase]):
        for name in _touched(instruction):
            root = program.root(name)
            if root.role == "activation" and root.space == space:
                first.setdefault(root.name, index)
                last[root.name] = index
    return [Life(program.buffers[name], start, last[name]) for name, start in first.items()]


def place(program: Program, phase: str, space: Space = "device") -> tuple[dict[str, int], int]:
    """Offsets in bytes of the activations that a phase has in a space, and the size of the arena they need."""
    placed: list[tuple[int, Life]] = []
    offsets: dict[str, int] = {}
    for life in sorted(lives(program, phase, space), key=lambda life: (-life.size, life.start, life.buffer.name)):
        offset = 0
        for other_offset, other in placed:  # by offset: the first gap that is wide enough wins
            overlaps_in_time = life.start <= other.end and other.start <= life.end
            if overlaps_in_time and other_offset < offset + life.size and offset < other_offset + other.size:
                offset = other_offset + other.size
        placed.append((offset, life))
        placed.sort(key=lambda item: item[0])
        offsets[life.buffer.name] = offset
    size = max((offset + life.size for offset, life in placed), default=0)
    return offsets, size


def planned(program: Program) -> Program:
    """The program with arena offsets and sizes filled in, and with what instructions wait for, which depends on them.

    An activation has one offset in the whole program. Phases never run at the same time and activations do not survive
    a phase, so two phases may use one name if they would put it at the same place (`first_micro_step` and `micro_step`
    do); others, such as `micro_step` and `evaluate`, must not share names.
    """
    buffers = dict(program.buffers)
    arenas: dict[Space, dict[str, int]] = {space: {} for space in SPACES}
    owner: dict[str, str] = {}
    for space in SPACES:
        for phase in program.phases:
            offsets, size = place(program, phase, space)
            if offsets or space == "device":
                arenas[space][phase] = size
            for name, offset in offsets.items():
                if name in owner and buffers[name].arena_offset != offset:
                    raise ValueError(f"activation {name} is used by the phases {owner[name]} and {phase}")
                owner[name] = phase
                buffers[name] = dataclasses.replace(buffers[name], arena_offset=offset)
    placed = dataclasses.replace(program, buffers=buffers, arena=arenas["device"], host_arena=arenas["host"])
    return scheduled(placed)


def truncated(program: Program, layers: int) -> Program:
    """The program of a model with only its first `layers` decoder layers: what a check of a few layers runs.

    Instructions of later layers are left out, and whatever read the last boundary of a chain reads the boundary after
    `layers`.
    """
    if not 1 <= layers <= program.layers:
        raise ValueError(f"layers must be from 1 to {program.layers}, is {layers}")
    renamed = {chain[-1]: chain[layers] for chain in program.chains}

    def step(instruction: Call | Move) -> Call | Move:
        if isinstance(instruction, Call):
            return _renamed(instruction, renamed)
        source, target = (renamed.get(name, name) for name in (instruction.source, instruction.target))
        return dataclasses.replace(instruction, source=source, target=target)

    def cut(instructions: tuple[Instruction, ...]) -> Iterator[Instruction]:
        for instruction in instructions:
            if instruction.layer is not None and instruction.layer >= layers:
                continue
            if isinstance(instruction, Repeat):
                yield dataclasses.replace(instruction, body=tuple(_renamed(call, renamed) for call in instruction.body))
            else:
                yield dataclasses.replace(step(instruction), after=())

    phases = {phase: tuple(cut(instructions)) for phase, instructions in program.phases.items()}
    chains = tuple(chain[: layers + 1] for chain in program.chains)
    return planned(dataclasses.replace(program, phases=phases, chains=chains))


def _renamed(call: Call, names: dict[str, str]) -> Call:
    def swap(operands: tuple) -> tuple:  # type: ignore[type-arg]
        return tuple(dataclasses.replace(o, buffer=names.get(o.buffer, o.buffer)) for o in operands)

    return dataclasses.replace(call, args=swap(call.args), results=swap(call.results))


def _touched(instruction: Instruction) -> Iterator[str]:
    if isinstance(instruction, Move):
        yield from (instruction.source, instruction.target)
        return
    calls = instruction.body if isinstance(instruction, Repeat) else (instruction,)
    for call in calls:
        for operand in (*call.args, *call.results):
            yield operand.buffer
