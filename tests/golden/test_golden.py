"""Bundles of every released format version must stay readable and train as they did.

`python tools/golden.py` writes the golden of a new version; an existing one is never changed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npubundle.version import FORMAT_VERSION
from npurt import Bundle, TrainConfig, Trainer

FOLDER = Path(__file__).parent
VERSIONS = sorted(FOLDER.glob("v*"))


def test_every_version_has_a_golden() -> None:
    assert [v.name for v in VERSIONS] == [f"v{n}" for n in range(1, FORMAT_VERSION + 1)]


@pytest.mark.parametrize("golden", VERSIONS, ids=lambda v: v.name)
def test_a_golden_bundle_is_verified_and_trains_as_it_did(golden: Path) -> None:
    expected = json.loads((golden / "expected.json").read_text())
    config = TrainConfig(steps=2, lr=1e-2, schedule="constant", seed=7)
    with (
        Bundle.open(golden / "golden.npub", trust=golden / "golden.pub") as bundle,
        Trainer(bundle, weights=golden / "model", config=config) as trainer,
    ):
        assert bundle.manifest_digest == expected["manifest_digest"]
        losses = [report.loss for report in trainer.fit(golden / "train.jsonl")]
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
