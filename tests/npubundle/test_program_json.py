from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npubundle import canonical, program_json
from npubundle.errors import FormatError
from npubundle.program import (
    INITS,
    QUEUES,
    ROLES,
    SPACES,
    WAYS,
    Buffer,
    Call,
    Init,
    Instruction,
    Move,
    Operand,
    Program,
    Repeat,
    Source,
)
from npubundle.tensor import ITEM_SIZE, TensorType
from tests.npubundle.programs import Checked, apart, programs, small

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,12}", fullmatch=True)
types = st.builds(
    TensorType, st.sampled_from(sorted(ITEM_SIZE)), st.lists(st.integers(0, 10**6), max_size=4).map(tuple)
)
transforms = st.lists(
    st.just(("transpose",)) | st.tuples(st.just("rows"), st.integers(0, 99), st.integers(0, 99)), max_size=3
).map(tuple)
whole = st.integers(0, 2**50)
sources = st.builds(Source, st.text(min_size=1, max_size=9), transforms)


@st.composite
def buffers(draw: st.DrawFn, name: str) -> Buffer:
    """A buffer with any combination of fields: the form of a program is one thing, its sense another."""
    view_of = draw(st.none() | names)
    return Buffer(
        name,
        draw(types),
        draw(st.sampled_from(ROLES)),
        view_of,
        draw(whole) if view_of else 0,
        draw(st.none() | sources),
        draw(st.none() | st.text(min_size=1, max_size=9)),
        draw(st.none() | st.builds(Init, st.sampled_from(INITS), whole)),
        draw(st.none() | whole),
        draw(st.none() | st.integers(-(2**31), 2**31 - 1)),
        draw(st.sampled_from(SPACES)),
    )


operand_lists = st.lists(st.builds(Operand, names, st.booleans()), max_size=4).map(tuple)
calls = st.builds(
    Call,
    names,
    operand_lists,
    operand_lists,
    st.sampled_from(QUEUES),
    st.lists(whole, max_size=3).map(tuple),
    st.none() | whole,
)
moves = st.builds(
    Move, names, names, st.sampled_from(tuple(WAYS)), st.lists(whole, max_size=3).map(tuple), st.none() | whole
)
repeats = st.builds(Repeat, names, st.integers(1, 99), st.lists(calls, max_size=3).map(tuple))


@st.composite
def any_programs(draw: st.DrawFn) -> Program:
    """A program of the right form, which need not make sense."""
    unique = draw(st.lists(names, max_size=5, unique=True))
    instructions: st.SearchStrategy[Instruction] = calls | repeats | moves
    return Program(
        {name: draw(buffers(name)) for name in unique},
        draw(st.dictionaries(st.text(max_size=5), st.lists(instructions, max_size=4).map(tuple), max_size=3)),
        draw(st.lists(st.lists(names, min_size=2, max_size=4).map(tuple), max_size=2).map(tuple)),
        draw(st.dictionaries(st.text(max_size=5), whole, max_size=3)),
        draw(st.dictionaries(st.text(max_size=9), st.lists(whole, max_size=4).map(tuple), max_size=3)),
        draw(st.dictionaries(st.text(max_size=5), whole, max_size=3)),
    )


@settings(max_examples=150, deadline=None)
@given(program=any_programs())
def test_what_is_written_is_read_back(program: Program) -> None:
    raw = program_json.encode(program)
    again = program_json.decode(raw)
    assert again == program
    assert list(again.buffers) == list(program.buffers)
    assert program_json.encode(again) == raw


@settings(max_examples=50, deadline=None)
@given(checked=programs())
def test_planned_programs_are_read_back(checked: Checked) -> None:
    assert program_json.decode(program_json.encode(checked.program)) == checked.program


@given(operand=st.builds(Operand, names, st.booleans()))
def test_operands_have_one_spelling(operand: Operand) -> None:
    assert Operand.from_str(str(operand)) == operand


def broken(*changes: tuple[tuple[str | int, ...], Any]) -> dict[str, str]:
    """Problems of the small program's document after changes at paths; a value of `...` removes."""
    document = json.loads(program_json.encode(small().program))
    for path, value in changes:
        place = document
        for key in path[:-1]:
            place = place[key]
        if value is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = value
    with pytest.raises(FormatError) as caught:
        program_json.decode(canonical.encode(document), where="somewhere")
    assert caught.value.where == "somewhere"
    return {problem.where: problem.what for problem in caught.value.problems} or {"": caught.value.what}


STEP = ("phases", "micro_step")


