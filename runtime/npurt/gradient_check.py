"""Does a bundle compute the right gradients on this device? What `npurt check` asks.

The bundle's program and its unfused reference program run the same sequence with the same weights or random LoRA
matrices (both factors non-zero, so that both get a gradient), and each trained tensor's gradients are compared by
direction and length. The sequence is random, or one of the user's: what tokens that no text has make of rounding says
little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from npubundle.program import Program
from npurt.arrays import Array, dtype_of
from npurt.batches import Layout, program_inputs
from npurt.bundle import Bundle
from npurt.data import IGNORED, Pack
from npurt.devices import OWN
from npurt.engine import first_micro_step
from npurt.errors import RuntimeFault
from npurt.machine import Progress
from npurt.parameters import uniform
from npurt.session import Session


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an agreement must reach: a cosine of at least, and a norm ratio and a loss within, so much."""

    cosine: float
    ratio: float


#: For programs that compute in f32. Two orders of the same sums differ by about 1e-6; an error of a rewrite, by far
#: more than this.
F32 = Bounds(0.9999, 1e-3)
#: For programs whose products have bf16 factors: 8 bits of mantissa, and thirty layers that pass their error on.
BF16 = Bounds(0.999, 3e-2)


def bounds_of(program: Program) -> Bounds:
    """The bounds for a program's arithmetic, which its frozen weights tell."""
    narrow = any(buffer.type.dtype == "bf16" for buffer in program.with_role("weight"))
    return BF16 if narrow else F32


_REBUILD = "rebuild the bundle"
#: Size of the random LoRA entries: large enough to be felt, small enough to leave the model's activations in charge.
_LORA_SIZE = 0.02


@dataclass(frozen=True, slots=True)
class Agreement:
    """How one tensor's gradient compares with the reference: cosine of the angle, and ratio of the L2 norms."""

    tensor: str
    cosine: float
    norm_ratio: float
    bounds: Bounds = F32

    @property
    def good(self) -> bool:
        """Whether both are within bounds. NaN is not."""
        return self.cosine >= self.bounds.cosine and abs(self.norm_ratio - 1) <= self.bounds.ratio


@dataclass(frozen=True, slots=True)
class GradientReport:
    """Outcome of a check. Losses are means over the supervised tokens, in nats."""

    layers: int
    loss: float
    reference_loss: float
    tensors: tuple[Agreement, ...]
    bounds: Bounds = F32

    @property
    def good(self) -> bool:
        """Whether every tensor, and the loss, agrees with the reference."""
        same_loss = abs(self.loss - self.reference_loss) <= self.bounds.ratio * abs(self.reference_loss)
        return same_loss and bool(self.tensors) and all(tensor.good for tensor in self.tensors)


def check_gradients(
    bundle: Bundle,
    weights: str | Path,
    *,
    device: str = OWN,
    layers: int | None = None,
    seed: int = 0,
    pack: Pack | None = None,
    progress: Progress | None = None,
) -> GradientReport:
    """Compare the gradients of the bundle's program with those of its reference program, on real weights.

    `layers` cuts the model down to its first layers. `pack` is the sequence, by default a random one. Raises what
    `Session.open` raises, and what `program_inputs` does for a pack that the program does not fit.
    """
    results = []
    vocabulary = bundle.config.model.vocab_size
    inputs: Mapping[str, Array] = {}
    for name in ("train", "reference"):
        with Session.open(
            bundle,
            weights,
            device=device,
            prepack="off",
            phases=[first_micro_step(bundle.program(name))],
            layers=layers,
            program=name,
            progress=progress,
        ) as session:
            pack = pack or _random_pack(bundle.config.recipe.seq_len, vocabulary, seed)
            inputs = inputs or _inputs(pack, session.program, vocabulary)
            results.append(_gradients(session, inputs, seed))
    (loss, gradients), (reference_loss, reference) = results
    if not reference.keys() <= gradients.keys():
        only = ", ".join(sorted(reference.keys() - gradients.keys())[:5])
        raise RuntimeFault(f"the bundle's program does not train what its reference does: {only}", remedy=_REBUILD)
    count = float(inputs["weights"].sum())
    bounds = bounds_of(bundle.program("train"))
    return GradientReport(
        layers or bundle.config.model.num_hidden_layers,
        loss / count,
        reference_loss / count,
        tuple(_compare(name, gradients[name], reference[name], bounds) for name in sorted(reference)),
        bounds,
    )


def random_inputs(program: Program, vocabulary: int, seed: int) -> dict[str, Array]:
    """One sequence of two documents of random tokens and some padding, every position that can be supervised."""
    return _inputs(_random_pack(program.buffers["tokens"].type.elements, vocabulary, seed), program, vocabulary)


def _inputs(pack: Pack, program: Program, vocabulary: int) -> dict[str, Array]:
    """The names are those of `docs/reference/program.md`."""
    return program_inputs(pack, Layout.of(program, vocabulary)) | {"accumulate": np.zeros((), np.float32)}


def _random_pack(length: int, vocabulary: int, seed: int) -> Pack:
    generator = np.random.Generator(np.random.PCG64(seed))
    tokens = generator.integers(0, vocabulary, length, np.int32)
    padding = length // 8
    first = max(1, (length - padding) // 3)
    second = length - padding - first
    segments = np.repeat(np.array([1, 2, 0], np.int32), [first, second, padding])
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in (first, second, padding)])
    labels = np.full(length, IGNORED, np.int32)
    supervised = np.flatnonzero((segments[:-1] == segments[1:]) & (segments[1:] > 0))
    labels[supervised] = tokens[supervised + 1]
    return Pack(tokens, positions, segments, labels)


def _gradients(session: Session, inputs: Mapping[str, Array], seed: int) -> tuple[float, dict[str, Array]]:
    """The summed loss, and the gradient of each exported tensor that the (perhaps cut) program computes."""
    program = session.program
    for name, value in inputs.items():
        session.write(name, value)
    session.init_parameters(seed)
    for buffer in program.with_role("param"):
        if buffer.tensor and not buffer.source:
            value = uniform(buffer.tensor, buffer.type.shape, _LORA_SIZE, seed)
            session.write(buffer.name, value.astype(dtype_of(buffer.type)))
    phase = first_micro_step(program)
    session.run(phase)
    written = program.written(phase)
    # Where gradients are added up in blocks, what is written are all of a group, also those of layers left out.
    views = (b for b in program.with_role("grad") if b.name in written or program.root(b.name).name in written)
    found = {b.tensor: b.name for b in views if b.tensor}
    gradients = {tensor: session.read(name).astype(np.float64) for tensor, name in found.items()}
    return float(session.read("loss_sum")), gradients


def _compare(name: str, found: Array, reference: Array, bounds: Bounds) -> Agreement:
    norm, wanted = float(np.linalg.norm(found)), float(np.linalg.norm(reference))
    if norm == 0 or wanted == 0:  # random inputs never give a gradient of zero: both programs are wrong then
        return Agreement(name, 0.0, 0.0, bounds)
    return Agreement(name, float(np.vdot(found, reference)) / (norm * wanted), norm / wanted, bounds)
