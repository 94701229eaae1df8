"""What tests of the training loop share: the simulator with a model folder and data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from npurt import TrainConfig, Trainer
from tests.npurt.simulated_model import write_model_folder, write_rows
from tests.npurt.simulator import Simulator


@pytest.fixture(scope="session")
def simulated_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("simulated") / "model")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "train.jsonl")


@pytest.fixture
def simulator() -> Simulator:
    return Simulator()


@pytest.fixture
def trainer(simulator: Simulator, simulated_model: Path) -> Iterator[Trainer]:
    with Trainer.on(simulator, simulated_model, TrainConfig(steps=6, lr=0.05, accum=2)) as trainer:
        yield trainer
