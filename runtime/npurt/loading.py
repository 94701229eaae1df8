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
from npubundle.program import Buffer, Call, Operand, Program, Source, Space
from npurt.arrays import Array, empty
from npurt.devices.device import Executable, Form, Region
from npurt.spaces import Devices, space_of
from npurt.weights import Checkpoint

Job: TypeAlias = Callable[[], None]

#: One thread reads and converts while the other packs; with more, more layers' weights are in flight than packed.
WORKERS = 2


@dataclass(frozen=True, slots=True)
class Instance:
    """A part on one device with some of its arguments made constant: what one executable is.

    `constants` is (index, buffer) pairs.
    """

    part: str
    constants: tuple[tuple[int, str], ...]
    space: Space = "device"

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
        return Instance(call.part, (), space_of(call))
    return Instance(
        call.part,
        tuple(
            (index, operand.buffer)
            for index, operand in enumerate(call.args)
            if not operand.indexed and program.root(operand.buffer).role == "weight"
        ),
        space_of(call),
    )


def weights_in_memory(program: Program, phases: Sequence[str], *, constants: bool) -> dict[str, Buffer]:
    """The weights that these phases need in memory, by name: all that is not constant where it is used."""
    names: set[str] = set()
    for phase in phases:
        for call in program.calls(phase):
            names.update(operand.buffer for operand in instance_of(program, call, constants=constants).inputs(call))
        names.update(move.source for move in program.moves(phase))
    roots = {program.root(name).name for name in names}
    return {name: buffer for name, buffer in program.buffers.items() if name in roots and buffer.role == "weight"}


def memory_needed(program: Program, phases: Sequence[str], space: Space = "device", *, constants: bool) -> int:
    """Bytes of a space that a machine takes for these phases, without what a device uses itself while a part runs."""
    weights = weights_in_memory(program, phases, constants=constants).values()
    instances = {instance_of(program, call, constants=constants) for phase in phases for call in program.calls(phase)}
    packed = [program.buffers[name] for instance in instances for _, name in instance.constants]
    state = [b for b in program.buffers.values() if b.view_of is None and b.role not in {"weight", "activation"}]
    lasting = sum(buffer.type.nbytes for buffer in (*weights, *packed, *state) if buffer.space == space)
    return lasting + max((program.arenas(space).get(phase, 0) for phase in phases), default=0)


def fill(weights: Checkpoint, devices: Devices, buffers: Sequence[tuple[Buffer, Region]]) -> Iterator[Job]:
    """Jobs that fill buffers from the checkpoint, one per tensor, however many buffers come from it."""
    by_tensor: dict[str, list[tuple[Buffer, Region]]] = {}
    for buffer, region in buffers:
        by_tensor.setdefault(_source(buffer).tensor, []).append((buffer, region))
    for wanted in by_tensor.values():
        yield functools.partial(_fill, weights, devices, wanted)


def _fill(weights: Checkpoint, devices: Devices, wanted: Sequence[tuple[Buffer, Region]]) -> None:
    owners = [devices.of(buffer.space) for buffer, _ in wanted]
    known = [device.host(region) for device, (_, region) in zip(owners, wanted, strict=True)]
    arrays = [empty(region.kind) if array is None else array for array, (_, region) in zip(known, wanted, strict=True)]
    weights.fill_all([(_source(buffer), array) for (buffer, _), array in zip(wanted, arrays, strict=True)])
    for device, (_, region), array, mine in zip(owners, wanted, arrays, known, strict=True):
        if mine is None:
            device.upload(array, region)


def run_jobs(jobs: Sequence[Job], progress: Callable[[int, int], None] | None = None) -> None:
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


class Loader:
    """Makes jobs that make parts runnable."""

    def __init__(
        self,
        program: Program,
        parts: Mapping[str, Part],
        weights: Checkpoint,
        payload: Callable[[str, Form], bytes],
        devices: Devices,
    ) -> None:
        self._program = program
        self._parts = parts
        self._weights = weights
        self._payload = payload
        self._devices = devices

    def load(
        self, instances: Mapping[Instance, int | None], into: MutableMapping[Instance, Executable]
    ) -> Iterator[Job]:
        """Jobs that make executables: one per layer for those with constants, one per part for the others."""
        groups: dict[object, list[Instance]] = {}
        for instance, layer in instances.items():
            groups.setdefault(layer if instance.constants else instance, []).append(instance)
        places = {(instance.part, instance.space) for instance in instances}
        payloads = {(part, space): self._payload(part, self._devices.of(space).form) for part, space in places}
        for group in groups.values():
            yield functools.partial(self._load, group, payloads, into)

    def _load(
        self,
        group: Sequence[Instance],
        payloads: Mapping[tuple[str, Space], bytes],
        into: MutableMapping[Instance, Executable],
    ) -> None:
        roots = {self._program.root(name).name for instance in group for _, name in instance.constants}
        arrays = {name: empty(self._program.buffers[name].type) for name in roots}
        self._weights.fill_all([(_source(self._program.buffers[name]), array) for name, array in arrays.items()])
        for instance in group:
            constants = {index: self._view(arrays, name) for index, name in instance.constants}
            payload = payloads[instance.part, instance.space]
            into[instance] = self._devices.of(instance.space).load(self._parts[instance.part], payload, constants)

    def _view(self, arrays: Mapping[str, Array], name: str) -> Array:
        buffer = self._program.buffers[name]
        flat = arrays[self._program.root(name).name].reshape(-1)
        return flat[buffer.view_offset : buffer.view_offset + buffer.type.elements].reshape(buffer.type.shape)


def _source(buffer: Buffer) -> Source:
    if buffer.source is None:
        raise ValueError(f"weight {buffer.name} has no source")
    return buffer.source
