from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from npubundle import program_check
from npubundle.liveness import ALIGNMENT, lives, planned, truncated
from npubundle.program import Buffer, Call, Instruction, Move, Program, Repeat
from npubundle.tensor import TensorType
from tests.npubundle.programs import Checked, apart, operands, part, programs, small


def touched(program: Program, phase: str) -> list[set[str]]:
    """Names of the activations that each instruction reads or writes, written without the planner's help."""
    steps = []
    for instruction in program.phases[phase]:
        calls = instruction.body if isinstance(instruction, Repeat) else [instruction]
        names = {o.buffer for call in calls if isinstance(call, Call) for o in (*call.args, *call.results)}
        steps.append({name for name in names if program.buffers[name].role == "activation"})
    return steps


@settings(max_examples=300, deadline=None)
@given(checked=programs())
def test_what_is_alive_at_one_time_never_shares_a_byte(checked: Checked) -> None:
    program = checked.program
    for phase in program.phases:
        steps = touched(program, phase)
        names = set().union(*steps)
        for now in range(len(steps)):
            taken: set[int] = set()
            for name in names:
                uses = [index for index, step in enumerate(steps) if name in step]
                buffer = program.buffers[name]
                if min(uses) <= now <= max(uses):
                    assert buffer.arena_offset is not None
                    mine = set(range(buffer.arena_offset, buffer.arena_offset + buffer.type.nbytes))
                    assert not mine & taken
                    assert max(mine, default=0) < max(program.arena[phase], 1)
                    taken |= mine


@settings(max_examples=100, deadline=None)
@given(checked=programs())
def test_offsets_are_aligned_and_pass_the_check(checked: Checked) -> None:
    offsets = [b.arena_offset for b in checked.program.with_role("activation") if b.arena_offset is not None]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    program_check.check(checked.program, checked.parts)


@settings(max_examples=100, deadline=None)
@given(checked=programs())
def test_planning_again_changes_nothing(checked: Checked) -> None:
    assert planned(checked.program) == checked.program


def chain(*sizes: int) -> Program:
    """Each activation is read once, by the call that writes the next."""
    buffers = {f"h{n}": Buffer(f"h{n}", TensorType("f32", (size,)), "activation") for n, size in enumerate(sizes)}
    calls = [Call("p", operands(f"h{n}"), operands(f"h{n + 1}")) for n in range(len(sizes) - 1)]
    return planned(Program(buffers, {"step": (Call("p", (), operands("h0")), *calls)}))


def test_a_chain_needs_room_for_two() -> None:
    program = chain(*[64] * 10)
    assert program.arena == {"step": 2 * 256}
    assert {b.arena_offset for b in program.buffers.values()} == {0, 256}


def test_the_largest_is_placed_first() -> None:
    program = chain(16, 64, 16)
    assert program.buffers["h1"].arena_offset == 0
    assert program.arena["step"] == 256 + 64


def test_everything_in_a_repeat_is_alive_together() -> None:
    """What one call of the body leaves behind, the next round may still need."""
    buffers = {name: Buffer(name, TensorType("f32", (16,)), "activation") for name in "abc"}
    buffers["n"] = Buffer("n", TensorType("i32", ()), "scalar")
    body = (
        Call("p", (), operands("a")),
        Call("p", operands("a"), operands("b")),
        Call("p", operands("b"), operands("c")),
    )
    program = planned(Program(buffers, {"step": (Repeat("n", 3, body),)}))
    assert sorted(b.arena_offset for b in program.with_role("activation") if b.arena_offset is not None) == [0, 64, 128]


def test_lives_are_first_and_last_use() -> None:
    program = small().program
    assert [(life.buffer.name, life.start, life.end) for life in lives(program, "micro_step")] == [
        ("x", 0, 1), ("y", 1, 2), ("sums", 2, 2)
    ]  # fmt: skip
    assert lives(program, "update") == []
    assert program.arena == {"micro_step": 128, "update": 0}


