"""The training step as data: buffers, and instructions that call compiled parts on them.

There are two memory spaces, the device's and the host's. A program for a device that shares the host's memory has all
of its buffers in the device's space, and needs no instruction that moves anything.

Everything that depends on the architecture of a model ends here. A runtime that can allocate buffers and call parts can
run any program; it needs no idea of layers, attention or LoRA.

Order of the list is always a valid order of execution, so a device without queues runs instructions one by one.
Devices with several queues may run an instruction as soon as its own queue reaches it and those in `after` are done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from npubundle.tensor import TensorType

Role = Literal["weight", "param", "copy", "grad", "moment", "activation", "input", "scalar", "output"]
ROLES: tuple[Role, ...] = ("weight", "param", "copy", "grad", "moment", "activation", "input", "scalar", "output")

Queue = Literal["compute", "h2d", "d2h", "host"]
QUEUES: tuple[Queue, ...] = ("compute", "h2d", "d2h", "host")

Space = Literal["device", "host"]
SPACES: tuple[Space, ...] = ("device", "host")

#: Queues that move, each with the spaces that it moves from and to.
MoveQueue = Literal["h2d", "d2h"]
WAYS: Mapping[MoveQueue, tuple[Space, Space]] = {"h2d": ("host", "device"), "d2h": ("device", "host")}

#: Phases a training program may have; `docs/reference/program.md` says which are when there.
PHASES = ("first_micro_step", "micro_step", "norm", "update", "upload", "evaluate", "logits")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the content of a `weight` buffer comes from: a tensor of the HF checkpoint, after layout transforms.

    A transform is a tuple of a name and its integer arguments, applied in order to the tensor as it is in the file:
    `("transpose",)`, `("rows", start, stop)`. A cast to the dtype of the buffer is always the last step and is not
    listed.
    """

    tensor: str
    transforms: tuple[tuple[str | int, ...], ...] = ()


INITS = ("zeros", "kaiming_uniform")


@dataclass(frozen=True, slots=True)
class Init:
    """How a `param` starts when no adapter is given.

    `zeros`, or `kaiming_uniform`: uniform in ±1/sqrt(fan_in), which is what `nn.Linear` and PEFT's LoRA A matrices use
    (Kaiming's bound with a = sqrt 5).
    """

    kind: Literal["zeros", "kaiming_uniform"]
    fan_in: int = 0


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named piece of memory with one type for the whole program.

    `view_of` and `view_offset` (in elements) make it a contiguous part of another buffer, which is not a view itself.
    `source` belongs to role `weight`, and to a `param` that starts as a weight; `tensor` (the name under which it is
    exported) and `init` to role `param`. A `copy` is what is made of a `param` for a device, in its dtype.
    `arena_offset` (in bytes) is the place of an `activation` in the phase's arena, which liveness chose. `value` fixes
    the content of a `scalar` once and for all. `space` says whose memory it lies in; a view lies where its buffer does.
    """

    name: str
    type: TensorType
    role: Role
    view_of: str | None = None
    view_offset: int = 0
    source: Source | None = None
    tensor: str | None = None
    init: Init | None = None
    arena_offset: int | None = None
    value: int | None = None
    space: Space = "device"


@dataclass(frozen=True, slots=True)
class Operand:
    """A buffer as an instruction names it.

    Inside a `Repeat`, `indexed` takes the element of axis 0 at the loop counter. Written `rows` or `rows[]`.
    """

    buffer: str
    indexed: bool = False

    def __str__(self) -> str:
        """The spelling used in a program's JSON and in listings."""
        return self.buffer + ("[]" if self.indexed else "")

    @classmethod
    def from_str(cls, text: str) -> Operand:
        """The inverse of `str`."""
        return cls(text.removesuffix("[]"), text.endswith("[]"))


