from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npurt.schedule import Schedule, ScheduleKind

KINDS = st.sampled_from(["constant", "linear", "cosine"])


def test_closed_form_of_the_cosine() -> None:
    schedule = Schedule("cosine", 1.0, warmup=3, total=11, floor=0.1)
    rates = [schedule.rate(step) for step in range(1, 12)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.5)) / 2)
    assert rates[10] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 7 / 8)) / 2)
    assert schedule.rate(12) == pytest.approx(0.1)
    assert schedule.rate(1000) == pytest.approx(0.1)


def test_closed_form_of_the_line() -> None:
    schedule = Schedule("linear", 2.0, warmup=0, total=4, floor=0.5)
    assert [schedule.rate(step) for step in range(1, 6)] == [2.0, 1.75, 1.5, 1.25, 1.0]


def test_constant_after_warmup() -> None:
    schedule = Schedule("constant", 3.0, warmup=2, total=5, floor=0.0)
    assert [schedule.rate(step) for step in range(1, 7)] == [1.0, 2.0, 3.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_equals_the_schedulers_of_torch(kind: ScheduleKind, warmup: int, floor: float) -> None:
    torch = pytest.importorskip("torch")
    torch_schedules = pytest.importorskip("torch.optim.lr_scheduler")
    peak, total = 2e-4, 40
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    rest = total - warmup
    after = {
        "constant": lambda: torch_schedules.ConstantLR(optimizer, 1.0),
        "linear": lambda: torch_schedules.LinearLR(optimizer, 1.0, floor, rest),
        "cosine": lambda: torch_schedules.CosineAnnealingLR(optimizer, rest, floor * peak),
    }
    schedulers = [after[kind]()]
    if warmup:
        schedulers.insert(0, torch_schedules.LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own deprecated form of step() when schedulers are chained
        scheduler = torch_schedules.SequentialLR(optimizer, schedulers, [warmup] if warmup else [])
        theirs = []
        for _ in range(total):
            theirs.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    ours = [Schedule(kind, peak, warmup, total, floor).rate(step) for step in range(1, total + 1)]
    assert ours == pytest.approx(theirs, rel=1e-9)


@given(KINDS, st.integers(0, 50), st.integers(1, 200), st.floats(0, 1), st.integers(1, 400))
def test_rates_are_positive_until_the_end_and_never_above_the_peak(
    kind: ScheduleKind, warmup: int, total: int, floor: float, step: int
) -> None:
    rate = Schedule(kind, 1.0, min(warmup, total), total, floor).rate(step)
    assert 0 <= rate <= 1
    assert rate > 0 or step > total
