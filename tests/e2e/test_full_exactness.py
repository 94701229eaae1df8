"""Full fine-tuning of SmolLM2-135M by npurt and by transformers: equal losses, gradients and curves.

The bounds are those that the documentation promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft_reference import Reference

from npurt import Pack, TrainConfig
from npurt.data import load
from tests.e2e.bundles import Built, Workshop
from tests.e2e.comparison import SEQ_LEN, gradients, opened, require_close

COSINE, NORM = 0.99999, 1e-4
FLAGS = ("--mode", "full", "--seq-len", str(SEQ_LEN))
ENDS = ("model.norm.weight", "model.embed_tokens.weight")


@pytest.fixture(scope="module")
def bundle(workshop: Workshop, smollm2_dir: Path) -> Built:
    return workshop.build(smollm2_dir, *FLAGS)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its threads wait for each other badly on a machine that has other work
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_loss_and_gradients_of_every_weight(bundle: Built, smollm2_dir: Path, packs: list[Pack]) -> None:
    reference = Reference.full(smollm2_dir)
    with opened(bundle, smollm2_dir) as (trainer, session):
        for batch in (packs[:1], packs[:3], packs[:1]):
            loss, found = gradients(trainer, session, batch)
            expected_loss, expected = reference.gradients(batch, one_batch=True)
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            require_close(found, expected, cosine=COSINE, norm=NORM)
    assert len(found) == 30 * 9


@pytest.mark.usefixtures("one_thread")
def test_gradients_of_norm_embeddings_and_head_as_well(
    workshop: Workshop, smollm2_dir: Path, packs: list[Pack]
) -> None:
    built = workshop.build(smollm2_dir, *FLAGS, "--train-norm", "--train-embeddings", "--train-head")
    reference = Reference.full(smollm2_dir, ends=ENDS)
    with opened(built, smollm2_dir) as (trainer, session):
        loss, found = gradients(trainer, session, packs[:2])
    expected_loss, expected = reference.gradients(packs[:2])
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    require_close(found, expected, cosine=COSINE, norm=NORM)
    assert set(ENDS) <= set(found)


@pytest.mark.usefixtures("one_thread")
def test_curve_of_twelve_steps(bundle: Built, smollm2_dir: Path, rows: Path) -> None:
    config = TrainConfig(steps=12, lr=2e-4, weight_decay=0.1, warmup=2, seed=3)
    reference = Reference.full(smollm2_dir)
    with opened(bundle, smollm2_dir, config) as (trainer, _):
        batches = load(rows, smollm2_dir, SEQ_LEN, config.data_options())
        before = trainer.parameters()
        curve = []
        for report in trainer.fit(rows):
            loss, norm = reference.step(
                [batches.next_pack()],
                lr=report.lr,
                max_norm=config.max_norm,
                weight_decay=config.weight_decay,
            )
            assert report.loss == pytest.approx(loss, abs=1e-3), f"step {report.step}"
            assert report.grad_norm == pytest.approx(norm, rel=1e-2), f"step {report.step}"
            curve.append(report.loss)
        after, expected = trainer.parameters(), reference.parameters()
    # What was learned agrees, and not only the weights that it was added to.
    learned = {name: after[name] - before[name] for name in after}
    require_close(learned, {n: expected[n] - before[n] for n in expected}, cosine=0.99, norm=1e-2)
    assert np.mean(curve[-4:]) < np.mean(curve[:4]) - 0.2, "nothing was learned, equal curves prove little"
