"""The virtual machine: memory for a program's buffers, and its phases as lists of calls that are ready to run.

Everything that can be decided before the first step is: a call becomes an executable whose operands have fixed
addresses, so that a step is a loop over prepared calls. Instructions run in the order of their list, which is always
valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from npubundle.part import Part
from npubundle.program import Buffer, Call, Operand, Program, Repeat
from npubundle.tensor import ITEM_SIZE, TensorType
from npurt.arrays import ALIGNMENT, dtype_of
from npurt.devices.device import Block, Bound, Device, Executable, Region
from npurt.errors import DataError
from npurt.loading import Instance, Job, Loader, instance_of
from npurt.weights import Checkpoint

#: Called with the number of finished and of all jobs while something loads.
Progress = Callable[[int, int], None]

#: Phases run by then; a run that ends earlier would not get back what settling costs.
_SETTLED_AFTER = 6


class Machine:
    """Runs the phases of one program.

    With `constants`, weights that a decoder layer reads are part of its executables (and have no memory of their own
    here); otherwise one executable per part serves all layers.
    """

    def __init__(self, program: Program, parts: Mapping[str, Part], device: Device, *, constants: bool) -> None:
        """Allocate everything but weights, which come with the phases that need them. Raises `DeviceError`."""
        self.program = program
        self._parts = parts
        self._device = device
        self._constants = constants
        self._places: dict[str, tuple[Block, int]] = {}
        self._executables: dict[Instance, Executable] = {}
        self._runs = 0
        self._phases: dict[str, list[Bound | _Loop]] = {}
        state = [b for b in program.buffers.values() if b.view_of is None and b.role not in {"weight", "activation"}]
        self._allocate(state)
        for buffer in state:
            if buffer.value is not None:
                device.upload(np.array(buffer.value, dtype_of(buffer.type)), self.region(buffer.name))
        arena = device.allocate(max(program.arena.values(), default=0))
        for buffer in program.with_role("activation"):
            if buffer.arena_offset is not None:
                self._places[buffer.name] = arena, buffer.arena_offset

    def prepare(
        self,
        phases: Sequence[str],
        weights: Checkpoint,
        payload: Callable[[str], bytes],
        progress: Progress | None = None,
    ) -> None:
        """Load what these phases need and is not there yet: weights into memory, parts into the device.

        `payload` gives the bytes of a part by its name.
        """
        new = [phase for phase in phases if phase not in self._phases]
        calls = [call for phase in new for call in self.program.calls(phase)]
        instances = {call: instance_of(self.program, call, constants=self._constants) for call in calls}
        inputs = {
            self.program.root(operand.buffer).name: self.program.root(operand.buffer)
            for call, instance in instances.items()
            for operand in instance.inputs(call)
            if self.program.root(operand.buffer).role == "weight"
        }
        missing = [buffer for buffer in inputs.values() if buffer.name not in self._places]
        self._allocate(missing)
        loader = Loader(self.program, self._parts, weights, payload, self._device)
        wanted = {i: call.layer for call, i in instances.items() if i not in self._executables}
        jobs: list[Job] = [
            *loader.fill([(buffer, self.region(buffer.name)) for buffer in missing]),
            *loader.load(wanted, self._executables),
        ]
        loader.run(jobs, progress)
        for phase in new:
            self._phases[phase] = list(self._steps(phase))

    def run(self, phase: str) -> None:
        """Execute a prepared phase to its end. Raises `DeviceError` if a part fails."""
        if self._runs == _SETTLED_AFTER:
            self._device.settle()
        self._runs += 1
        for step in self._phases[phase]:
            step.run()
        self._device.synchronize()

    def prepared(self, phase: str) -> bool:
        """Whether a phase can run."""
        return phase in self._phases

    def region(self, name: str, index: int | None = None) -> Region:
        """Where a buffer or view lies, or one element of its first axis. Raises KeyError if it has no memory here."""
        buffer = self.program.buffers[name]
        if self.program.root(name).name not in self._places:
            raise KeyError(f"{name} has no memory of its own")
        block, start = self._places[self.program.root(name).name]
        kind = buffer.type
        start += buffer.view_offset * ITEM_SIZE[kind.dtype]
        if index is not None:
            kind = TensorType(kind.dtype, kind.shape[1:])
            start += index * kind.nbytes
        return block.region(start, kind)

    def close(self) -> None:
        """Drop executables and memory."""
        self._phases.clear()
        self._executables.clear()
        self._places.clear()
        self._device.close()

    def _allocate(self, buffers: Sequence[Buffer]) -> None:
        """One block for all of them: large blocks get large pages, which cost much less to touch first."""
        offsets = []
        size = 0
        for buffer in buffers:
            offsets.append(size)
            size += -(-buffer.type.nbytes // ALIGNMENT) * ALIGNMENT
        block = self._device.allocate(size)
        for buffer, offset in zip(buffers, offsets, strict=True):
            self._places[buffer.name] = block, offset

    def _steps(self, phase: str) -> Iterator[Bound | _Loop]:
        for instruction in self.program.phases[phase]:
            if isinstance(instruction, Repeat):
                yield _Loop(self, self._device, instruction)
            else:
                yield self.bind(instruction)

    def bind(self, call: Call, index: int | None = None) -> Bound:
        """A call with its operands in place; `index` is the loop counter for operands that take a row."""
        instance = instance_of(self.program, call, constants=self._constants)

        def place(operand: Operand) -> Region:
            return self.region(operand.buffer, index if operand.indexed else None)

        args = [place(operand) for operand in instance.inputs(call)]
        return self._executables[instance].bind(args, [place(operand) for operand in call.results])


class _Loop:
    """A counted repeat. Calls are bound when a count first reaches them, and then kept."""

    def __init__(self, machine: Machine, device: Device, instruction: Repeat) -> None:
        self._machine = machine
        self._device = device
        self._instruction = instruction
        self._bound: list[list[Bound]] = []

    def run(self) -> None:
        """Run the body as often as the count says now."""
        name, limit = self._instruction.count, self._instruction.limit
        count = int(self._device.download(self._machine.region(name)))
        if not 0 <= count <= limit:
            raise DataError(f"{name} is {count}; the bundle's limit is {limit}")
        while len(self._bound) < count:
            index = len(self._bound)
            self._bound.append([self._machine.bind(call, index) for call in self._instruction.body])
        for body in self._bound[:count]:
            for step in body:
                step.run()
