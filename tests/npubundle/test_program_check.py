"""Every rule of a well-formed program, broken once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings

from npubundle.errors import FormatError
from npubundle.part import Part
from npubundle.program import Buffer, Call, Move, Program, Repeat, Source
from npubundle.program_check import check
from npubundle.tensor import TensorType
from tests.npubundle.programs import Checked, apart, operands, part, programs, replaced, small, with_phase

SMALL, PARTS = small()
EMBED, LAYER, BLOCKS = SMALL.phases["micro_step"]
assert isinstance(LAYER, Call)
assert isinstance(BLOCKS, Repeat)
F32 = TensorType("f32", (12,))


def problems(program: Program, parts: dict[str, Part] | None = None) -> list[str]:
    with pytest.raises(FormatError) as caught:
        check(program, dict(PARTS) | (parts or {}))
    assert int(caught.value.exit_code) == 5
    return [str(problem) for problem in caught.value.problems]


def layer(**changes: object) -> Program:
    """The small program with its second instruction changed."""
    assert isinstance(LAYER, Call)
    return with_phase(SMALL, "micro_step", EMBED, dataclasses.replace(LAYER, **changes), BLOCKS)  # type: ignore[arg-type]


def update(call: Call, extra: Buffer | None = None) -> Program:
    """The small program with its update changed, and one more buffer."""
    program = with_phase(SMALL, "update", call)
    more = {extra.name: extra} if extra else {}
    return dataclasses.replace(program, buffers=dict(program.buffers) | more)


def test_the_small_program_is_well_formed() -> None:
    check(SMALL, PARTS)


@settings(max_examples=50, deadline=None)
@given(checked=programs())
def test_random_well_formed_programs_pass(checked: Checked) -> None:
    check(checked.program, checked.parts)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (layer(part="nothing"), "micro_step[1] nothing: calls a part that the bundle does not have"),
        (layer(args=operands("x", "lora.a")), "micro_step[1] layer: has 2 arguments, the part has 3"),
        (layer(results=()), "micro_step[1] layer: has 0 results, the part has 1"),
        (layer(args=operands("x", "lora.b", "lora.b")), "argument x1 is f32[4], buffer lora.b is f32[2,4]"),
        (layer(args=operands("nowhere", "lora.a", "lora.b")), "argument x0 is f32[3,4], buffer nowhere is unknown"),
        (layer(results=operands("sums")), "result y0 is f32[3,4], buffer sums is f32[5,2]"),
        (layer(args=operands("x[]", "lora.a", "lora.b")), "argument x0 is f32[3,4], buffer x[] is unknown"),
        (layer(results=operands("x")), "writes x while it reads it, and the part does not allow that"),
        (layer(results=operands("tokens")), "writes tokens, whose role is input"),
        (layer(after=(1,)), "micro_step[1]: waits for itself or a later instruction"),
        (layer(after=(7,)), "micro_step[1]: waits for itself or a later instruction"),
        (
            with_phase(SMALL, "micro_step", LAYER, EMBED, BLOCKS),
            "micro_step[0] layer: reads x before anything wrote it",
        ),
        (
            with_phase(SMALL, "micro_step", EMBED, LAYER, dataclasses.replace(BLOCKS, limit=6)),
            "argument x1 is i32[2], buffer rows[] is unknown",
        ),
        (
            with_phase(SMALL, "micro_step", EMBED, LAYER, dataclasses.replace(BLOCKS, count="nowhere")),
            "micro_step[2]: counts with nowhere, which is not a scalar i32[]",
        ),
        (
            with_phase(SMALL, "micro_step", EMBED, LAYER, dataclasses.replace(BLOCKS, count="tokens")),
            "micro_step[2]: counts with tokens, which is not a scalar i32[]",
        ),
    ],
)
def test_a_wrong_instruction_is_named(program: Program, said: str) -> None:
    assert any(said in problem for problem in problems(program))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (replaced(SMALL, "lora.b", view_offset=5), "lora.b: does not lie inside lora, which is f32[12]"),
        (replaced(SMALL, "lora.b", type=TensorType("i32", (2, 4))), "lora.b: does not lie inside lora"),
        (
            replaced(SMALL, "lora.b", view_of="nowhere"),
            "lora.b: is a view of nowhere, which is not a buffer of its own",
        ),
        (replaced(SMALL, "lora.b", view_of="lora.a"), "lora.b: is a view of lora.a, which is not a buffer of its own"),
        (replaced(SMALL, "lora.b", role="grad"), "lora.b: has role grad, but is a view of lora with role param"),
        (replaced(SMALL, "y", view_of="x"), "y: has role activation, but is a view of x"),
        (replaced(SMALL, "table", source=None), "table: is a weight without a source"),
        (replaced(SMALL, "table", source=Source("other")), "table: comes from other, which is not in the checkpoint"),
    ],
)
def test_a_wrong_buffer_is_named(program: Program, said: str) -> None:
    assert any(said in problem for problem in problems(program))


def test_all_problems_come_at_once() -> None:
    wrong = layer(part="nothing", after=(9,))
    wrong = with_phase(wrong, "update", Call("update", operands("lora", "grad"), operands("grad")))
    assert [problem.split(":")[0] for problem in problems(wrong)] == [
        "micro_step[1]", "micro_step[1] nothing", "micro_step[2] block", "update[0] update"
    ]  # fmt: skip
    both = replaced(replaced(SMALL, "lora.b", view_offset=5), "table", source=None)
    assert len(problems(both)) == 2


# -- writing over what is read ---------------------------------------------------------------------------------------


def test_a_part_writes_over_the_input_that_it_allows_and_no_other() -> None:
    assert (
        "writes grad while it reads it"
        in problems(update(Call("update", operands("lora", "grad"), operands("grad"))))[0]
    )
    twice = update(Call("update", operands("lora", "lora"), operands("lora")))
    assert "writes lora while it reads it" in problems(twice)[0]


def test_a_part_without_permission_writes_over_nothing() -> None:
    strict = {"update": part("update", [F32, F32], [F32])}
    assert problems(SMALL, strict) == [
        "update[0] update: writes lora while it reads it, and the part does not allow that"
    ]


def test_memory_is_shared_through_views_too() -> None:
    parts = {
        "from_view": part("from_view", [TensorType("f32", (4,))], [F32]),
        "to_view": part("to_view", [F32], [TensorType("f32", (4,))]),
        "two_views": part("two_views", [], [TensorType("f32", (4,)), F32]),
        "across": part("across", [TensorType("f32", (2, 4))], [TensorType("f32", (4,))]),
    }
    whole_from_part = Call("from_view", operands("lora.a"), operands("lora"))
    part_from_whole = Call("to_view", operands("lora"), operands("lora.a"))
    both = Call("two_views", (), operands("lora.a", "lora"))
    apart = Call("across", operands("lora.b"), operands("lora.a"))
    assert "writes lora while it reads lora.a, which shares memory" in problems(update(whole_from_part), parts)[0]
    assert "writes lora.a while it reads lora, which shares memory" in problems(update(part_from_whole), parts)[0]
    assert "writes lora and lora.a, which share memory" in problems(update(both), parts)[0]
    check(update(apart), dict(PARTS) | parts)


# -- the memory plan -------------------------------------------------------------------------------------------------


def test_living_activations_may_not_share_bytes() -> None:
    together = replaced(SMALL, "y", arena_offset=SMALL.buffers["x"].arena_offset)
    assert "micro_step: x and y share bytes while both are alive" in problems(together)


def test_dead_activations_may() -> None:
    offset = SMALL.buffers["x"].arena_offset
    assert offset == SMALL.buffers["sums"].arena_offset
    check(SMALL, PARTS)


def test_an_activation_lies_inside_the_arena() -> None:
    small_arena = dataclasses.replace(SMALL, arena={"micro_step": 100})
    assert problems(small_arena) == ["micro_step: y ends beyond the arena of 100 bytes"]


def test_every_activation_has_a_place() -> None:
    assert problems(replaced(SMALL, "y", arena_offset=None)) == [
        "micro_step: has activations without a place in the arena"
    ]


@pytest.mark.parametrize("change", [lambda o: o + 64, lambda o: o + 1])
def test_offsets_that_reach_into_a_neighbour_are_found(change: Callable[[int], int]) -> None:
    offset = SMALL.buffers["x"].arena_offset
    assert offset is not None
    moved = dataclasses.replace(replaced(SMALL, "x", arena_offset=change(offset)), arena={"micro_step": 4096})
    assert SMALL.buffers["y"].arena_offset == offset + 64
    assert problems(moved) == ["micro_step: x and y share bytes while both are alive"]


@pytest.mark.parametrize(
    ("chains", "said"),
    [
        ((("x", "y"), ("x",)), "chains[1]: has 1 boundaries, the first chain has 2"),
        ((("x", "nowhere"),), "chains[0]: names nowhere, which is not a buffer"),
        ((("tokens", "lora"),), "chains[0]: joins buffers of different types"),
    ],
)
def test_boundaries_of_a_chain_are_alike(chains: tuple[tuple[str, ...], ...], said: str) -> None:
    found = problems(dataclasses.replace(SMALL, chains=chains))
    assert any(problem.startswith(said) for problem in found)


# -- two memories ----------------------------------------------------------------------------------------------------

APART, APART_PARTS = apart()


def changed_step(index: int, **changes: object) -> Program:
    """The program in two memories with one instruction changed."""
    step = list(APART.phases["step"])
    step[index] = dataclasses.replace(step[index], **changes)  # type: ignore[arg-type]
    return with_phase(APART, "step", *step)


def test_a_program_in_two_memories_is_well_formed() -> None:
    check(APART, APART_PARTS)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (changed_step(1, source="nowhere"), "step[1] move: names nowhere, which is not a buffer"),
        (changed_step(1, source="lora"), "step[1] move: copies lora, which is f32[8], to up.0, which is f32[4]"),
        (changed_step(1, source="h.0"), "step[1] move: is on h2d, but h.0 lies in the device's memory"),
        (changed_step(1, target="down"), "step[1] move: is on h2d, but down lies in the host's memory"),
        (changed_step(1, queue="d2h"), "step[1] move: is on d2h, but lora.0 lies in the host's memory"),
        (changed_step(5, source="up.1", after=(9,)), "step[5]: waits for itself or a later instruction"),
        (changed_step(5, target="n"), "step[5] move: writes n, whose role is scalar"),
        (changed_step(3, target="up.0"), "step[4] layer: reads up.1 before anything wrote it"),
        (with_phase(APART, "step", Move("h.0", "down", "d2h")), "step[0] move: reads h.0 before anything wrote it"),
        (changed_step(6, queue="compute"), "step[6] add: runs on compute, but grad lies in the host's memory"),
        (changed_step(0, queue="host"), "step[0] start: runs on host, but w lies in the device's memory"),
        (
            changed_step(7, body=(Call("end", operands("h.2"), operands("out[]"), queue="d2h"),)),
            "step[7]: repeats calls that are neither all on compute nor all on host",
        ),
        (replaced(APART, "lora.1", space="device"), "lora.1: lies in the device's memory, but is a view of lora"),
        (replaced(APART, "h.2", space="host"), "chains[0]: joins buffers of both memory spaces"),
    ],
)
def test_a_step_across_the_border_is_named(program: Program, said: str) -> None:
    with pytest.raises(FormatError) as caught:
        check(program, APART_PARTS)
    assert any(str(problem).startswith(said) for problem in caught.value.problems), caught.value.problems


def test_the_host_has_an_arena_of_its_own() -> None:
    with pytest.raises(FormatError, match="down ends beyond the arena of 0 bytes"):
        check(dataclasses.replace(APART, host_arena={}), APART_PARTS)
    assert APART.buffers["down"].arena_offset == 0


def test_the_host_computes_only_in_its_own_memory_even_without_any() -> None:
    said = problems(layer(queue="host"))
    assert "micro_step[1] layer: runs on host, but x lies in the device's memory" in said
