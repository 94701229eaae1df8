"""What a step will cost on the device, from the vendor's cost model: a sum over the program, before anything has run.

It tells two builds of the same model apart. It is no measurement: what the host does between two launches, and what the
launches themselves take, no cost model of a single graph knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from npubundle.errors import FormatError
from npubundle.part import Part
from npubundle.program import Call, Program, Repeat

#: Goes wherever the numbers go.
LABEL = "estimate of the vendor's cost model; host and launch overhead are not included"
#: The target's option that says how fast cycles pass.
CLOCK = "clock_mhz"
#: An optimizer step of one micro-batch.
_STEP = ("micro_step", "update")


@dataclass(frozen=True, slots=True)
class PhaseEstimate:
    """A phase with every repeat run to its limit: the device's cycles, and how often a part is started there."""

    cycles: int
    launches: int


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Cycles by phase; and of one optimizer step, which is `micro_step` and `update`, its time, rate and energy.

    `energy` takes every part to draw its peak power all the time, and one of which the model says nothing the highest
    of all, so that it is an upper bound; None if the model says nothing of any. `memory` is what the program takes in
    the device's memory.
    """

    clock_mhz: float
    phases: Mapping[str, PhaseEstimate]
    seconds: float
    tokens_per_s: float
    energy: float | None
    memory: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON, with the label that belongs to it."""
        return {
            "label": LABEL,
            "clock_mhz": self.clock_mhz,
            "phases": {name: {"cycles": p.cycles, "launches": p.launches} for name, p in self.phases.items()},
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "energy_upper_bound_j": self.energy,
            "device_memory": self.memory,
        }


def estimate(
    program: Program, parts: Mapping[str, Part], target_options: Mapping[str, str], tokens: int
) -> StepEstimate | None:
    """The estimate of a program whose micro-step takes `tokens` tokens.

    None without a clock, without a part that runs on the device, or where one of them has no estimate: a sum with gaps
    would look like a fast program. Raises `FormatError` if the clock is no positive number.
    """
    launched = {phase: list(_launches(program, phase)) for phase in program.phases}
    names = {part for launches in launched.values() for part, _ in launches}
    known = {name: e for name in names if name in parts and (e := parts[name].estimate) is not None}
    if CLOCK not in target_options or not names or known.keys() != names:
        return None
    clock = _clock(target_options[CLOCK])
    phases = {
        phase: PhaseEstimate(sum(known[p].cycles * n for p, n in launches), sum(n for _, n in launches))
        for phase, launches in launched.items()
    }
    seconds = sum(phases[phase].cycles for phase in _STEP if phase in phases) / (clock * 1e6)
    highest = max((e.peak_power for e in known.values() if e.peak_power is not None), default=None)
    energy = None
    if highest is not None:
        started = [launch for phase in _STEP for launch in launched.get(phase, ())]
        drawn = ((known[part].peak_power or highest) * known[part].cycles * count for part, count in started)
        energy = sum(drawn) / (clock * 1e6)
    rate = tokens / seconds if seconds else 0.0
    return StepEstimate(clock, phases, seconds, rate, energy, device_memory(program))


def step_launches(program: Program) -> dict[str, int]:
    """Parts that an optimizer step of one micro-batch starts on the device, and how often."""
    found: dict[str, int] = {}
    for phase in _STEP:
        for part, times in _launches(program, phase) if phase in program.phases else ():
            found[part] = found.get(part, 0) + times
    return found


def device_memory(program: Program) -> int:
    """Bytes in the device's space: weights, state, inputs and outputs, and the largest arena."""
    lasting = (b for b in program.buffers.values() if b.view_of is None and b.role != "activation")
    return sum(b.type.nbytes for b in lasting if b.space == "device") + max(program.arena.values(), default=0)


def _launches(program: Program, phase: str) -> Iterator[tuple[str, int]]:
    """Parts that a phase starts on the device, and how often each time."""
    for instruction in program.phases[phase]:
        calls, times = (instruction.body, instruction.limit) if isinstance(instruction, Repeat) else ((instruction,), 1)
        yield from ((call.part, times) for call in calls if isinstance(call, Call) and call.queue == "compute")


def _clock(text: str) -> float:
    try:
        clock = float(text)
    except ValueError:
        clock = 0.0
    if not 0.0 < clock < float("inf"):
        raise FormatError(
            f"the target's option {CLOCK} is {text!r}, not a number of megahertz", remedy="rebuild the bundle"
        )
    return clock