def test_each_memory_has_an_arena() -> None:
    program = apart().program
    assert (program.arena, program.host_arena) == ({"step": 192}, {"step": 64})
    assert [life.buffer.name for life in lives(program, "step", "host")] == ["down"]
    lived = {life.buffer.name: (life.start, life.end) for life in lives(program, "step")}
    assert lived == {"h.0": (0, 2), "up.0": (1, 2), "h.1": (2, 4), "up.1": (3, 4), "h.2": (4, 7)}
    assert planned(program) == program


def test_moves_are_cut_and_renamed_with_the_layers() -> None:
    checked = apart()
    cut = truncated(checked.program, 1)
    program_check.check(cut, checked.parts)
    assert list(cut.moves("step")) == [Move("lora.0", "up.0", "h2d", layer=0), Move("h.1", "down", "d2h", after=(2,))]
    assert "lora.1" not in {move.source for move in cut.moves("step")}
    assert cut.written("step") == {"h.0", "up.0", "h.1", "down", "grad", "out"}


def test_phases_share_an_activation_only_at_the_same_place() -> None:
    buffers = {name: Buffer(name, TensorType("f32", (size,)), "activation") for name, size in (("a", 1), ("b", 99))}
    both, one = Call("p", (), operands("a", "b")), Call("p", (), operands("a"))
    assert planned(Program(buffers, {"one": (both,), "two": (both, both)})).arena == {"one": 512, "two": 512}
    with pytest.raises(ValueError, match="activation a is used by the phases one and two"):
        planned(Program(buffers, {"one": (both,), "two": (one,)}))


def layered(layers: int) -> Checked:
    """A program of one phase with a chain of layers, forward and back, and a loss in a repeat."""
    kind = TensorType("f32", (4,))
    names = [f"{prefix}{n}" for prefix in ("h", "d") for n in range(layers + 1)]
    buffers = {name: Buffer(name, kind, "activation") for name in names}
    buffers |= {"n": Buffer("n", TensorType("i32", ()), "scalar"), "out": Buffer("out", kind, "output")}
    forward = [Call("f", operands(f"h{n}"), operands(f"h{n + 1}"), layer=n, after=(n,)) for n in range(layers)]
    loss = Repeat("n", 2, (Call("loss", operands(f"h{layers}"), operands(f"d{layers}")),))
    back = [Call("b", operands(f"h{n}", f"d{n + 1}"), operands(f"d{n}"), layer=n) for n in reversed(range(layers))]
    instructions: tuple[Instruction, ...] = (
        Call("start", (), operands("h0")),
        *forward,
        loss,
        *back,
        Call("f", operands("d0"), operands("out")),
    )
    chains = tuple(tuple(f"{prefix}{n}" for n in range(layers + 1)) for prefix in ("h", "d"))
    parts = {
        "start": part("start", [], [kind]), "f": part("f", [kind], [kind]), "b": part("b", [kind, kind], [kind]),
        "loss": part("loss", [kind], [kind]),
    }  # fmt: skip
    return Checked(planned(Program(buffers, {"step": instructions}, chains)), parts)


@pytest.mark.parametrize("kept", [1, 2, 3, 5])
def test_a_program_cut_short_is_the_program_of_a_shorter_model(kept: int) -> None:
    whole = layered(5)
    cut = truncated(whole.program, kept)
    program_check.check(cut, whole.parts)
    expected = layered(kept).program
    assert cut.layers == kept
    assert cut.chains == expected.chains
    assert cut.arena == expected.arena

    def plain(program: Program) -> list[object]:
        return [i if isinstance(i, Repeat) else dataclasses.replace(i, after=()) for i in program.phases["step"]]

    assert plain(cut) == plain(expected)


@pytest.mark.parametrize("layers", [0, -1, 6])
def test_a_program_cannot_be_cut_to_any_length(layers: int) -> None:
    with pytest.raises(ValueError, match=f"layers must be from 1 to 5, is {layers}"):
        truncated(layered(5).program, layers)
