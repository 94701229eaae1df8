"""A device's program of a real model, computed on the CPU from the ONNX forms of its parts.

What is tested is all that npucc decides for RNGD: rounding, the cut into parts, buffers, moves between the two
memories, host parts. No vendor's software takes part; a stand-in "compiles" the programs, which nothing runs here. The
forms round where the graphs say so, and only there; `tests/e2e/test_rngd.py` has the vendor's own executor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from tests.e2e.bundles import Built, Workshop, run
from tests.e2e.comparison import losses
from tests.npucc.rngd_stand_in import interpreter

pytestmark = pytest.mark.timeout(900)
LAYERS = 30
TARGETS = 2
FACTORS = 2


@pytest.fixture(scope="module", autouse=True)
def _toolchain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPUCC_RNGD_PYTHON", str(interpreter(tmp_path_factory.mktemp("sdk"))))
        yield


def device_bundle(workshop: Workshop, model: Path, flags: tuple[str, ...], activations: str) -> Built:
    return workshop.build(model, *flags, "--target", "rngd", "--no-tuning", "--activations", activations)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    texts = [text.strip() for _, text in sorted(topics.items())][:30]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def check(bundle: Built, model: Path, rows: Path, layers: int) -> Mapping[str, Any]:
    words = ["--bundle", bundle.path, "--trust", bundle.trust, "--weights", model, "--data", rows, "--layers", layers]
    report: Mapping[str, Any] = json.loads(run("npurt", "check", *map(str, words), "--device", "cpu", "--json"))
    return report


def test_every_gradient_of_all_layers_points_where_the_reference_says(
    workshop: Workshop, smollm2_dir: Path, smollm2_flags: tuple[str, ...], rows: Path
) -> None:
    report = check(device_bundle(workshop, smollm2_dir, smollm2_flags, "save"), smollm2_dir, rows, LAYERS)
    cosines = [tensor["cosine"] for tensor in report["tensors"]]
    assert len(cosines) == LAYERS * TARGETS * FACTORS
    assert min(cosines) >= 0.999
    assert report["loss"] == pytest.approx(report["reference_loss"], rel=3e-3)


def test_what_is_computed_again_is_what_would_have_been_saved(
    workshop: Workshop, smollm2_dir: Path, smollm2_flags: tuple[str, ...], rows: Path
) -> None:
    saved, again = (
        check(device_bundle(workshop, smollm2_dir, smollm2_flags, policy), smollm2_dir, rows, 3)
        for policy in ("save", "recompute")
    )
    assert again == saved


def test_training_follows_the_cpu_target(
    workshop: Workshop,
    smollm2_dir: Path,
    smollm2_flags: tuple[str, ...],
    smollm2_bundle: Built,
    rows: Path,
    tmp_path: Path,
) -> None:
    found: list[list[float]] = []
    for built in (smollm2_bundle, device_bundle(workshop, smollm2_dir, smollm2_flags, "save")):
        log, out = tmp_path / f"{len(found)}.jsonl", tmp_path / f"{len(found)}"
        words = ["--bundle", built.path, "--trust", built.trust, "--weights", smollm2_dir, "--data", rows, "--out", out]
        words += ["--steps", 8, "--accum", 2, "--lr", "1e-3", "--seed", 1, "--device", "cpu", "--log-file", log]
        run("npurt", "train", *map(str, words))
        found.append(losses(log))
        assert (out / "adapter_model.safetensors").exists()
    of_cpu, of_device = found
    assert of_device == pytest.approx(of_cpu, rel=0.01)
    assert of_device != of_cpu
