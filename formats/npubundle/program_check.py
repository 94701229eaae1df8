"""Is a program well formed, given the signatures of its parts? Asked at build time, and when a bundle is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from npubundle.errors import FormatError
from npubundle.fields import Problems
from npubundle.liveness import lives
from npubundle.part import Part, Port
from npubundle.program import SPACES, WAYS, Buffer, Call, Move, Operand, Program, Repeat, Space
from npubundle.schedule import missing_waits
from npubundle.tensor import TensorType

#: Roles that an instruction may write.
_WRITABLE = {"param", "copy", "grad", "moment", "activation", "output"}
_COUNTER = TensorType("i32", ())


def check(program: Program, parts: Mapping[str, Part], *, where: str | None = None) -> None:
    """Raise FormatError, with every problem, unless the program is well formed.

    That is: all names resolve, types fit, views stay inside, nothing is read before it is written or while it is
    written over (unless the part allows it), host and device touch what lies in their own memory only, arena offsets
    keep living activations apart, and instructions of different queues that share memory wait for each other.
    """
    problems = Problems()
    for buffer in program.buffers.values():
        _check_buffer(program, buffer, problems)
    _check_chains(program, problems)
    problems.raise_any("program is not valid", FormatError, where=where)
    for phase in program.phases:
        _check_phase(program, phase, parts, problems)
    problems.raise_any("program is not valid", FormatError, where=where)
    for phase in program.phases:
        _check_arena(program, phase, problems)
    problems.raise_any("program's memory plan is not valid", FormatError, where=where)
    for phase in program.phases:
        for index, earlier in missing_waits(program, phase):
            problems.add(f"{phase}[{index}]", f"does not wait for {phase}[{earlier}], whose memory it shares")
    problems.raise_any("program's schedule is not valid", FormatError, where=where)


def _check_buffer(program: Program, buffer: Buffer, problems: Problems) -> None:
    if buffer.view_of is not None:
        base = program.buffers.get(buffer.view_of)
        if base is None or base.view_of is not None:
            problems.add(buffer.name, f"is a view of {buffer.view_of}, which is not a buffer of its own")
        elif base.type.dtype != buffer.type.dtype or buffer.view_offset + buffer.type.elements > base.type.elements:
            problems.add(buffer.name, f"does not lie inside {base.name}, which is {base.type}")
        elif base.role != buffer.role or buffer.role == "activation":
            problems.add(buffer.name, f"has role {buffer.role}, but is a view of {base.name} with role {base.role}")
        elif base.space != buffer.space:
            problems.add(
                buffer.name, f"lies in the {buffer.space}'s memory, but is a view of {base.name}, which does not"
            )
    elif buffer.role == "weight" and buffer.source is None:
        problems.add(buffer.name, "is a weight without a source")
    if buffer.source is not None and buffer.source.tensor not in program.checkpoint:
        problems.add(buffer.name, f"comes from {buffer.source.tensor}, which is not in the checkpoint table")


def _check_chains(program: Program, problems: Problems) -> None:
    """Cutting a program short puts one boundary in the place of another, so all of a chain must be alike."""
    for number, chain in enumerate(program.chains):
        where = f"chains[{number}]"
        if len(chain) != len(program.chains[0]):
            problems.add(where, f"has {len(chain)} boundaries, the first chain has {len(program.chains[0])}")
        # Nothing may come out of the first layer's backward pass: then its boundary is a name without a buffer.
        missing = [name for name in chain[1:] if name not in program.buffers]
        if missing:
            problems.add(where, f"names {missing[0]}, which is not a buffer")
        kinds = {program.buffers[name].type for name in chain if name in program.buffers}
        if len(kinds) > 1:
            problems.add(where, f"joins buffers of different types: {', '.join(sorted(map(str, kinds)))}")
        if len({program.buffers[name].space for name in chain if name in program.buffers}) > 1:
            problems.add(where, "joins buffers of both memory spaces")


def _check_phase(program: Program, phase: str, parts: Mapping[str, Part], problems: Problems) -> None:
    _check_order(program, phase, problems)
    written: set[str] = set()
    apart = program.uses("host")
    for index, (call, repeat) in enumerate(_flat(program, phase)):
        if isinstance(call, Move):
            _check_move(program, call, written, f"{phase}[{index}] move", problems)
            written.add(call.target)
            continue
        where = f"{phase}[{index}] {call.part}"
        part = parts.get(call.part)
        if part is None:
            problems.add(where, "calls a part that the bundle does not have")
            continue
        for what, operands, ports in (("argument", call.args, part.inputs), ("result", call.results, part.outputs)):
            _check_types(program, what, operands, ports, repeat, where, problems)
        if apart or call.queue == "host":
            _check_spaces(program, call, where, problems)
        _check_reads(program, call, written, where, problems)
        _check_writes(program, call, part, where, problems)
        written.update(operand.buffer for operand in call.results)


def _check_order(program: Program, phase: str, problems: Problems) -> None:
    for index, instruction in enumerate(program.phases[phase]):
        if isinstance(instruction, Repeat):
            counter = program.buffers.get(instruction.count)
            if counter is None or counter.role != "scalar" or counter.type != _COUNTER:
                problems.add(f"{phase}[{index}]", f"counts with {instruction.count}, which is not a scalar {_COUNTER}")
            if {call.queue for call in instruction.body} not in ({"compute"}, {"host"}, set()):
                problems.add(f"{phase}[{index}]", "repeats calls that are neither all on compute nor all on host")
        if any(earlier >= index for earlier in instruction.after):
            problems.add(f"{phase}[{index}]", "waits for itself or a later instruction")


def _check_move(program: Program, move: Move, written: set[str], where: str, problems: Problems) -> None:
    ends = (program.buffers.get(move.source), program.buffers.get(move.target))
    for name, buffer, space in zip((move.source, move.target), ends, WAYS[move.queue], strict=True):
        if buffer is None:
            problems.add(where, f"names {name}, which is not a buffer")
        elif buffer.space != space:
            problems.add(where, f"is on {move.queue}, but {name} lies in the {buffer.space}'s memory")
    source, target = ends
    if source is not None and source.role == "activation" and source.name not in written:
        problems.add(where, f"reads {source.name} before anything wrote it")
    if target is not None and target.role not in _WRITABLE:
        problems.add(where, f"writes {target.name}, whose role is {target.role}")
    if source is not None and target is not None and source.type != target.type:
        problems.add(where, f"copies {source.name}, which is {source.type}, to {target.name}, which is {target.type}")


def _check_spaces(program: Program, call: Call, where: str, problems: Problems) -> None:
    """Nobody computes in another's memory."""
    own = "host" if call.queue == "host" else "device"
    for operand in (*call.args, *call.results):
        buffer = program.buffers.get(operand.buffer)
        if buffer is not None and buffer.space != own:
            problems.add(where, f"runs on {call.queue}, but {operand} lies in the {buffer.space}'s memory")


