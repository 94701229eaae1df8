"""The toy bundle for a device with memory of its own, and such a device: it computes with ONNX Runtime, out of reach.

LoRA and gradients live on the host, which also adds up and updates; layer by layer, scales go up and gradients come
down. The reference program is the host's alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from npubundle.digest import sha256_of
from npubundle.liveness import planned
from npubundle.part import OnnxForm, Part, PartGraph
from npubundle.program import Buffer, Call, Instruction, Move, Operand, Program, Repeat
from npurt.arrays import Array
from npurt.devices.cpu import CpuDevice, CpuExecutable
from npurt.devices.device import Form, Region
from tests.npurt import toy_bundle as toy

TARGET = "far"
ON_HOST = {"lora", "grad", "grad_step", "moment1", "accumulate", "learning_rate", "sign", "grad_norm"}
HOST_PARTS = {"accumulate", "update"}


class FarDevice(CpuDevice):
    """Nothing of its memory is an array for the host; it counts what is copied."""

    name = "far"
    targets = frozenset({TARGET})
    prepacks = False

    def __init__(self, form: Form = "payload") -> None:
        super().__init__()
        self.form = form
        self.uploads: list[str] = []
        self.downloads: list[str] = []
        self.loaded: set[str] = set()
        self.closed = False

    def check(self, parts: object) -> None:
        """It takes whatever it gets."""

    def load(self, part: Part, payload: bytes, constants: Mapping[int, Array]) -> CpuExecutable:
        self.loaded.add(part.name)
        return super().load(part, payload, constants)

    def host(self, region: Region) -> None:  # type: ignore[override]
        """Out of reach."""

    def upload(self, array: Array, region: Region) -> None:
        self.uploads.append(str(region.kind))
        super().upload(array, region)

    def download(self, region: Region) -> Array:
        self.downloads.append(str(region.kind))
        array: Array = region.handle
        return array.copy()

    def close(self) -> None:
        self.closed = True


def program() -> Program:
    """The toy's program with two memories."""
    whole = toy.program()
    buffers = {
        b.name: dataclasses.replace(b, arena_offset=None, space="host" if _owner(b) in ON_HOST else "device")
        for b in whole.buffers.values()
    }
    phases = {phase: tuple(_with_moves(phase, instructions, buffers)) for phase, instructions in whole.phases.items()}
    return planned(dataclasses.replace(whole, buffers=buffers, phases=phases))


def reference() -> Program:
    """The toy's program, all on the host."""
    whole = toy.program()

    def moved(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Repeat):
            return dataclasses.replace(instruction, body=tuple(map(_on_host, instruction.body)))
        assert isinstance(instruction, Call)
        return _on_host(instruction)

    buffers = {b.name: dataclasses.replace(b, space="host") for b in whole.buffers.values()}
    phases = {phase: tuple(map(moved, instructions)) for phase, instructions in whole.phases.items()}
    return planned(dataclasses.replace(whole, buffers=buffers, phases=phases))


def write_bundle(folder: Path, *, graphs: bool = False, onnx: bool = True) -> tuple[Path, Path]:
    """A signed bundle.

    With `graphs`, parts of the device have a graph, and an ONNX form if `onnx`, beside a payload that nothing can load.
    """
    parts, payloads = toy.parts()
    changed: dict[str, Part] = {}
    if graphs:
        for name in [name for name in parts if name not in HOST_PARTS]:
            raw = payloads[name]
            graph = PartGraph(sha256_of(raw), len(raw), "application/graph")
            compiled = f"compiled {name}".encode()
            changed[f"{name}.far"] = dataclasses.replace(
                parts[name],
                name=f"{name}.far",
                digest=sha256_of(compiled),
                size=len(compiled),
                media_type="application/far",
                requires={"sorcery": "3"},
                graph=graph,
                onnx=OnnxForm(graph.digest, graph.size, {"onnxruntime": "1.14"}) if onnx else None,
            )
            payloads[f"{name}.far"] = compiled
    programs = {"train": _compiled(program(), changed), "reference": reference()}
    return toy.write_bundle(folder, target=TARGET, changed=changed, payloads=payloads, programs=programs)


def _compiled(program: Program, changed: dict[str, Part]) -> Program:
    def other(call: Call) -> Call:
        name = f"{call.part}.far"
        return dataclasses.replace(call, part=name) if name in changed else call

    def each(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Repeat):
            return dataclasses.replace(instruction, body=tuple(map(other, instruction.body)))
        return other(instruction) if isinstance(instruction, Call) else instruction

    phases = {phase: tuple(map(each, instructions)) for phase, instructions in program.phases.items()}
    return dataclasses.replace(program, phases=phases)


def _owner(buffer: Buffer) -> str:
    return buffer.view_of or buffer.name


def _on_host(call: Call) -> Call:
    return dataclasses.replace(call, queue="host")


def _with_moves(phase: str, instructions: tuple[Instruction, ...], buffers: dict[str, Buffer]) -> Iterator[Instruction]:
    """Each call of the device takes from the host what it needs, and gives back what belongs there."""
    for instruction in instructions:
        if isinstance(instruction, Repeat):
            yield instruction
            continue
        assert isinstance(instruction, Call)
        if instruction.part in HOST_PARTS:
            yield _on_host(instruction)
            continue
        call = instruction
        args, results = list(call.args), list(call.results)
        for index, operand in enumerate(args):
            if buffers[operand.buffer].space == "host":
                copy = f"{phase}.{call.part}.{operand.buffer}.up"
                buffers[copy] = Buffer(copy, buffers[operand.buffer].type, "activation")
                yield Move(operand.buffer, copy, "h2d", layer=call.layer)
                args[index] = Operand(copy)
        down = []
        for index, operand in enumerate(results):
            if buffers[operand.buffer].space == "host":
                copy = f"{phase}.{operand.buffer}.down"
                buffers[copy] = Buffer(copy, buffers[operand.buffer].type, "activation")
                down.append(Move(copy, operand.buffer, "d2h", layer=call.layer))
                results[index] = Operand(copy)
        yield dataclasses.replace(call, args=tuple(args), results=tuple(results))
        yield from down
