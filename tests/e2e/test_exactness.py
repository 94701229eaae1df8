"""SmolLM2-135M trained by npurt and by transformers with PEFT: equal losses, gradients, curves and adapters.

The bounds are those that the documentation promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft_reference import Lora, Reference

from npurt import Bundle, DataOptions, Pack, TrainConfig, Trainer
from npurt.data import IGNORED, load
from npurt.session import Session
from tests.e2e.bundles import Built, Workshop
from tests.e2e.comparison import SEQ_LEN, gradients, opened, random_parameters, require_close

COSINE, NORM = 0.99999, 1e-4
Open = tuple[Trainer, Session]


@pytest.fixture(scope="module")
def ours(smollm2_bundle: Built, smollm2_dir: Path) -> Iterator[Open]:
    with opened(smollm2_bundle, smollm2_dir) as (trainer, session):
        yield trainer, session


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Iterator[Reference]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its threads wait for each other badly on a machine that has other work
    yield Reference.create(smollm2_dir, Lora(rank=16, alpha=32.0, targets=("q", "v")))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def same_adapter(ours: Open, reference: Reference) -> dict[str, np.ndarray]:
    """Random A and B in both programs."""
    values = random_parameters(ours[0], seed=1)
    ours[0].set_parameters(values)
    reference.set_parameters(values)
    return values


@pytest.fixture(scope="module")
def policies(workshop: Workshop, smollm2_dir: Path, smollm2_flags: tuple[str, ...]) -> dict[str, Built]:
    """A bundle for each activation policy; `auto` has memory for half of what the other two need."""
    built = {
        policy: workshop.build(smollm2_dir, *smollm2_flags, "--activations", policy) for policy in ("save", "recompute")
    }
    peaks = []
    for bundle in built.values():
        with Bundle.open(bundle.path, trust=bundle.trust) as opened_bundle:
            peaks.append(opened_bundle.config.memory.peak)
    budget = str(sum(peaks) // 2)
    return built | {
        "auto": workshop.build(smollm2_dir, *smollm2_flags, "--activations", "auto", "--memory-budget", budget)
    }


def test_loss_and_gradients_of_a_packed_sequence(
    ours: Open, reference: Reference, same_adapter: object, packs: list[Pack]
) -> None:
    loss, found = gradients(*ours, packs[:1])
    expected_loss, expected = reference.gradients(packs[:1])
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    require_close(found, expected, cosine=COSINE, norm=NORM)


def test_one_document_under_the_mask_of_transformers_itself(
    ours: Open, reference: Reference, same_adapter: object, smollm2_dir: Path
) -> None:
    tokens = np.random.default_rng(2).integers(3, 40000, SEQ_LEN).astype(np.int32)
    labels = np.append(tokens[1:], IGNORED).astype(np.int32)
    pack = Pack(tokens, np.arange(SEQ_LEN, dtype=np.int32), np.ones(SEQ_LEN, np.int32), labels)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        expected = float(reference.model(input_ids=ids, labels=ids).loss)  # no mask, no positions, its own loss
    assert gradients(*ours, [pack])[0] / (SEQ_LEN - 1) == pytest.approx(expected, rel=1e-5)


def test_accumulated_equals_one_large_batch(
    ours: Open, reference: Reference, same_adapter: object, packs: list[Pack]
) -> None:
    loss, found = gradients(*ours, packs[:3])
    expected_loss, expected = reference.gradients(packs[:3], one_batch=True)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    require_close(found, expected, cosine=COSINE, norm=NORM)


def test_packed_equals_unpacked(
    ours: Open, same_adapter: object, packs: list[Pack], rows: Path, smollm2_dir: Path
) -> None:
    documents = int(packs[0].segments.max())
    alone = list(load(rows, smollm2_dir, SEQ_LEN, DataOptions(shuffle=False, pack=False)))[:documents]
    assert sum(pack.supervised for pack in alone) == packs[0].supervised
    loss, found = gradients(*ours, packs[:1])
    expected_loss, expected = gradients(*ours, alone)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    require_close(found, expected, cosine=COSINE, norm=NORM)


def test_activation_policies_give_equal_gradients(
    ours: Open, same_adapter: dict[str, np.ndarray], packs: list[Pack], policies: dict[str, Built], smollm2_dir: Path
) -> None:
    loss, found = gradients(*ours, packs[:2])
    saved = {}
    for policy, built in policies.items():
        with opened(built, smollm2_dir) as (trainer, session):
            saved[policy] = session.config.memory.saved_layers
            trainer.set_parameters(same_adapter)
            other_loss, other = gradients(trainer, session, packs[:2])
        assert other_loss == loss, policy
        for name, values in found.items():
            np.testing.assert_array_equal(other[name], values, err_msg=f"{policy}: {name}")
    assert saved["recompute"] == 0 < saved["auto"] < saved["save"] == 30


def test_prepacked_weights_give_the_same_gradients(
    ours: Open,
    same_adapter: dict[str, np.ndarray],
    packs: list[Pack],
    smollm2_bundle: Built,
    smollm2_dir: Path,
) -> None:
    loss, found = gradients(*ours, packs[:2])
    with opened(smollm2_bundle, smollm2_dir, prepack="on") as (trainer, session):
        assert session.prepacked
        trainer.set_parameters(same_adapter)
        other_loss, other = gradients(trainer, session, packs[:2])
    assert other_loss == pytest.approx(loss, rel=1e-6)
    require_close(other, found, cosine=COSINE, norm=NORM)


def test_curve_of_fifty_steps(smollm2_bundle: Built, smollm2_dir: Path, reference: Reference, rows: Path) -> None:
    config = TrainConfig(steps=50, lr=2e-3, weight_decay=0.01, warmup=5, seed=3)
    with opened(smollm2_bundle, smollm2_dir, config) as (trainer, _):
        reference.set_parameters(trainer.parameters())
        batches = load(rows, smollm2_dir, SEQ_LEN, config.data_options())
        curve = []
        for report in trainer.fit(rows):
            loss, norm = reference.step(
                [batches.next_pack()], lr=report.lr, max_norm=config.max_norm, weight_decay=config.weight_decay
            )
            assert report.loss == pytest.approx(loss, abs=1e-3), f"step {report.step}"
            assert report.grad_norm == pytest.approx(norm, rel=1e-2), f"step {report.step}"
            curve.append(report.loss)
        require_close(trainer.parameters(), reference.parameters(), cosine=0.9999, norm=1e-3)
    assert np.mean(curve[-10:]) < np.mean(curve[:10]) - 0.3, "nothing was learned, equal curves prove little"


def test_exported_adapter_gives_peft_the_same_log_probabilities(
    ours: Open, same_adapter: object, packs: list[Pack], smollm2_dir: Path, tmp_path: Path
) -> None:
    trainer, _ = ours
    loaded = Reference.load(smollm2_dir, trainer.save_adapter(tmp_path / "adapter"))
    for pack in packs[:2]:
        found, expected = trainer.logprobs(pack), loaded.logprobs(pack)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
        with loaded.model.disable_adapter():  # an adapter that loads under wrong names changes nothing
            assert np.nanmax(np.abs(loaded.logprobs(pack) - expected)) > 0.1
    scores = np.concatenate([loaded.logprobs(pack) for pack in packs[:2]])
    assert _evaluated(trainer, packs[:2]) == pytest.approx(-float(np.nanmean(scores)), rel=1e-5)


def _evaluated(trainer: Trainer, packs: list[Pack]) -> float:
    """Mean loss of these packs by the path of `Trainer.evaluate`."""
    from npurt.evaluation import evaluate
    from npurt.stop import Stop

    return evaluate(trainer._engine, packs, trainer.layout, Stop()).loss
