"""The virtual machine: memory for a program's buffers, and its phases as lists of steps that are ready to run.

Everything that can be decided before the first step is: a call becomes an executable whose operands have fixed
addresses, so that a step is a loop over prepared calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from npubundle.part import Part
from npubundle.program import SPACES, WAYS, Buffer, Call, Move, Operand, Program, Repeat, Space
from npubundle.tensor import ITEM_SIZE, TensorType
from npurt.arrays import ALIGNMENT, Array, dtype_of
from npurt.devices.device import Block, Bound, Device, Executable, Form, Region
from npurt.errors import DataError
from npurt.execution import Execution, Step
from npurt.loading import Instance, Job, Loader, fill, instance_of, run_jobs, weights_in_memory
from npurt.spaces import Devices
from npurt.timeline import Timeline
from npurt.weights import Checkpoint

#: Called with the number of finished and of all jobs while something loads.
Progress = Callable[[int, int], None]

#: Phases run by then; a run that ends earlier would not get back what settling costs.
_SETTLED_AFTER = 6


class Machine:
    """Runs the phases of one program, on a device and, where the program has buffers in the host's space, on `host`.

    With `constants`, weights that a decoder layer reads are part of its executables (and have no memory of their own
    here); otherwise one executable per part serves all layers.
    """

    def __init__(
        self,
        program: Program,
        parts: Mapping[str, Part],
        device: Device,
        *,
        constants: bool,
        host: Device | None = None,
    ) -> None:
        """Allocate everything but weights, which come with the phases that need them. Raises `DeviceError`."""
        self.program = program
        self._parts = parts
        self._devices = Devices(device, host)
        self._constants = constants
        self._places: dict[str, tuple[Block, int]] = {}
        self._executables: dict[Instance, Executable] = {}
        self._runs = 0
        self._phases: dict[str, list[Step]] = {}
        self._execution = Execution(program, concurrent=all(d.concurrent for d in self._devices.all()))
        state = [b for b in program.buffers.values() if b.view_of is None and b.role not in {"weight", "activation"}]
        self._allocate(state)
        for buffer in state:
            if buffer.value is not None:
                self.write(buffer.name, np.array(buffer.value, dtype_of(buffer.type)))
        for space in SPACES:
            self._allocate_arena(space)

    def prepare(
        self,
        phases: Sequence[str],
        weights: Checkpoint,
        payload: Callable[[str, Form], bytes],
        progress: Progress | None = None,
    ) -> None:
        """Load what these phases need and is not there yet: weights into memory, parts into the device.

        `payload` gives the bytes of a part by its name, in the form that a device wants.
        """
        new = [phase for phase in phases if phase not in self._phases]
        calls = [call for phase in new for call in self.program.calls(phase)]
        instances = {call: instance_of(self.program, call, constants=self._constants) for call in calls}
        needed = weights_in_memory(self.program, new, constants=self._constants)
        missing = [buffer for name, buffer in needed.items() if name not in self._places]
        self._allocate(missing)
        loader = Loader(self.program, self._parts, weights, payload, self._devices)
        wanted = {i: call.layer for call, i in instances.items() if i not in self._executables}
        jobs: list[Job] = [
            *self._filling(missing, weights),
            *loader.load(wanted, self._executables),
        ]
        run_jobs(jobs, progress)
        for phase in new:
            self._phases[phase] = list(self._steps(phase))

    def fill(self, buffers: Sequence[Buffer], weights: Checkpoint) -> None:
        """Fill buffers that have a source from the checkpoint."""
        self._execution.finish()
        run_jobs(list(self._filling(buffers, weights)))

    def run(self, phase: str) -> None:
        """Execute a prepared phase; what is read or written later waits for it where it has to.

        Raises `DeviceError` if a part fails; where queues overlap, that may be later, when somebody waits.
        """
        if self._runs == _SETTLED_AFTER:
            self._execution.finish()
            for device in self._devices.all():
                device.settle()
        self._runs += 1
        self._execution.run(phase, self._phases[phase])
        for device in self._devices.all():
            device.synchronize()

    def record(self, timeline: Timeline | None) -> None:
        """Note from now on when each instruction runs; None: no longer."""
        self._execution.record(timeline)

    def finish(self) -> None:
        """Wait until nothing is at work."""
        self._execution.finish()

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

    def write(self, name: str, array: Array) -> None:
        """Fill a buffer or view with an array of its type."""
        self._execution.sync(name, writes=True)
        self._owner(name).upload(array, self.region(name))

    def read(self, name: str) -> Array:
        """A copy of a buffer or view."""
        self._execution.sync(name, writes=False)
        return self._owner(name).download(self.region(name))

    def view(self, name: str) -> Array | None:
        """A buffer or view itself, where its memory is the host's; otherwise None."""
        self._execution.sync(name, writes=False)
        return self._owner(name).host(self.region(name))

    def close(self) -> None:
        """Drop executables and memory."""
        self._execution.close()
        self._phases.clear()
        self._executables.clear()
        self._places.clear()
        for device in self._devices.all():
            device.close()

    def _filling(self, buffers: Sequence[Buffer], weights: Checkpoint) -> Iterator[Job]:
        return fill(weights, self._devices, [(buffer, self.region(buffer.name)) for buffer in buffers])

    def _owner(self, name: str) -> Device:
        return self._devices.of(self.program.buffers[name].space)

    def _allocate_arena(self, space: Space) -> None:
        size = max(self.program.arenas(space).values(), default=0)
        buffers = [b for b in self.program.with_role("activation") if b.space == space and b.arena_offset is not None]
        if buffers:
            arena = self._devices.of(space).allocate(size)
            self._places.update({b.name: (arena, b.arena_offset or 0) for b in buffers})

    def _allocate(self, buffers: Sequence[Buffer]) -> None:
        """One block in each space for all of them: large blocks get large pages, much cheaper to touch first."""
        for space in SPACES:
            offsets: dict[str, int] = {}
            size = 0
            for buffer in buffers:
                if buffer.space == space:
                    offsets[buffer.name] = size
                    size += -(-buffer.type.nbytes // ALIGNMENT) * ALIGNMENT
            if offsets:
                block = self._devices.of(space).allocate(size)
                self._places.update({name: (block, offset) for name, offset in offsets.items()})

    def _steps(self, phase: str) -> Iterator[Step]:
        for instruction in self.program.phases[phase]:
            if isinstance(instruction, Repeat):
                yield Step(instruction, _Loop(self, instruction).run)
            elif isinstance(instruction, Move):
                yield Step(instruction, self._moving(instruction).run)
            else:
                yield Step(instruction, self.bind(instruction).run)

    def count(self, name: str) -> int:
        """The content of a counter, for an instruction that is at work: it waits for nothing."""
        return int(self._owner(name).download(self.region(name)))

    def bind(self, call: Call, index: int | None = None) -> Bound:
        """A call with its operands in place; `index` is the loop counter for operands that take a row."""
        instance = instance_of(self.program, call, constants=self._constants)

        def place(operand: Operand) -> Region:
            return self.region(operand.buffer, index if operand.indexed else None)

        args = [place(operand) for operand in instance.inputs(call)]
        return self._executables[instance].bind(args, [place(operand) for operand in call.results])

    def _moving(self, move: Move) -> _Copy:
        source, target = (self._devices.of(space) for space in WAYS[move.queue])
        return _Copy(source, self.region(move.source), target, self.region(move.target))


class _Copy:
    """A move. What lies in the host's memory is read and written in place; nothing is copied twice."""

    __slots__ = ("_from", "_source", "_target", "_to")

    def __init__(self, source: Device, place: Region, target: Device, to: Region) -> None:
        self._source = source
        self._from = place
        self._target = target
        self._to = to

    def run(self) -> None:
        """Copy now."""
        array = self._source.host(self._from)
        self._target.upload(self._source.download(self._from) if array is None else array, self._to)


class _Loop:
    """A counted repeat. Calls are bound when a count first reaches them, and then kept."""

    def __init__(self, machine: Machine, instruction: Repeat) -> None:
        self._machine = machine
        self._instruction = instruction
        self._bound: list[list[Bound]] = []

    def run(self) -> None:
        """Run the body as often as the count says now."""
        name, limit = self._instruction.count, self._instruction.limit
        count = self._machine.count(name)
        if not 0 <= count <= limit:
            raise DataError(f"{name} is {count}; the bundle's limit is {limit}")
        while len(self._bound) < count:
            index = len(self._bound)
            self._bound.append([self._machine.bind(call, index) for call in self._instruction.body])
        for body in self._bound[:count]:
            for step in body:
                step.run()
