"""Estimates are plain sums, and absent rather than partial."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import pytest

from npubundle import canonical
from npubundle.errors import FormatError
from npubundle.estimate import LABEL, PhaseEstimate, device_memory, estimate, step_launches
from npubundle.part import Estimate, Part
from npubundle.program import Program
from tests.npubundle.programs import apart, small

OPTIONS = {"fusion": "8", "clock_mhz": "1000"}


def estimated(parts: Mapping[str, Part], power: float | None = 50.0) -> dict[str, Part]:
    """The parts with a cost: a million cycles for the first, two for the second, and so on."""
    return {
        name: dataclasses.replace(part, estimate=Estimate(number * 1_000_000, power))
        for number, (name, part) in enumerate(sorted(parts.items()), 1)
    }


def test_a_step_is_the_sum_of_its_launches() -> None:
    program, parts = small()  # block 1, embed 2, layer 3, update 4 million cycles; the block up to five times
    found = estimate(program, estimated(parts), OPTIONS, tokens=30)
    assert found is not None
    assert found.phases == {"micro_step": PhaseEstimate(10_000_000, 7), "update": PhaseEstimate(4_000_000, 1)}
    assert found.seconds == pytest.approx(14e-3)
    assert found.tokens_per_s == pytest.approx(30 / 14e-3)
    assert found.energy == pytest.approx(14e-3 * 50)


def test_launches_of_a_step_are_counted_by_part() -> None:
    program, parts = small()
    block, embed, layer, update = sorted(parts)
    more = dataclasses.replace(program, phases=dict(program.phases) | {"evaluate": program.phases["update"]})
    for each in (program, more):
        assert step_launches(each) == {block: 5, embed: 1, layer: 1, update: 1}


def test_other_phases_are_no_part_of_a_step() -> None:
    program, parts = small()
    more = dataclasses.replace(program, phases=dict(program.phases) | {"evaluate": program.phases["update"]})
    found, alone = (estimate(p, estimated(parts), OPTIONS, tokens=1) for p in (more, program))
    assert found is not None
    assert alone is not None
    assert found.phases["evaluate"] == PhaseEstimate(4_000_000, 1)
    assert found.seconds == alone.seconds


def test_the_host_is_not_counted() -> None:
    program, parts = apart()
    costs = estimated({name: part for name, part in parts.items() if name != "add"})
    renamed = dataclasses.replace(program, phases={"micro_step": program.phases["step"]})
    found = estimate(renamed, dict(parts) | costs, OPTIONS, tokens=1)
    assert found is not None
    assert found.phases == {"micro_step": PhaseEstimate(3_000_000 + 2 * 2_000_000 + 3 * 1_000_000, 6)}
    assert found.memory == 32 + 48 + program.arena["step"]


def test_memory_is_what_lies_on_the_device() -> None:
    program, _ = small()
    kept = sum(b.type.nbytes for b in program.buffers.values() if b.view_of is None and b.role != "activation")
    assert device_memory(program) == kept + max(program.arena.values())


def test_no_power_no_energy() -> None:
    program, parts = small()
    found = estimate(program, estimated(parts, power=None), OPTIONS, tokens=1)
    assert found is not None
    assert found.energy is None


def test_a_part_of_unknown_power_counts_as_the_hungriest() -> None:
    program, parts = small()
    costs = estimated(parts)
    layer = dataclasses.replace(costs["layer"], estimate=Estimate(3_000_000, None))
    found = estimate(program, costs | {"layer": layer}, OPTIONS, tokens=1)
    assert found is not None
    assert found.energy == pytest.approx(14e-3 * 50)


def test_it_is_json_with_its_label() -> None:
    program, parts = small()
    found = estimate(program, estimated(parts), OPTIONS, tokens=30)
    assert found is not None
    document = json.loads(canonical.encode(found.to_dict()))
    assert document["label"] == LABEL
    assert document["phases"]["update"] == {"cycles": 4_000_000, "launches": 1}
    assert document["clock_mhz"] == 1000


@pytest.mark.parametrize("missing", ["block", "update"])
def test_a_gap_makes_no_estimate(missing: str) -> None:
    program, parts = small()
    known = estimated(parts)
    assert estimate(program, known | {missing: parts[missing]}, OPTIONS, tokens=1) is None


def test_no_estimate_without_a_clock_or_a_launch() -> None:
    program, parts = small()
    assert estimate(program, estimated(parts), {}, tokens=1) is None
    assert estimate(Program({}, {"micro_step": ()}), {}, OPTIONS, tokens=1) is None


@pytest.mark.parametrize("clock", ["fast", "0", "-1", "inf", "nan", ""])
def test_a_clock_is_a_positive_number(clock: str) -> None:
    program, parts = small()
    with pytest.raises(FormatError, match="clock_mhz"):
        estimate(program, estimated(parts), {"clock_mhz": clock}, tokens=1)
