"""Filling memory with weights and making parts runnable, in two threads and without holding weights twice.

The work is cut into jobs that need little memory each. A job reads one tensor of the checkpoint into its place, or
reads the constants of one layer, makes the executables that contain them, and forgets the arrays before the next layer
starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TypeAlias

from npubundle.part import Part
from npubundle.program import Buffer, Call, Operand, Program, Source
from npurt.arrays import Array, empty
from npurt.devices.device import Device, Executable, Region
from npurt.weights import Checkpoint

Job: TypeAlias = Callable[[], None]

#: One thread reads and converts while the other packs; with more, more layers' weights are in flight than packed.
WORKERS = 2


@dataclass(frozen=True, slots=True)
class Instance:
    """A part with some of its arguments made constant: what one executable is. `constants` is (index, buffer) pairs."""

    part: str
    constants: tuple[tuple[int, str], ...]

    def inputs(self, call: Call) -> list[Operand]:
        """The arguments of a call that are still arguments."""
        fixed = {index for index, _ in self.constants}
        return [operand for index, operand in enumerate(call.args) if index not in fixed]


def instance_of(program: Program, call: Call, *, constants: bool) -> Instance:
    """The executable that a call runs.

    Weights become constants in calls of decoder layers, where packing them pays at every step. The embedding table, the
    head and whatever else stands outside the layers stay arguments.
    """
    if not constants or call.layer is None:
        return Instance(call.part, ())
    return Instance(
        call.part,
        tuple(
            (index, operand.buffer)
            for index, operand in enumerate(call.args)
            if not operand.indexed and program.root(operand.buffer).role == "weight"
        ),
    )


def memory_needed(program: Program, phases: Sequence[str], *, constants: bool) -> int:
    """Bytes that a machine takes for these phases, without what ONNX Runtime uses for itself while a part runs."""
    instances: set[Instance] = set()
    inputs: set[str] = set()
    for phase in phases:
        for call in program.calls(phase):
            instance = instance_of(program, call, constants=constants)
            instances.add(instance)
            inputs.update(program.root(operand.buffer).name for operand in instance.inputs(call))
    weights = sum(program.buffers[name].type.nbytes for name in inputs if program.buffers[name].role == "weight")
    packed = sum(program.buffers[name].type.nbytes for instance in instances for _, name in instance.constants)
    state = sum(
        b.type.nbytes for b in program.buffers.values() if b.view_of is None and b.role not in {"weight", "activation"}
    )
    return weights + packed + state + max((program.arena.get(phase, 0) for phase in phases), default=0)


class Loader:
    """Makes jobs and runs them."""

    def __init__(
        self,
        program: Program,
        parts: Mapping[str, Part],
        weights: Checkpoint,
        payload: Callable[[str], bytes],
        device: Device,
    ) -> None:
        self._program = program
        self._parts = parts
        self._weights = weights
        self._payload = payload
        self._device = device

    def fill(self, buffers: Sequence[tuple[Buffer, Region]]) -> Iterator[Job]:
        """Jobs that fill weight buffers, one per tensor of the checkpoint, however many buffers come from it."""
        by_tensor: dict[str, list[tuple[Source, Region]]] = {}
        for buffer, region in buffers:
            source = _source(buffer)
            by_tensor.setdefault(source.tensor, []).append((source, region))
        for wanted in by_tensor.values():
            yield functools.partial(self._fill, wanted)

    def load(
        self, instances: Mapping[Instance, int | None], into: MutableMapping[Instance, Executable]
    ) -> Iterator[Job]:
        """Jobs that make executables: one per layer for those with constants, one per part for the others."""
        groups: dict[object, list[Instance]] = {}
        for instance, layer in instances.items():
            groups.setdefault(layer if instance.constants else instance, []).append(instance)
        payloads = {part: self._payload(part) for part in {instance.part for instance in instances}}
        for group in groups.values():
            yield functools.partial(self._load, group, payloads, into)

    def run(self, jobs: Sequence[Job], progress: Callable[[int, int], None] | None) -> None:
        """Run all jobs. The first failure is raised; jobs that have not started by then never do."""
        if progress is not None:
            progress(0, len(jobs))
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="load") as pool:
            futures = [pool.submit(job) for job in jobs]
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    if progress is not None:
                        progress(done, len(jobs))
            finally:
                pool.shutdown(cancel_futures=True)

    def _fill(self, wanted: Sequence[tuple[Source, Region]]) -> None:
        arrays = [(source, self._device.host(region)) for source, region in wanted]
        targets = [
            (source, empty(region.kind) if array is None else array)
            for (source, array), (_, region) in zip(arrays, wanted, strict=True)
        ]
        self._weights.fill_all(targets)
        for (_, region), (_, array), (_, known) in zip(wanted, targets, arrays, strict=True):
            if known is None:
                self._device.upload(array, region)

    def _load(
        self,
        group: Sequence[Instance],
        payloads: Mapping[str, bytes],
        into: MutableMapping[Instance, Executable],
    ) -> None:
        roots = {self._program.root(name).name for instance in group for _, name in instance.constants}
        arrays = {name: empty(self._program.buffers[name].type) for name in roots}
        self._weights.fill_all([(_source(self._program.buffers[name]), array) for name, array in arrays.items()])
        for instance in group:
            constants = {index: self._view(arrays, name) for index, name in instance.constants}
            into[instance] = self._device.load(self._parts[instance.part], payloads[instance.part], constants)

    def _view(self, arrays: Mapping[str, Array], name: str) -> Array:
        buffer = self._program.buffers[name]
        flat = arrays[self._program.root(name).name].reshape(-1)
        return flat[buffer.view_offset : buffer.view_offset + buffer.type.elements].reshape(buffer.type.shape)


def _source(buffer: Buffer) -> Source:
    if buffer.source is None:
        raise ValueError(f"weight {buffer.name} has no source")
    return buffer.source
