"""The training step as data: buffers, and instructions that call compiled parts on them.

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

Role = Literal["weight", "param", "grad", "moment", "activation", "input", "scalar", "output"]
ROLES: tuple[Role, ...] = ("weight", "param", "grad", "moment", "activation", "input", "scalar", "output")

Queue = Literal["compute", "h2d", "d2h", "host"]
QUEUES: tuple[Queue, ...] = ("compute", "h2d", "d2h", "host")

#: Phases a training program has; `logits` is there only when the recipe asks for it.
PHASES = ("micro_step", "update", "evaluate", "logits")


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
    `source` belongs to role `weight`; `tensor` (the name under which it is exported) and `init` to role `param`.
    `arena_offset` (in bytes) is the place of an `activation` in the phase's arena, which liveness chose. `value` fixes
    the content of a `scalar` once and for all.
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
    """Run `body` as often as the i32 scalar buffer `count` says, at most `limit` times; `x[]` advances each time."""

    count: str
    limit: int
    body: tuple[Call, ...]


Instruction = Call | Repeat


@dataclass(frozen=True, slots=True)
class Program:
    """Buffers by name, and instruction lists by phase.

    `chains` lists, for values that pass from layer to layer, the names at each boundary: `("h.0", "h.1", …)` has the
    input of layer 0, of layer 1, …, and last the output of the last layer. `arena` is the size in bytes of each phase's
    arena. `checkpoint` has the shape of every tensor that a checkpoint of this model contains, as the file stores it.
    See `docs/reference/program.md` for the names that a runtime looks for.
    """

    buffers: Mapping[str, Buffer]
    phases: Mapping[str, tuple[Instruction, ...]]
    chains: tuple[tuple[str, ...], ...] = ()
    arena: Mapping[str, int] = dataclasses.field(default_factory=dict)
    checkpoint: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def calls(self, phase: str) -> Iterator[Call]:
        """Every call of a phase once, those inside repeats included."""
        for instruction in self.phases[phase]:
            if isinstance(instruction, Repeat):
                yield from instruction.body
            else:
                yield instruction

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

    @property
    def layers(self) -> int:
        """Number of decoder layers, as the chains say (0 without chains)."""
        return len(self.chains[0]) - 1 if self.chains else 0

    def listing(self) -> str:
        """The program as text for people: buffers, then each phase's instructions."""
        lines = [
            f"{b.role:<10} {b.name}: {b.type}" + (f" = {b.view_of}+{b.view_offset}" if b.view_of else "")
            for b in self.buffers.values()
        ]
        for phase, instructions in self.phases.items():
            lines += ["", f"{phase}: (arena {self.arena.get(phase, 0)} bytes)"]
            for index, instruction in enumerate(instructions):
                lines += [f"  {index:>4} {line}" for line in _lines(instruction)]
        return "\n".join(lines) + "\n"


def _lines(instruction: Instruction) -> Iterator[str]:
    if isinstance(instruction, Repeat):
        yield f"repeat {instruction.count} (at most {instruction.limit})"
        for call in instruction.body:
            yield from ("  " + line for line in _lines(call))
        return
    results = ", ".join(map(str, instruction.results))
    args = ", ".join(map(str, instruction.args))
    after = f" after {list(instruction.after)}" if instruction.after else ""
    yield f"[{instruction.queue}] {results} = {instruction.part}({args}){after}"