@pytest.mark.parametrize(
    ("path", "value", "where", "said"),
    [
        (("buffers", 0, "type"), "f64[3]", "buffers[0].type", "must be a tensor type"),
        (("buffers", 0, "type"), "f32[-1]", "buffers[0].type", "must be a tensor type"),
        (("buffers", 0, "role"), "weights", "buffers[0].role", "must be one of weight"),
        (("buffers", 0, "name"), "a b", "buffers[0].name", "must be a buffer or part name"),
        (("buffers", 0, "extra"), 1, "buffers[0].extra", "is not a known key"),
        (("buffers", 0, "source", "transforms"), [["flip"]], "buffers[0].source.transforms[0]", "must be a layout"),
        (("buffers", 0, "source", "transforms"), [["rows", 1]], "buffers[0].source.transforms[0]", "must be a layout"),
        (("buffers", 0, "source", "transforms"), [["rows", 1, True]], "buffers[0].source.transforms[0]", "must be"),
        (("buffers", 0, "source", "transforms"), ["rows"], "buffers[0].source.transforms[0]", "must be a layout"),
        (("buffers", 2, "init", "kind"), "ones", "buffers[2].init.kind", "must be one of zeros"),
        (("buffers", 2, "view", "offset"), -1, "buffers[2].view.offset", "must be at least 0"),
        (("buffers", 8, "value"), 2**31, "buffers[8].value", "must be at most"),
        ((*STEP, 0, "queue"), "gpu", "phases.micro_step[0].queue", "must be one of compute"),
        ((*STEP, 0, "args", 0), "x[0]", "phases.micro_step[0].args[0]", "must be an operand"),
        ((*STEP, 0, "call"), ..., "phases.micro_step[0].call", "is missing"),
        ((*STEP, 1, "after"), [-1], "phases.micro_step[1].after[0]", "must be at least 0"),
        ((*STEP, 1, "layer"), "0", "phases.micro_step[1].layer", "must be an integer"),
        ((*STEP, 2, "limit"), 0, "phases.micro_step[2].limit", "must be at least 1"),
        (
            (*STEP, 2, "body", 0),
            {"repeat": "n", "limit": 1, "body": []},
            "phases.micro_step[2].body[0].call",
            "missing",
        ),
        (("chains", 0), ["x"], "chains[0]", "must have at least 2 items"),
        (("arena", "micro_step"), -1, "arena.micro_step", "must be at least 0"),
        (("checkpoint", "model.embed.weight"), "4x7", "checkpoint.model.embed.weight", "must be a list"),
        (("phases",), ..., "phases", "is missing"),
    ],
)
def test_a_fault_of_form_is_found_where_it_is(path: tuple[str | int, ...], value: Any, where: str, said: str) -> None:
    found = broken((path, value))
    assert where in found
    assert said in found[where]


def test_all_faults_are_found_at_once() -> None:
    found = broken((("buffers", 0, "role"), "x"), ((*STEP, 0, "queue"), "x"), (("arena",), []))
    assert set(found) == {"buffers[0].role", "phases.micro_step[0].queue", "arena"}


def test_a_program_in_one_memory_says_nothing_of_two() -> None:
    text = program_json.encode(small().program).decode()
    assert all(f'"{key}"' not in text for key in ("space", "host_arena", "move", "to"))


def test_a_move_says_only_what_applies() -> None:
    program = apart().program
    document = json.loads(program_json.encode(program))
    assert document["phases"]["step"][1] == {"move": "lora.0", "to": "up.0", "queue": "h2d", "layer": 0}
    assert document["phases"]["step"][5] == {"move": "h.2", "to": "down", "queue": "d2h", "after": [4]}
    assert document["host_arena"] == {"step": 64}
    assert [b["name"] for b in document["buffers"] if "space" in b] == [
        "lora", "lora.0", "lora.1", "grad", "down", "n"
    ]  # fmt: skip
    assert program_json.decode(program_json.encode(program)) == program


@pytest.mark.parametrize(
    ("index", "change", "said"),
    [
        (1, {"queue": "compute"}, "queue: must be one of h2d, d2h, is 'compute'"),
        (1, {"to": "a b"}, "to: must be a buffer or part name"),
        (1, {"call": "layer"}, "call: is not a known key"),
    ],
)
def test_a_fault_of_a_move_is_named(index: int, change: dict[str, Any], said: str) -> None:
    document = json.loads(program_json.encode(apart().program))
    document["phases"]["step"][index] |= change
    with pytest.raises(FormatError) as caught:
        program_json.decode(canonical.encode(document))
    assert [str(problem).startswith(f"phases.step[{index}].{said}") for problem in caught.value.problems] == [True]


def test_a_listing_shows_where_things_lie_and_move() -> None:
    listing = apart().program.listing()
    assert "param      lora.1: f32[4] on the host = lora+4\n" in listing
    assert "step: (arena 192 bytes, 64 on the host)" in listing
    assert "[h2d] up.0 = lora.0\n" in listing
    assert "[d2h] down = h.2 after [4]\n" in listing


def test_names_are_unique() -> None:
    assert "two buffers have the same name" in broken((("buffers", 1, "name"), "table"))[""]


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"null", b'{ "buffers": [] }', b"\xff", b"[" * 10_000])
def test_what_is_no_program_is_refused(raw: bytes) -> None:
    with pytest.raises(FormatError):
        program_json.decode(raw)
