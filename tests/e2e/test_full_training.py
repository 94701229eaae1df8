"""Runs of full fine-tuning: the model that comes out, checkpoints, and what such a bundle refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft_reference import Reference

from npubundle.errors import FileError
from npurt import Bundle, Pack, TrainConfig, Trainer, UsageError
from npurt.arrays import Array
from npurt.checkpoint import load
from npurt.devices.cpu import CpuDevice
from npurt.engine import state_buffers
from npurt.weights import Checkpoint
from tests.e2e.bundles import Built, Workshop, run
from tests.e2e.comparison import SEQ_LEN, opened
from tests.e2e.test_architectures import SEQ_LEN as SMALL_SEQ_LEN
from tests.e2e.test_architectures import VARIANTS, random_pack, write_model
from tests.npucc.rngd_stand_in import interpreter

CONFIG = TrainConfig(lr=3e-3, schedule="constant", warmup=0, weight_decay=0.1)
ENDS = ("--train-norm", "--train-embeddings", "--train-head")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, bf16, in several files."""
    return write_model(tmp_path_factory.mktemp("small") / "model", VARIANTS["llama3-untied-all-targets"])


@pytest.fixture(scope="module")
def bundle(workshop: Workshop, small: Path) -> Built:
    return workshop.build(small, "--mode", "full", "--seq-len", str(SMALL_SEQ_LEN), *ENDS)


def packs(number: int) -> list[Pack]:
    return [random_pack(1009, 10 * number + seed) for seed in (1, 2)]


def test_the_model_that_comes_out_is_the_one_that_transformers_trains(
    bundle: Built, small: Path, tmp_path: Path
) -> None:
    reference = Reference.full(small, ends=("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"))
    with opened(bundle, small, CONFIG) as (trainer, _):
        for number in range(3):
            report = trainer.train_step(packs(number))
            loss, norm = reference.step(packs(number), lr=CONFIG.lr, weight_decay=CONFIG.weight_decay)
            assert report.loss == pytest.approx(loss, rel=1e-5)
            assert report.grad_norm == pytest.approx(norm, rel=1e-4)
        saved = trainer.save_model(tmp_path / "model", dtype="float32")
        kept = trainer.save_model(tmp_path / "kept")
        scores = trainer.logprobs(packs(7)[0])
    assert saved.replaced == saved.tensors == 2 * 9 + 3
    expected = reference.parameters()
    loaded = Reference.full(tmp_path / "model", ends=tuple(expected))
    for name, values in loaded.parameters().items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=2e-4, err_msg=name)
    np.testing.assert_allclose(loaded.logprobs(packs(7)[0]), scores, rtol=0, atol=1e-4)
    with pytest.raises(AssertionError):  # it has learned something
        np.testing.assert_allclose(Reference.full(small).logprobs(packs(7)[0]), scores, rtol=0, atol=1e-2)
    # Without being asked for another, every tensor has the dtype and the file that it had.
    before, after = Checkpoint.open(small), Checkpoint.open(kept.folder)
    assert {n: (t.dtype, t.path.name) for n, t in after.tensors.items()} == {
        n: (t.dtype, t.path.name) for n, t in before.tensors.items()
    }


def test_a_run_continues_from_its_checkpoint_bit_for_bit(bundle: Built, small: Path, tmp_path: Path) -> None:
    with opened(bundle, small, CONFIG) as (trainer, session):
        trainer.train_step(packs(0))
        saved = trainer.save_checkpoint(tmp_path)
        reports = [trainer.train_step(packs(number)) for number in (1, 2)]
        expected = {name: session.read(name) for name in state_buffers(session.program)}
    with opened(bundle, small, CONFIG) as (trainer, session):
        trainer.restore(saved)
        again = [trainer.train_step(packs(number)) for number in (1, 2)]
        assert [(r.step, r.loss, r.grad_norm) for r in again] == [(r.step, r.loss, r.grad_norm) for r in reports]
        for name, values in expected.items():
            np.testing.assert_array_equal(session.read(name), values, err_msg=name)
    assert sorted(path.name for path in saved.iterdir()) == ["state.json", "state.safetensors"]
    assert set(load(saved).arrays) == set(expected)


