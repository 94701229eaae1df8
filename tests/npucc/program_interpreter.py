"""Executes a program with PyTorch, activations in one real arena per space: what a program means, without a runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from npubundle.program import SPACES, Buffer, Call, Move, Operand, Program, Repeat, Space
from npucc.graph import Graph
from npucc.graph.capture import DTYPES
from npucc.graph.interpret import interpret
from npucc.parts import Traced


class ProgramInterpreter:
    """Memory of a program and the phases that run on it, in the dtypes that the program declares.

    Nothing is initialised but what is set: floating-point buffers start as NaN, and arenas are filled with NaN before
    every phase, so that whatever is read too early or overwritten too soon spoils the results.
    """

    def __init__(self, program: Program, traced: Traced) -> None:
        self.program = program
        self.head = traced.head
        self.parts: dict[str, Graph] = {name: spec.graph for name, spec in traced.parts.items()}
        self.memory: dict[str, torch.Tensor] = {}
        self.arenas: dict[Space, torch.Tensor] = {}
        for buffer in program.buffers.values():
            if buffer.view_of is None and buffer.role != "activation":
                poison = float("nan") if buffer.type.dtype == "f32" else -1
                self.memory[buffer.name] = torch.full(buffer.type.shape, poison, dtype=DTYPES[buffer.type.dtype])
            if buffer.value is not None:
                self.memory[buffer.name].fill_(buffer.value)

    def load(self, checkpoint: Mapping[str, torch.Tensor]) -> None:
        """Fill the weights from tensors by their names in the checkpoint; none has a layout transform here."""
        for buffer in self.program.with_role("weight"):
            if buffer.source is not None:
                assert buffer.source.transforms == ()
                self.memory[buffer.name].copy_(checkpoint[buffer.source.tensor])

    def set(self, **values: torch.Tensor | float) -> None:
        """Fill buffers by name."""
        for name, value in values.items():
            self[name].copy_(torch.as_tensor(value))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The memory of a buffer; writing to it writes to the program's memory."""
        buffer = self.program.buffers[name]
        if buffer.view_of is not None:
            flat = self.memory[buffer.view_of].view(-1)
            return flat[buffer.view_offset : buffer.view_offset + buffer.type.elements].view(buffer.type.shape)
        return self._activation(buffer) if buffer.role == "activation" else self.memory[name]

    def _activation(self, buffer: Buffer) -> torch.Tensor:
        assert buffer.arena_offset is not None
        raw = self.arenas[buffer.space][buffer.arena_offset : buffer.arena_offset + buffer.type.nbytes]
        return raw.view(DTYPES[buffer.type.dtype]).view(buffer.type.shape)

    def run(self, phase: str) -> None:
        """Execute the instructions of a phase in the order of the list."""
        for space in SPACES:
            self.arenas[space] = torch.full((self.program.arenas(space).get(phase, 0),), 0xFF, dtype=torch.uint8)
        for instruction in self.program.phases[phase]:
            if isinstance(instruction, Repeat):
                rounds = int(self[instruction.count])
                assert 0 < rounds <= instruction.limit
                for index in range(rounds):
                    for call in instruction.body:
                        self._call(call, index)
            elif isinstance(instruction, Move):
                assert self.program.root(instruction.source).space != self.program.root(instruction.target).space
                self[instruction.target].copy_(self[instruction.source])
            else:
                self._call(instruction, None)

    def _call(self, call: Call, index: int | None) -> None:
        space = "host" if call.queue == "host" else "device"
        assert {self.program.root(o.buffer).space for o in (*call.args, *call.results)} == {space}, call.part
        results = interpret(self.parts[call.part], self._operands(call.args, index), widen=False)
        for place, result in zip(self._operands(call.results, index), results, strict=True):
            assert place.dtype == result.dtype
            assert place.shape == result.shape
            place.copy_(result)

    def _operands(self, operands: Sequence[Operand], index: int | None) -> list[torch.Tensor]:
        return [self[o.buffer][index] if o.indexed else self[o.buffer] for o in operands]
