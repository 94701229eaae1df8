"""Gradients of a bundle, and how far they are from those of another program."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from npurt import Bundle, Pack, TrainConfig, Trainer
from npurt.batches import program_inputs
from npurt.engine import first_micro_step, parameter_views
from npurt.session import Prepack, Session
from tests.e2e.bundles import Built

#: Tokens of the sequences that are compared.
SEQ_LEN = 128
Tensors = Mapping[str, NDArray[np.float32]]


def losses(log: Path) -> list[float]:
    """The loss of each step that `npurt train --log-file` wrote."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


@contextmanager
def opened(
    built: Built, weights: Path, config: TrainConfig | None = None, *, prepack: Prepack = "off"
) -> Iterator[tuple[Trainer, Session]]:
    """A trainer on a bundle, and the session that it drives."""
    with (
        Bundle.open(built.path, trust=built.trust) as bundle,
        Trainer.on(Session.open(bundle, weights, prepack=prepack), weights, config) as trainer,
    ):
        session = trainer._engine
        assert isinstance(session, Session)
        yield trainer, session


def gradients(
    trainer: Trainer, session: Session, packs: Sequence[Pack]
) -> tuple[float, dict[str, NDArray[np.float32]]]:
    """Sum of losses over the packs and its gradient by trained tensor, as the optimizer step accumulates them."""
    total = 0.0
    for index, pack in enumerate(packs):
        for name, value in program_inputs(pack, trainer.layout).items():
            session.write(name, value)
        session.write("accumulate", np.array(float(index > 0), dtype=np.float32))
        session.run("micro_step" if index else first_micro_step(session.program))
        total += float(session.read("loss_sum"))
    return total, {name: _gradient(session, view) for name, view in parameter_views(session.program).items()}


def _gradient(session: Session, view: str) -> NDArray[np.float32]:
    """What the step has added up for a parameter. LoRA matrices have no views of that, so they are cut out of it."""
    if f"grad.{view}" in session.program.buffers:
        return session.read(f"grad.{view}")
    buffer, flat = session.program.buffers[view], session.read("grad")
    size = int(np.prod(buffer.type.shape))
    return flat[buffer.view_offset : buffer.view_offset + size].reshape(buffer.type.shape)


def random_parameters(trainer: Trainer, seed: int, scale: float = 0.05) -> dict[str, NDArray[np.float32]]:
    """Values for all trained tensors, B included: with B at zero, as training starts, A has no gradient at all."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0.0, scale, values.shape).astype(np.float32) for name, values in trainer.parameters().items()
    }


def require_close(ours: Tensors, theirs: Tensors, *, cosine: float, norm: float) -> None:
    """Fail with the worst tensors unless every one has at least this cosine and a norm ratio within `norm` of 1."""
    assert sorted(ours) == sorted(theirs)
    bad = []
    for name, value in ours.items():
        a, b = (np.asarray(x, dtype=np.float64).ravel() for x in (value, theirs[name]))
        length_a, length_b = np.linalg.norm(a), np.linalg.norm(b)
        assert length_b > 0, f"{name}: the reference gradient is zero, which proves nothing"
        angle, ratio = float(a @ b / (length_a * length_b)), float(length_a / length_b)
        if not (angle >= cosine and abs(ratio - 1.0) <= norm):
            bad.append(f"{name}: cosine {angle:.9f}, norm ratio {ratio:.7f}")
    assert not bad, f"{len(bad)} of {len(ours)} tensors differ:\n" + "\n".join(bad[:10])
