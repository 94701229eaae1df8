"""A stand-in for a card, and the device that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from npurt.devices.rngd import RngdDevice
from tests.npurt import fake_furiosa as fake
from tests.npurt.rngd_parts import ADD, compiled


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> fake.Card:
    return fake.install(monkeypatch, tmp_path)


@pytest.fixture
def device(card: fake.Card) -> Iterator[RngdDevice]:
    opened = RngdDevice()
    opened.check([compiled("add", ADD)[0]])
    yield opened
    opened.close()
