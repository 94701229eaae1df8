"""What tests of the whole path share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.bundles import Built, Workshop

# The recipe of the published figures.
SMOLLM2_FLAGS = ("--seq-len", "128", "--rank", "16", "--alpha", "32", "--targets", "q,v")


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="session")
def smollm2_flags() -> tuple[str, ...]:
    return SMOLLM2_FLAGS


@pytest.fixture(scope="session")
def smollm2_bundle(workshop: Workshop, smollm2_dir: Path, smollm2_flags: tuple[str, ...]) -> Built:
    return workshop.build(smollm2_dir, *smollm2_flags)