@dataclass(frozen=True, slots=True)
class Call:
    """Run a part: `results = part(args)`, in the order of the part's signature.

    On the queue `host` the host runs it, on buffers of its own; on all others the device.
    `layer` says which decoder layer the call belongs to, so that a program can be cut short for a check.
    `after` holds indices, in the same list, of earlier instructions on other queues that must have finished.
    """

    part: str
    args: tuple[Operand, ...]
    results: tuple[Operand, ...]
    queue: Queue = "compute"
    after: tuple[int, ...] = ()
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Repeat:
    """Run `body` as often as the i32 scalar buffer `count` says, at most `limit` times; `x[]` advances each time.

    `count` may lie in either space: whoever steps through the program reads it. `layer`, `after`: as in `Call`.
    """

    count: str
    limit: int
    body: tuple[Call, ...]
    layer: int | None = None
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `source` to `target`, a buffer or view of the same type in the other space. `after`, `layer`: as in `Call`.

    A queue of its own lets a device copy what the next layer needs while this one computes.
    """

    source: str
    target: str
    queue: MoveQueue
    after: tuple[int, ...] = ()
    layer: int | None = None


Instruction = Call | Repeat | Move


@dataclass(frozen=True, slots=True)
class Program:
    """Buffers by name, and instruction lists by phase.

    `chains` lists, for values that pass from layer to layer, the names at each boundary: `("h.0", "h.1", …)` has the
    input of layer 0, of layer 1, …, and last the output of the last layer. `arena` is the size in bytes of each phase's
    arena in the device's memory, `host_arena` that in the host's, for phases that have activations there. `checkpoint`
    has the shape of every tensor that a checkpoint of this model contains, as the file stores it.
    See `docs/reference/program.md` for the names that a runtime looks for.
    """

    buffers: Mapping[str, Buffer]
    phases: Mapping[str, tuple[Instruction, ...]]
    chains: tuple[tuple[str, ...], ...] = ()
    arena: Mapping[str, int] = dataclasses.field(default_factory=dict)
    checkpoint: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    host_arena: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def calls(self, phase: str) -> Iterator[Call]:
        """Every call of a phase once, those inside repeats included."""
        for instruction in self.phases[phase]:
            if isinstance(instruction, Repeat):
                yield from instruction.body
            elif isinstance(instruction, Call):
                yield instruction

    def moves(self, phase: str) -> Iterator[Move]:
        """Every move of a phase."""
        return (instruction for instruction in self.phases[phase] if isinstance(instruction, Move))

    def written(self, phase: str) -> frozenset[str]:
        """Names of all buffers and views that a phase writes, as its instructions name them."""
        results = {operand.buffer for call in self.calls(phase) for operand in call.results}
        return frozenset(results | {move.target for move in self.moves(phase)})

    def parts(self) -> tuple[str, ...]:
        """Names of all parts that the program calls, sorted."""
        return tuple(sorted({call.part for phase in self.phases for call in self.calls(phase)}))

    def root(self, name: str) -> Buffer:
        """The buffer that owns the memory of `name`: itself, or what it is a view of."""
        buffer = self.buffers[name]
        return self.buffers[buffer.view_of] if buffer.view_of else buffer

    def with_role(self, role: Role) -> tuple[Buffer, ...]:
        """The buffers of a role, in the program's order."""
        return tuple(b for b in self.buffers.values() if b.role == role)

    def uses(self, space: Space) -> bool:
        """Whether any buffer lies in this space."""
        return any(buffer.space == space for buffer in self.buffers.values())

    def arenas(self, space: Space) -> Mapping[str, int]:
        """Bytes of each phase's arena in this space."""
        return self.host_arena if space == "host" else self.arena

    @property
    def layers(self) -> int:
        """Number of decoder layers, as the chains say (0 without chains)."""
        return len(self.chains[0]) - 1 if self.chains else 0

    def listing(self) -> str:
        """The program as text for people: buffers, then each phase's instructions."""
        lines = [
            f"{b.role:<10} {b.name}: {b.type}"
            + (" on the host" if b.space == "host" else "")
            + (f" = {b.view_of}+{b.view_offset}" if b.view_of else "")
            for b in self.buffers.values()
        ]
        for phase, instructions in self.phases.items():
            host = f", {self.host_arena[phase]} on the host" if phase in self.host_arena else ""
            lines += ["", f"{phase}: (arena {self.arena.get(phase, 0)} bytes{host})"]
            for index, instruction in enumerate(instructions):
                lines += [f"  {index:>4} {line}" for line in _lines(instruction)]
        return "\n".join(lines) + "\n"


def _lines(instruction: Instruction) -> Iterator[str]:
    if isinstance(instruction, Repeat):
        yield f"repeat {instruction.count} (at most {instruction.limit})"
        for call in instruction.body:
            yield from ("  " + line for line in _lines(call))
        return
    after = f" after {list(instruction.after)}" if instruction.after else ""
    if isinstance(instruction, Move):
        yield f"[{instruction.queue}] {instruction.target} = {instruction.source}{after}"
        return
    results = ", ".join(map(str, instruction.results))
    args = ", ".join(map(str, instruction.args))
    yield f"[{instruction.queue}] {results} = {instruction.part}({args}){after}"
