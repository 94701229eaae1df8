"""Any order that queues and waits allow must give what the order of the list gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from npubundle.program import Buffer, Call, Instruction, Move, Operand, Program, Repeat
from npubundle.schedule import accesses, missing_waits, queue_of, scheduled, waits
from npubundle.tensor import TensorType

SIZE = 8
VIEWS = [(0, 8), (0, 4), (4, 4), (2, 4)]


def program(instructions: Sequence[Instruction]) -> Program:
    buffers = {}
    for place in ("host", "device"):
        for base in "ab":
            name = f"{place}.{base}"
            buffers[name] = Buffer(name, TensorType("f32", (SIZE,)), "grad", space=place)
            for start, size in VIEWS[1:]:
                view = f"{name}.{start}.{size}"
                buffers[view] = dataclasses.replace(
                    buffers[name], name=view, type=TensorType("f32", (size,)), view_of=name, view_offset=start
                )
    buffers["n"] = Buffer("n", TensorType("i32", ()), "scalar")
    return Program(buffers, {"step": tuple(instructions)})


NAMES = {p: sorted(n for n in program(()).buffers if n.startswith(p)) for p in ("host", "device")}


def calls(queue: str) -> st.SearchStrategy[Call]:
    names = st.sampled_from(NAMES["host" if queue == "host" else "device"]).map(Operand)
    return st.builds(
        Call,
        part=st.just("p"),
        args=st.lists(names, max_size=2).map(tuple),
        results=st.lists(names, min_size=1, max_size=1).map(tuple),
        queue=st.just(queue),
    )


MOVES = [
    Move(f"{source}.{name}", f"{target}.{name}", queue)  # type: ignore[arg-type]
    for source, target, queue in (("host", "device", "h2d"), ("device", "host", "d2h"))
    for name in "ab"
]
INSTRUCTIONS = st.one_of(
    calls("compute"),
    calls("host"),
    st.sampled_from(MOVES),
    calls("host").map(lambda call: Repeat("n", 2, (call,))),
)


def run(built: Program, order: Sequence[int]) -> dict[str, tuple[object, ...]]:
    """The memory after these instructions: every byte is the history that made it."""
    memory = {name: [f"{name}{i}" for i in range(SIZE)] for name in ("host.a", "host.b", "device.a", "device.b")}
    history: dict[str, list[object]] = {name: list(values) for name, values in memory.items()}
    for number in order:
        touched = [a for a in accesses(built, built.phases["step"][number]) if a.place != "n"]
        read = tuple(tuple(history[a.place][a.start // 4 : a.stop // 4]) for a in touched if not a.writes)
        for a in touched:
            if a.writes:
                history[a.place][a.start // 4 : a.stop // 4] = [hash((number, read))] * ((a.stop - a.start) // 4)
    return {name: tuple(values) for name, values in history.items()}


@given(st.lists(INSTRUCTIONS, max_size=12), st.randoms(use_true_random=False))
def test_every_order_that_is_allowed_gives_the_same_memory(body: list[Instruction], random: object) -> None:
    built = scheduled(program(body))
    instructions = built.phases["step"]
    done: list[int] = []
    while len(done) < len(instructions):
        ready = []
        for index, instruction in enumerate(instructions):
            mine = [n for n in range(index) if queue_of(instructions[n]) == queue_of(instruction)]
            if index not in done and set(mine) | set(instruction.after) <= set(done):
                ready.append(index)
        done.append(random.choice(ready))  # type: ignore[attr-defined]
    assert run(built, done) == run(built, range(len(instructions)))
    assert missing_waits(built, "step") == []


@given(st.lists(INSTRUCTIONS, min_size=2, max_size=12))
def test_a_wait_that_is_left_out_is_missed(body: list[Instruction]) -> None:
    built = scheduled(program(body))
    instructions = list(built.phases["step"])
    for index, instruction in enumerate(instructions):
        for left_out in instruction.after:
            after = tuple(n for n in instruction.after if n != left_out)
            changed = [*instructions[:index], dataclasses.replace(instruction, after=after), *instructions[index + 1 :]]
            spoilt = dataclasses.replace(built, phases={"step": tuple(changed)})
            assert (index, left_out) in missing_waits(spoilt, "step")


def test_one_queue_needs_no_waits() -> None:
    body = [Call("p", (Operand("device.a"),), (Operand("device.b"),))] * 3
    assert waits(program(body), body) == [(), (), ()]


def test_what_follows_from_another_wait_is_left_out() -> None:
    down, work = MOVES[2], Call("p", (Operand("host.a"),), (Operand("host.b"),), queue="host")
    body: list[Instruction] = [Call("p", (), (Operand("device.a"),)), down, work, MOVES[1]]
    assert waits(program(body), body) == [(), (0,), (1,), (2,)]


def test_arenas_are_memory_like_any_other() -> None:
    kind = TensorType("f32", (4,))
    buffers = {name: Buffer(name, kind, "activation", arena_offset=8 * n) for n, name in enumerate("abc")}
    buffers["host"] = Buffer("host", kind, "grad", space="host")
    body = (Call("p", (), (Operand("a"),)), Move("host", "b", "h2d"), Move("host", "c", "h2d"))
    assert waits(Program(buffers, {}), body) == [(), (0,), ()]