def test_nothing_changes_in_a_step_that_diverges(bundle: Built, small: Path) -> None:
    with opened(bundle, small, CONFIG) as (trainer, session):
        trainer.train_step(packs(0))
        before = {name: session.read(name) for name in state_buffers(session.program)}
        poisoned = before["params.layers.1"].copy()
        poisoned.flat[5] = np.inf
        session.write("params.layers.1", poisoned)
        with pytest.raises(Exception, match="diverged in step 2"):
            trainer.train_step(packs(1))
        session.write("params.layers.1", before["params.layers.1"])
        for name, values in before.items():
            np.testing.assert_array_equal(session.read(name), values, err_msg=name)
        trainer.train_step(packs(1))


def test_adapters_are_another_bundles_business(bundle: Built, small: Path, tmp_path: Path) -> None:
    with opened(bundle, small, CONFIG) as (trainer, _):
        with pytest.raises(UsageError, match="trains the weights themselves"):
            trainer.save_adapter(tmp_path / "adapter")
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "file").touch()
        with pytest.raises(FileError, match="is not empty"):
            trainer.save_model(tmp_path / "taken")
    assert not (tmp_path / "adapter").exists()


def test_npurt_train_leaves_a_model_that_transformers_loads(
    workshop: Workshop, smollm2_dir: Path, rows: Path, tmp_path: Path
) -> None:
    built = workshop.build(smollm2_dir, "--mode", "full", "--seq-len", str(SEQ_LEN))
    words = ["train", "--bundle", str(built.path), "--trust", str(built.trust), "--weights", str(smollm2_dir)]
    words += ["--data", str(rows), "--steps", "3", "--lr", "1e-4", "--out", str(tmp_path / "out")]
    told = json.loads(run("npurt", *words, "--save-every", "2", "--json").splitlines()[-1])
    assert told["model"] == str(tmp_path / "out" / "model")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["checkpoint-2", "checkpoint-3", "model"]
    reference = Reference.full(tmp_path / "out" / "model")
    base = Reference.full(smollm2_dir)
    moved = reference.parameters()
    same = [name for name, values in base.parameters().items() if np.array_equal(values, moved[name])]
    assert not [name for name in same if not name.endswith("norm.weight")], "every matrix has moved"
    assert reference.model.dtype == torch.float32
    # The next run into the same folder has to be allowed to replace it, before it takes any time.
    with pytest.raises(AssertionError, match=r"results of an earlier run: checkpoint-2, checkpoint-3, model"):
        run("npurt", *words)


@pytest.fixture(scope="module")
def device_bundle(workshop: Workshop, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """For RNGD, its programs by a stand-in; the CPU runs the ONNX forms of the parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPUCC_RNGD_PYTHON", str(interpreter(tmp_path_factory.mktemp("sdk"))))
        flags = ("--mode", "full", "--seq-len", str(SMALL_SEQ_LEN), "--target", "rngd", "--no-tuning")
        return workshop.build(small, *flags)


def trained_on_the_cpu(bundle: Built, weights: Path, *, steps: int) -> tuple[list[float], dict[str, Array]]:
    with (
        Bundle.open(bundle.path, trust=bundle.trust) as opened_bundle,
        Trainer(opened_bundle, weights, CONFIG, device="cpu") as trainer,
    ):
        losses = [trainer.train_step(packs(number % 2)).loss for number in range(steps)]
        return losses, {name: trainer._engine.read(name) for name in state_buffers(trainer._engine.program)}


def test_overlapped_queues_give_what_one_by_one_gives_bit_for_bit(
    device_bundle: Built, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, state = trained_on_the_cpu(device_bundle, small, steps=4)
    monkeypatch.setattr(CpuDevice, "concurrent", False)
    expected_losses, expected = trained_on_the_cpu(device_bundle, small, steps=4)
    assert losses == expected_losses
    for name, values in expected.items():
        np.testing.assert_array_equal(state[name], values, err_msg=name)


def test_offloaded_training_follows_the_cpu_target(workshop: Workshop, device_bundle: Built, small: Path) -> None:
    plain = workshop.build(small, "--mode", "full", "--seq-len", str(SMALL_SEQ_LEN))
    expected, _ = trained_on_the_cpu(plain, small, steps=8)
    losses, _ = trained_on_the_cpu(device_bundle, small, steps=8)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert losses[-1] < 0.9 * losses[0], "nothing was learned, equal curves prove little"
