"""Random well-formed programs with the signatures of their parts, and one small program to break."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from hypothesis import strategies as st

from npubundle.liveness import planned
from npubundle.part import Numerics, Part, Port
from npubundle.program import Buffer, Call, Init, Instruction, Move, Operand, Program, Repeat, Source
from npubundle.tensor import TensorType

DIGEST = "sha256:" + "0" * 64


class Checked(NamedTuple):
    """A program and the parts it calls."""

    program: Program
    parts: Mapping[str, Part]


def part(name: str, inputs: list[TensorType], outputs: list[TensorType], *inplace: tuple[int, int]) -> Part:
    """A part of this signature."""
    return Part(
        name,
        DIGEST,
        tuple(Port(f"x{n}", kind) for n, kind in enumerate(inputs)),
        tuple(Port(f"y{n}", kind) for n, kind in enumerate(outputs)),
        inplace,
        DIGEST,
        1,
        "application/octet-stream",
        {},
        Numerics(1e-5, "pass"),
    )


def operands(*names: str) -> tuple[Operand, ...]:
    return tuple(map(Operand.from_str, names))


def f32(*shape: int) -> TensorType:
    return TensorType("f32", shape)


def small() -> Checked:
    """An embedding, a layer with two views of one parameter, a repeat over blocks, and an update in place."""
    buffers = [
        Buffer("table", f32(7, 4), "weight", source=Source("model.embed.weight", (("rows", 0, 7), ("transpose",)))),
        Buffer("lora", f32(12), "param"),
        Buffer("lora.a", f32(4), "param", "lora", 0, tensor="a.weight", init=Init("kaiming_uniform", 4)),
        Buffer("lora.b", f32(2, 4), "param", "lora", 4, tensor="b.weight", init=Init("zeros")),
        Buffer("grad", f32(12), "grad"),
        Buffer("tokens", TensorType("i32", (3,)), "input"),
        Buffer("rows", TensorType("i32", (5, 2)), "input"),
        Buffer("blocks", TensorType("i32", ()), "scalar"),
        Buffer("start", TensorType("i32", ()), "scalar", value=-5),
        Buffer("losses", f32(5, 2), "output"),
        Buffer("x", f32(3, 4), "activation"),
        Buffer("y", f32(3, 4), "activation"),
        Buffer("sums", f32(5, 2), "activation"),
    ]
    parts = [
        part("embed", [buffers[0].type, buffers[5].type], [f32(3, 4)]),
        part("layer", [f32(3, 4), f32(4), f32(2, 4)], [f32(3, 4)]),
        part("block", [f32(3, 4), TensorType("i32", (2,)), TensorType("i32", ())], [f32(2), f32(2)]),
        part("update", [f32(12), f32(12)], [f32(12)], (0, 0)),
    ]
    step: tuple[Instruction, ...] = (
        Call("embed", operands("table", "tokens"), operands("x")),
        Call("layer", operands("x", "lora.a", "lora.b"), operands("y"), queue="compute", after=(0,), layer=0),
        Repeat("blocks", 5, (Call("block", operands("y", "rows[]", "start"), operands("losses[]", "sums[]")),)),
    )
    update = (Call("update", operands("lora", "grad"), operands("lora")),)
    program = Program(
        {b.name: b for b in buffers},
        {"micro_step": step, "update": update},
        chains=(("x", "y"),),
        checkpoint={"model.embed.weight": (4, 7)},
    )
    return Checked(planned(program), {p.name: p for p in parts})


def apart() -> Checked:
    """A program for a device with memory of its own: two layers whose scale comes from the host, which adds up."""
    kind = f32(4)
    buffers = [
        Buffer("w", f32(2, 4), "weight", source=Source("w")),
        Buffer("lora", f32(8), "param", space="host"),
        *(Buffer(f"lora.{n}", kind, "param", "lora", 4 * n, space="host") for n in range(2)),
        Buffer("grad", kind, "grad", space="host"),
        *(Buffer(f"h.{n}", kind, "activation") for n in range(3)),
        *(Buffer(f"up.{n}", kind, "activation") for n in range(2)),
        Buffer("down", kind, "activation", space="host"),
        Buffer("n", TensorType("i32", ()), "scalar", space="host"),
        Buffer("out", f32(3, 4), "output"),
    ]
    parts = [
        part("start", [f32(2, 4)], [kind]),
        part("layer", [kind, kind], [kind]),
        part("add", [kind, kind], [kind], (0, 0)),
        part("end", [kind], [kind]),
    ]
    step: tuple[Instruction, ...] = (
        Call("start", operands("w"), operands("h.0")),
        Move("lora.0", "up.0", "h2d", layer=0),
        Call("layer", operands("h.0", "up.0"), operands("h.1"), after=(1,), layer=0),
        Move("lora.1", "up.1", "h2d", layer=1),
        Call("layer", operands("h.1", "up.1"), operands("h.2"), after=(3,), layer=1),
        Move("h.2", "down", "d2h", after=(4,)),
        Call("add", operands("grad", "down"), operands("grad"), queue="host", after=(5,)),
        Repeat("n", 3, (Call("end", operands("h.2"), operands("out[]")),)),
    )
    program = Program({b.name: b for b in buffers}, {"step": step}, (("h.0", "h.1", "h.2"),), checkpoint={"w": (2, 4)})
    return Checked(planned(program), {p.name: p for p in parts})


def replaced(program: Program, name: str, **changes: Any) -> Program:
    """The program with a buffer changed."""
    buffers = dict(program.buffers)
    buffers[name] = dataclasses.replace(buffers[name], **changes)
    return dataclasses.replace(program, buffers=buffers)


def with_phase(program: Program, phase: str, *instructions: Instruction) -> Program:
    """The program with a phase changed."""
    return dataclasses.replace(program, phases=dict(program.phases) | {phase: instructions})


_SIZES = st.sampled_from([0, 1, 3, 16, 17, 64, 1000])


@st.composite
def programs(draw: st.DrawFn) -> Checked:
    """A program with random lives of activations in one or two phases, with repeats and unused names."""
    buffers: dict[str, Buffer] = {"n": Buffer("n", TensorType("i32", ()), "scalar")}
    parts: dict[str, Part] = {}
    phases: dict[str, tuple[Instruction, ...]] = {}

    def call(written: list[str], prefix: str) -> Call:
        reads = draw(st.lists(st.sampled_from(written), max_size=4)) if written else []
        results = []
        for _ in range(draw(st.integers(1, 3))):
            again = [name for name in written if name not in reads and name not in results]
            if again and draw(st.integers(0, 3)) == 0:
                results.append(draw(st.sampled_from(again)))
            else:
                name = f"{prefix}{len(buffers)}"
                buffers[name] = Buffer(name, TensorType("f32", (draw(_SIZES),)), "activation")
                results.append(name)
        made = part(f"p{len(parts)}", [buffers[r].type for r in reads], [buffers[r].type for r in results])
        parts[made.name] = made
        written += [name for name in results if name not in written]
        return Call(made.name, operands(*reads), operands(*results), layer=draw(st.none() | st.integers(0, 3)))

    for phase in draw(st.sampled_from([("a",), ("a", "b")])):
        written: list[str] = []
        body: list[Instruction] = []
        for _ in range(draw(st.integers(0, 7))):
            if draw(st.integers(0, 3)):
                body.append(call(written, phase))
            else:
                count = draw(st.integers(1, 3))
                body.append(Repeat("n", draw(st.integers(1, 9)), tuple(call(written, phase) for _ in range(count))))
        phases[phase] = tuple(body)
    return Checked(planned(Program(buffers, phases)), parts)
