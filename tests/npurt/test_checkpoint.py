from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from npubundle import atomic, canonical
from npubundle.errors import FileError, IntegrityError, ResourceError
from npurt import MismatchError, TrainConfig, Trainer, checkpoint
from npurt.export.peft import CONFIG_FILE, WEIGHTS_FILE
from tests.npurt.simulator import Simulator, random_pack


@pytest.fixture
def saved(trainer: Trainer, rows: Path, tmp_path: Path) -> Path:
    fit = trainer.fit(rows)
    next(fit)
    next(fit)
    return trainer.save_checkpoint(tmp_path / "out")


def test_holds_everything(saved: Path, trainer: Trainer, simulator: Simulator) -> None:
    files = sorted(path.name for path in saved.iterdir())
    assert files == [CONFIG_FILE, WEIGHTS_FILE, "state.json", "state.safetensors"]
    found = checkpoint.load(saved)
    assert found.arrays.keys() == {"lora", "moment1", "moment2"}
    for name, values in found.arrays.items():
        assert values.tobytes() == simulator.read(name).tobytes()
    state = found.state
    assert (state.step, state.total_steps) == (2, 6)
    assert state.config == trainer.config
    assert state.manifest_digest == simulator.manifest_digest
    assert state.data is not None
    assert (state.data["epoch"], state.data["index"]) == (0, 4)
    assert (state.tokens, state.supervised_tokens) == (trainer.tokens, trainer.supervised_tokens)


def test_every_value_of_the_configuration_survives(tmp_path: Path, simulated_model: Path) -> None:
    config = TrainConfig(lr=1.0, epochs=2.0, warmup=5, beta1=0.0, threads=2, schedule="constant", eps=1e-12)
    with Trainer.on(Simulator(), simulated_model, config) as trainer:
        trainer.train_step([random_pack(1)], lr=0.1)
        found = checkpoint.load(trainer.save_checkpoint(tmp_path))
    assert found.state.config == config
    assert found.state.data is None


@pytest.mark.parametrize("name", ["state.safetensors", WEIGHTS_FILE, CONFIG_FILE])
def test_altered_file_is_noticed(saved: Path, name: str) -> None:
    raw = bytearray((saved / name).read_bytes())
    raw[-5] ^= 1
    (saved / name).write_bytes(raw)
    with pytest.raises(IntegrityError, match="not as it was saved"):
        checkpoint.load(saved)


@pytest.mark.parametrize("name", ["state.safetensors", WEIGHTS_FILE, "state.json"])
def test_missing_file(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(MismatchError, match="not all of one"):
        checkpoint.load(saved)


def test_state_of_another_version(saved: Path) -> None:
    path = saved / "state.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version":1', b'"format_version":2'))
    with pytest.raises(MismatchError, match="format_version 2"):
        checkpoint.load(saved)


def test_state_that_is_not_valid(saved: Path) -> None:
    path = saved / "state.json"
    document = json.loads(path.read_text())
    document["run"]["config"]["lr"] = -1
    document["run"]["step"] = -3
    path.write_bytes(canonical.encode(document))
    with pytest.raises(IntegrityError) as caught:
        checkpoint.load(saved)
    assert {problem.where for problem in caught.value.problems} == {"run.config.lr", "run.step"}


def test_step_that_another_run_saved(trainer: Trainer, saved: Path, simulated_model: Path) -> None:
    with Trainer.on(Simulator(), simulated_model, TrainConfig(steps=9, warmup=0)) as other:
        for step in range(2):
            other.train_step([random_pack(step)])
        with pytest.raises(FileError, match="a checkpoint of this step exists"):
            other.save_checkpoint(saved.parent)
    assert checkpoint.load(saved).state.step == 2


def test_full_disk_keeps_the_older_checkpoint(
    trainer: Trainer, saved: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, calls = atomic.write_synced, 0

    def full(path: Path, data: bytes) -> None:
        nonlocal calls
        calls += 1
        real(path, data if calls < 3 else data[:7])
        if calls >= 3:
            raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_synced", full)
    trainer.train_step([random_pack(1)])
    with pytest.raises(ResourceError, match="No space left"):
        trainer.save_checkpoint(saved.parent)
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint-2"]
    checkpoint.load(saved)


def test_training_goes_on_when_a_checkpoint_does_not_fit(
    simulated_model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_synced", full)
    with Trainer.on(Simulator(), simulated_model, TrainConfig(steps=4, save_every=2)) as trainer:
        assert len(list(trainer.fit(rows, save_to=tmp_path / "out"))) == 4
    assert "step 2 is not saved: cannot save the checkpoint" in caplog.text
    assert not checkpoint.existing(tmp_path / "out")


def test_oldest_goes_only_when_the_newest_is_complete(trainer: Trainer, tmp_path: Path) -> None:
    for step in range(4):
        trainer.train_step([random_pack(step)])
        trainer.save_checkpoint(tmp_path)
    assert [path.name for path in checkpoint.existing(tmp_path)] == ["checkpoint-3", "checkpoint-4"]
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-4"
    assert checkpoint.latest(tmp_path / "none") is None


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from npurt import checkpoint, TrainConfig, Trainer
from tests.npurt.simulator import Simulator, random_pack

folder, model, moment = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
trainer = Trainer.on(Simulator(), model, TrainConfig(steps=9, keep_checkpoints=1))
trainer.train_step([random_pack(1)])
trainer.save_checkpoint(folder)
calls = 0

def watched(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "open"), (os, "unlink"), (os, "rmdir")):
    setattr(owner, name, watched(getattr(owner, name)))
trainer.train_step([random_pack(2)])
trainer.save_checkpoint(folder)
"""


def test_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path, simulated_model: Path) -> None:
    steps = []
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        command = [sys.executable, "-c", KILLED, str(folder), str(simulated_model), str(moment)]
        done = subprocess.run(command, check=False, timeout=60, cwd=Path(__file__).parents[2])
        assert done.returncode in {0, -signal.SIGKILL}
        newest = checkpoint.latest(folder)
        assert newest is not None
        loaded = checkpoint.load(newest)
        assert np.isfinite(loaded.arrays["lora"]).all()
        steps.append(loaded.state.step)
        if done.returncode == 0:
            break
        shutil.rmtree(folder)
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
