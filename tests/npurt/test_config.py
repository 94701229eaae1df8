from __future__ import annotations

import dataclasses

import pytest

from npubundle.errors import ExitCode
from npurt import TrainConfig, UsageError


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        TrainConfig(
            lr=0.0,
            steps=0,
            accum=True,
            warmup=float("nan"),
            schedule="cosin",  # type: ignore[arg-type]
            beta2=1.0,
            pack=1,  # type: ignore[arg-type]
            seed=-1,
        )
    named = [problem.where for problem in caught.value.problems]
    assert sorted(named) == ["accum", "beta2", "lr", "pack", "schedule", "seed", "steps", "warmup"]
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"steps": 3, "epochs": 1.0}, "epochs"),
        ({"steps": 3, "warmup": 4}, "warmup"),
        ({"warmup": 1.5}, "warmup"),
        ({"lr": "2e-4"}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"threads": 0}, "threads"),
        ({"keep_checkpoints": 0}, "keep_checkpoints"),
        ({"overlong": "trim"}, "overlong"),
    ],
)
def test_refused(values: dict[str, object], fault: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainConfig(**values)  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == [fault]


def test_length_of_a_run() -> None:
    assert TrainConfig(steps=7).total_steps(1000) == 7
    assert TrainConfig(accum=4).total_steps(10) == 3
    assert TrainConfig(epochs=2.5, accum=2).total_steps(10) == 13
    assert TrainConfig(epochs=0.01).total_steps(5) == 1


def test_warmup_in_steps_and_as_a_share() -> None:
    assert TrainConfig(warmup=10).learning_rates(100).warmup == 10
    assert TrainConfig(warmup=0.1).learning_rates(100).warmup == 10
    assert TrainConfig(warmup=0.03).learning_rates(2).warmup == 0
    assert TrainConfig(warmup=500).learning_rates(100).warmup == 100


def test_survives_a_dictionary() -> None:
    config = TrainConfig(lr=1e-3, steps=5, schedule="linear", pack=False, threads=3)
    assert TrainConfig(**config.to_dict()) == config


def test_cannot_be_changed_unseen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().lr = 1.0  # type: ignore[misc]


def test_data_options_are_those_of_the_configuration() -> None:
    options = TrainConfig(template="plain", loss_on="all", overlong="drop", pack=False, shuffle=False, seed=9)
    found = options.data_options()
    assert (found.template, found.loss_on, found.overlong, found.pack, found.shuffle, found.seed) == (
        *("plain", "all", "drop"),
        *(False, False, 9),
    )
