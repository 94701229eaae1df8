"""Queues in threads: whatever overlaps, memory ends as if instructions had run one by one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from npubundle.program import Buffer, Call, Instruction, Move, Operand, Program, Repeat
from npubundle.schedule import scheduled
from npubundle.tensor import TensorType
from npurt.errors import DeviceError
from npurt.execution import Execution, Step
from npurt.timeline import Timeline

KIND = TensorType("f32", (4,))
LAYERS = 4


def call(part: str, args: Sequence[str], result: str, queue: str = "compute", layer: int | None = None) -> Call:
    return Call(part, tuple(map(Operand, args)), (Operand(result),), queue, layer=layer)  # type: ignore[arg-type]


def offloading() -> Program:
    """A backward pass whose gradients leave through two places, and an update whose weights go back."""
    names = {"loss": "device", "n": "host"}
    for n in range(LAYERS):
        names |= {f"w.{n}": "device", f"grad.{n}": "host", f"copy.{n}": "host", f"h.{n}": "device"}
    for slot in range(2):
        names |= {f"step.{slot}": "device", f"arrived.{slot}": "host"}
    buffers = {name: Buffer(name, KIND, "grad", space=space) for name, space in names.items()}  # type: ignore[arg-type]
    buffers["n"] = Buffer("n", TensorType("i32", ()), "scalar", space="host")
    micro: list[Instruction] = [call("forward", [f"w.{n}"], f"h.{n}", layer=n) for n in range(LAYERS)]
    micro.append(call("loss", [f"h.{n}" for n in range(LAYERS)], "loss"))
    for n in reversed(range(LAYERS)):
        micro.append(call("backward", [f"w.{n}", f"h.{n}", "loss"], f"step.{n % 2}", layer=n))
        micro.append(Move(f"step.{n % 2}", f"arrived.{n % 2}", "d2h", layer=n))
        micro.append(Repeat("n", 1, (call("add", [f"arrived.{n % 2}"], f"grad.{n}", "host"),), layer=n))
    update: list[Instruction] = []
    for n in range(LAYERS):
        update.append(call("adamw", [f"grad.{n}"], f"copy.{n}", "host", layer=n))
        update.append(Move(f"copy.{n}", f"w.{n}", "h2d", layer=n))
    return scheduled(Program(buffers, {"micro_step": tuple(micro), "update": tuple(update)}))


class Memory:
    """Buffers that remember how they were made; every instruction takes a while of its own."""

    def __init__(self, program: Program, pause: Callable[[Instruction], float]) -> None:
        self.values: dict[str, object] = dict.fromkeys(program.buffers, 0)
        self._pause = pause
        self.program = program

    def steps(self, phase: str) -> list[Step]:
        return [Step(i, lambda i=i: self._run(i)) for i in self.program.phases[phase]]  # type: ignore[misc]

    def _run(self, instruction: Instruction) -> None:
        if isinstance(instruction, Move):
            made, target = self.values[instruction.source], instruction.target
        else:
            body = instruction.body[0] if isinstance(instruction, Repeat) else instruction
            made, target = hash((body.part, *(self.values[a.buffer] for a in body.args))), body.results[0].buffer
        time.sleep(self._pause(instruction))
        self.values[target] = made


def two_steps(execution: Execution, memory: Memory) -> None:
    for phase in ("micro_step", "update", "micro_step", "micro_step", "update"):
        execution.run(phase, memory.steps(phase))


@pytest.mark.parametrize("seed", range(5))
def test_overlapped_is_one_by_one(seed: int) -> None:
    program, chance = offloading(), random.Random(seed)
    quick, slow = Memory(program, lambda _: 0.0), Memory(program, lambda _: chance.random() * 0.004)
    two_steps(Execution(program, concurrent=False), quick)
    overlapped = Execution(program, concurrent=True)
    two_steps(overlapped, slow)
    overlapped.finish()
    overlapped.close()
    assert slow.values == quick.values


def test_queues_overlap_and_so_do_update_and_next_forward_pass() -> None:
    program = offloading()
    memory, timeline = Memory(program, lambda _: 0.01), Timeline()
    execution = Execution(program, concurrent=True)
    execution.record(timeline)
    two_steps(execution, memory)
    execution.finish()
    execution.close()
    spans = timeline.spans

    def together(one: str, other: str) -> bool:
        ones, others = ([s for s in spans if s.label.startswith(name)] for name in (one, other))
        return any(a.start < b.end and b.start < a.end for a in ones for b in others)

    assert together("step.", "backward")
    assert together("adamw", "forward")
    assert together("copy.", "adamw")
    assert sum(timeline.busy().values()) > max(s.end for s in spans) - min(s.start for s in spans)


def test_reading_waits_for_what_writes_and_for_nothing_else() -> None:
    program, gate = offloading(), threading.Event()
    memory = Memory(program, lambda i: float(not gate.wait(5)) if isinstance(i, Repeat) else 0.0)
    execution = Execution(program, concurrent=True)
    execution.run("micro_step", memory.steps("micro_step"))
    execution.sync("loss", writes=False)
    assert memory.values["loss"] != 0
    execution.sync("copy.0", writes=True)  # the update has not begun, nobody reads it
    assert memory.values["grad.3"] == 0
    gate.set()
    execution.sync("grad.0", writes=False)
    assert memory.values["grad.0"] != 0
    execution.close()


def test_a_failure_is_raised_where_somebody_waits_and_ends_what_follows() -> None:
    program = offloading()
    memory = Memory(program, lambda _: 0.0)
    steps = memory.steps("micro_step")

    def fails() -> None:
        raise DeviceError("the card is gone")

    broken = [Step(s.instruction, fails) if s.label == "backward (2)" else s for s in steps]
    execution = Execution(program, concurrent=True)
    execution.run("micro_step", broken)
    with pytest.raises(DeviceError, match="the card is gone"):
        execution.finish()
    assert memory.values["grad.0"] == 0
    execution.run("micro_step", steps)
    execution.finish()
    assert memory.values["grad.0"] != 0
    execution.close()


def test_a_trace_has_a_row_for_each_queue(tmp_path: Path) -> None:
    import json

    timeline = Timeline()
    timeline.add("compute", "forward (0)", 10.0, 10.5)
    timeline.add("h2d", "copy.1", 10.25, 10.75)
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [("compute", "forward (0)", 0.0, 500000.0), ("h2d", "copy.1", 250000.0, 500000.0)]
