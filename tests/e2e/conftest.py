"""What tests of the whole path share."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from npurt import DataOptions, Pack
from npurt.data import load
from tests.e2e.bundles import Built, Workshop
from tests.e2e.comparison import SEQ_LEN

# The recipe of the published figures.
SMOLLM2_FLAGS = ("--seq-len", str(SEQ_LEN), "--rank", "16", "--alpha", "32", "--targets", "q,v")


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="session")
def smollm2_flags() -> tuple[str, ...]:
    return SMOLLM2_FLAGS


@pytest.fixture(scope="session")
def smollm2_bundle(workshop: Workshop, smollm2_dir: Path, smollm2_flags: tuple[str, ...]) -> Built:
    return workshop.build(smollm2_dir, *smollm2_flags)


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with every token supervised, and answers of which only the response is."""
    found: list[dict[str, str]] = []
    for name, text in sorted(topics.items()):
        paragraph = next(p for p in text.split("\n\n") if len(p) > 80)[:220]
        found.append({"text": paragraph} if len(found) % 2 else {"prompt": f"Explain: {name}", "response": paragraph})
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def packs(rows: Path, smollm2_dir: Path) -> list[Pack]:
    found = list(load(rows, smollm2_dir, SEQ_LEN, DataOptions(shuffle=False)))
    assert found[0].segments.max() > 1, "no pack with several documents"
    assert len({pack.supervised for pack in found[:3]}) == 3, "equal counts would hide a wrong divisor"
    return found