def _flat(program: Program, phase: str) -> Iterator[tuple[Call | Move, Repeat | None]]:
    for instruction in program.phases[phase]:
        if isinstance(instruction, Repeat):
            yield from ((call, instruction) for call in instruction.body)
        else:
            yield instruction, None


def _check_types(
    program: Program,
    what: str,
    operands: Sequence[Operand],
    ports: Sequence[Port],
    repeat: Repeat | None,
    where: str,
    problems: Problems,
) -> None:
    if len(operands) != len(ports):
        problems.add(where, f"has {len(operands)} {what}s, the part has {len(ports)}")
    for operand, port in zip(operands, ports, strict=False):
        actual = _type(program, operand, repeat)
        if actual != port.type:
            problems.add(where, f"{what} {port.name} is {port.type}, buffer {operand} is {actual or 'unknown'}")


def _type(program: Program, operand: Operand, repeat: Repeat | None) -> TensorType | None:
    buffer = program.buffers.get(operand.buffer)
    if buffer is None:
        return None
    if not operand.indexed:
        return buffer.type
    if repeat is None or not buffer.type.shape or buffer.type.shape[0] < repeat.limit:
        return None
    return TensorType(buffer.type.dtype, buffer.type.shape[1:])


def _check_reads(program: Program, call: Call, written: set[str], where: str, problems: Problems) -> None:
    for operand in call.args:
        buffer = program.buffers.get(operand.buffer)
        if buffer is not None and buffer.role == "activation" and buffer.name not in written:
            problems.add(where, f"reads {operand} before anything wrote it")


def _check_writes(program: Program, call: Call, part: Part, where: str, problems: Problems) -> None:
    for index, operand in enumerate(call.results):
        buffer = program.buffers.get(operand.buffer)
        if buffer is None:
            continue
        if buffer.role not in _WRITABLE:
            problems.add(where, f"writes {operand}, whose role is {buffer.role}")
        for position, arg in enumerate(call.args):
            if arg.buffer == operand.buffer:
                if (index, position) not in part.inplace:
                    problems.add(where, f"writes {operand} while it reads it, and the part does not allow that")
            elif _overlap(program, buffer, arg):
                problems.add(where, f"writes {operand} while it reads {arg}, which shares memory with it")
        for other in call.results[:index]:
            if _overlap(program, buffer, other):
                problems.add(where, f"writes {operand} and {other}, which share memory")


def _overlap(program: Program, buffer: Buffer, operand: Operand) -> bool:
    """Whether two buffers have elements in common by name or as views; arena offsets are another question."""
    other = program.buffers.get(operand.buffer)
    if other is None or program.root(other.name) is not program.root(buffer.name):
        return False
    return (
        buffer.view_offset < other.view_offset + other.type.elements
        and other.view_offset < buffer.view_offset + buffer.type.elements
    )


def _check_arena(program: Program, phase: str, problems: Problems) -> None:
    for space in SPACES:
        _check_arena_of(program, phase, space, problems)


def _check_arena_of(program: Program, phase: str, space: Space, problems: Problems) -> None:
    alive = lives(program, phase, space)
    size = program.arenas(space).get(phase, 0)
    placed = sorted(
        ((life.buffer.arena_offset, life) for life in alive if life.buffer.arena_offset is not None), key=lambda x: x[0]
    )
    if len(placed) != len(alive):
        problems.add(phase, "has activations without a place in the arena")
    for number, (offset, life) in enumerate(placed):
        if offset + life.size > size:
            problems.add(phase, f"{life.buffer.name} ends beyond the arena of {size} bytes")
        for other_offset, other in placed[number + 1 :]:
            if other_offset >= offset + life.size:
                break
            if other.size and life.start <= other.end and other.start <= life.end:
                problems.add(phase, f"{life.buffer.name} and {other.buffer.name} share bytes while both are alive")
