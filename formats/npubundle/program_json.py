"""A program as JSON: compact, canonical, and read back with every problem reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npubundle import canonical
from npubundle.errors import FormatError
from npubundle.fields import Fields, Kind, Place, dict_of, integer, list_of, nullable, read, record, text
from npubundle.part import tensor_type
from npubundle.program import (
    INITS,
    QUEUES,
    ROLES,
    SPACES,
    WAYS,
    Buffer,
    Call,
    Init,
    Instruction,
    Move,
    MoveQueue,
    Operand,
    Program,
    Queue,
    Repeat,
    Role,
    Source,
    Space,
)
from npubundle.strictjson import parse_canonical

MEDIA_TYPE = "application/vnd.npucc.program.v1+json"
MAX_BYTES = 64 << 20

_NAME = text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", called="a buffer or part name")
_OPERAND = text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}(\[\])?", called="an operand such as rows or rows[]")
#: Layout transforms and how many integer arguments each takes. `docs/reference/program.md` defines them.
TRANSFORMS = {"transpose": 0, "rows": 2}


def encode(program: Program) -> bytes:
    """The canonical bytes of a program. What a program in one memory does not need is not written."""
    document: dict[str, Any] = {
        "buffers": [_buffer_dict(b) for b in program.buffers.values()],
        "phases": {phase: [_instruction_dict(i) for i in body] for phase, body in program.phases.items()},
        "chains": [list(chain) for chain in program.chains],
        "arena": dict(program.arena),
        "checkpoint": {name: list(shape) for name, shape in program.checkpoint.items()},
    }
    if program.host_arena:
        document["host_arena"] = dict(program.host_arena)
    return canonical.encode(document)


def decode(raw: bytes, *, where: str | None = None) -> Program:
    """The program that `encode` wrote. Raises FormatError with all problems of form; `program_check` finds the rest."""
    document = parse_canonical(raw, what="program", max_bytes=MAX_BYTES)
    program = read(document, record(_program), what="program", where=where)
    names = [b["name"] for b in document["buffers"]]
    if len(names) != len(program.buffers):
        raise FormatError("program is not valid: two buffers have the same name", where=where)
    return program


def _buffer_dict(b: Buffer) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": b.name, "type": str(b.type), "role": b.role}
    if b.view_of is not None:
        entry["view"] = {"of": b.view_of, "offset": b.view_offset}
    if b.source is not None:
        entry["source"] = {"tensor": b.source.tensor, "transforms": [list(t) for t in b.source.transforms]}
    if b.tensor is not None:
        entry["tensor"] = b.tensor
    if b.init is not None:
        entry["init"] = {"kind": b.init.kind, "fan_in": b.init.fan_in}
    if b.arena_offset is not None:
        entry["arena_offset"] = b.arena_offset
    if b.value is not None:
        entry["value"] = b.value
    if b.space == "host":
        entry["space"] = b.space
    return entry


def _instruction_dict(instruction: Instruction) -> dict[str, Any]:
    if isinstance(instruction, Repeat):
        body = [_instruction_dict(call) for call in instruction.body]
        repeat = {"repeat": instruction.count, "limit": instruction.limit, "body": body}
        repeat |= {} if instruction.layer is None else {"layer": instruction.layer}
        return repeat | ({"after": list(instruction.after)} if instruction.after else {})
    if isinstance(instruction, Move):
        return _move_dict(instruction)
    entry: dict[str, Any] = {
        "call": instruction.part,
        "args": [str(o) for o in instruction.args],
        "results": [str(o) for o in instruction.results],
        "queue": instruction.queue,
        "after": list(instruction.after),
    }
    if instruction.layer is not None:
        entry["layer"] = instruction.layer
    return entry


def _move_dict(move: Move) -> dict[str, Any]:
    entry: dict[str, Any] = {"move": move.source, "to": move.target, "queue": move.queue}
    if move.after:
        entry["after"] = list(move.after)
    if move.layer is not None:
        entry["layer"] = move.layer
    return entry


def _one_of(names: tuple[str, ...]) -> Kind[Any]:
    return text("|".join(names), called="one of " + ", ".join(names))


def _transform(place: Place) -> tuple[str | int, ...]:
    items = place.value if isinstance(place.value, list) else []
    name, args = (items[0], items[1:]) if items else (None, [])
    if name not in TRANSFORMS or len(args) != TRANSFORMS[name] or not all(type(a) is int and a >= 0 for a in args):
        place.wrong(f"must be a layout transform ({', '.join(TRANSFORMS)}) with its arguments")
        return ("transpose",)
    return (name, *args)


def _source(fields: Fields) -> Source:
    transforms = fields.need("transforms", list_of(Kind(_transform, lambda: ("transpose",)), maximum=16))
    return Source(fields.need("tensor", text()), transforms)


def _init(fields: Fields) -> Init:
    return Init(fields.need("kind", _one_of(INITS)), fields.need("fan_in", integer(0)))


def _view(fields: Fields) -> tuple[str, int]:
    return fields.need("of", _NAME), fields.need("offset", integer(0))


def _buffer(fields: Fields) -> Buffer:
    view = fields.take("view", record(_view), None)
    role: Role = fields.need("role", _one_of(ROLES))
    space: Space = fields.take("space", _one_of(SPACES), "device")
    return Buffer(
        name=fields.need("name", _NAME),
        type=fields.need("type", tensor_type()),
        role=role,
        view_of=view[0] if view else None,
        view_offset=view[1] if view else 0,
        source=fields.take("source", record(_source), None),
        tensor=fields.take("tensor", text(), None),
        init=fields.take("init", record(_init), None),
        arena_offset=fields.take("arena_offset", integer(0), None),
        value=fields.take("value", integer(-(2**31), 2**31 - 1), None),
        space=space,
    )


def _operands(fields: Fields, name: str) -> tuple[Operand, ...]:
    return tuple(Operand.from_str(o) for o in fields.need(name, list_of(_OPERAND, maximum=4096)))


def _call(fields: Fields) -> Call:
    queue: Queue = fields.need("queue", _one_of(QUEUES))
    return Call(
        part=fields.need("call", _NAME),
        args=_operands(fields, "args"),
        results=_operands(fields, "results"),
        queue=queue,
        after=fields.need("after", list_of(integer(0))),
        layer=fields.take("layer", nullable(integer(0)), None),
    )


def _move(fields: Fields) -> Move:
    queue: MoveQueue = fields.need("queue", _one_of(tuple(WAYS)))
    return Move(
        source=fields.need("move", _NAME),
        target=fields.need("to", _NAME),
        queue=queue,
        after=fields.take("after", list_of(integer(0)), ()),
        layer=fields.take("layer", integer(0), None),
    )


def _instruction(fields: Fields) -> Instruction:
    if "move" in fields:
        return _move(fields)
    if "repeat" not in fields:
        return _call(fields)
    count = fields.need("repeat", _NAME)
    limit = fields.need("limit", integer(1))
    return Repeat(
        count,
        limit,
        fields.need("body", list_of(record(_call))),
        layer=fields.take("layer", integer(0), None),
        after=fields.take("after", list_of(integer(0)), ()),
    )


def _program(fields: Fields) -> Program:
    buffers = fields.need("buffers", list_of(record(_buffer)))
    phases: Mapping[str, tuple[Instruction, ...]] = fields.need("phases", dict_of(list_of(record(_instruction))))
    return Program(
        buffers={b.name: b for b in buffers},
        phases=phases,
        chains=fields.need("chains", list_of(list_of(_NAME, minimum=2))),
        arena=fields.need("arena", dict_of(integer(0))),
        checkpoint=fields.need("checkpoint", dict_of(list_of(integer(0), maximum=8))),
        host_arena=fields.take("host_arena", dict_of(integer(0)), {}),
    )
