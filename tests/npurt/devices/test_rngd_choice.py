"""Which card, and whether it can run a bundle: the device of RNGD before anything is loaded."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from npurt.cli.tables import DEVICE
from npurt.devices import NAMES, open_device, rngd
from npurt.devices.rngd import RngdDevice
from tests.npurt import fake_furiosa as fake
from tests.npurt.rngd_parts import ADD, REQUIRES, compiled, failure

Array = NDArray[Any]


# -- what a bundle needs -----------------------------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    newer = "furiosa-torch 2026.5.1 (rev: 0123456789)"
    card = fake.install(monkeypatch, tmp_path, cards=(2, 5), version=newer)
    other = {"furiosa-torch": fake.VERSION, "furiosa-compiler": "abc", "fusion": "4", "magic": "1"}
    odd, _ = compiled("odd", ADD, media_type="text/plain", requires=other)
    bare, _ = compiled("bare", ADD, requires={})
    error = failure(lambda: RngdDevice(4).check([odd, bare]))
    assert [str(problem) for problem in error.problems] == [
        "parts: text/plain is no form of part that this device runs; rebuild with --target rngd",
        "furiosa-compiler: the bundle needs abc, fc43f6a779 is installed; install that one or rebuild",
        f"furiosa-torch: the bundle needs {fake.VERSION}, {newer} is installed; install that one or rebuild",
        "magic: the bundle needs magic 1, which this release of npurt cannot provide",
        "furiosa-torch: 1 of 2 parts do not say what they need (bare); rebuild them",
        "furiosa-compiler: 1 of 2 parts do not say what they need (bare); rebuild them",
        "fusion: 1 of 2 parts do not say what they need (bare); rebuild them",
        "furiosa:4: with a fusion of 4, npu2, npu5 make furiosa:0 to furiosa:3; name one of those",
    ]
    assert card.calls == [], "nothing is set for good before all of it fits"


@pytest.mark.parametrize(
    ("installed", "fits"),
    [
        (fake.VERSION, True),
        ("furiosa-torch 2026.4.0 (rev: 5800e2ba24, built_at: 2027-01-01T00:00:00Z)", True),
        ("furiosa-torch 2026.4.0 (rev: 5800e2ba25, built_at: 2026-10-12T09:11:18Z)", False),
        ("furiosa-torch 2026.4.1 (rev: 5800e2ba24, built_at: 2026-10-12T09:11:18Z)", False),
        ("furiosa-torch 2026.4.0", False),
    ],
)
def test_the_kit_must_be_of_the_same_source(card: fake.Card, installed: str, fits: bool) -> None:
    card.version = installed
    device = RngdDevice()
    if fits:
        device.check([compiled("add", ADD)[0]])
    else:
        assert "furiosa-torch" in str(failure(lambda: device.check([compiled("add", ADD)[0]])))


@pytest.mark.parametrize("fusions", [["16"], ["8", "4"], ["many"], ["08"]])
def test_a_device_runs_one_fusion_that_a_card_has(card: fake.Card, fusions: list[str]) -> None:
    parts = [compiled("add", ADD, requires=REQUIRES | {"fusion": fusion})[0] for fusion in fusions]
    error = failure(lambda: RngdDevice().check(parts))
    assert "a device runs one of 1, 2, 4 or 8" in str(error)
    assert card.fusion is None


def test_a_process_has_one_fusion(card: fake.Card) -> None:
    part, _ = compiled("add", ADD)
    for _ in range(2):
        device = RngdDevice()
        device.check([part])
        device.close()
    four = dataclasses.replace(part, requires=REQUIRES | {"fusion": "4", "furiosa-compiler": "older"})
    error = failure(lambda: RngdDevice().check([four]))
    assert [problem.where for problem in error.problems] == ["furiosa-compiler", "fusion"]
    assert "this process is set to 8 for good; start a new one" in str(error)


def test_a_fusion_that_somebody_else_chose_is_found_out(card: fake.Card) -> None:
    card.set_fusion(4)
    error = failure(lambda: RngdDevice().check([compiled("add", ADD)[0]]))
    assert error.what.startswith("cannot set the fusion to 8: num_fusion is already set")
    assert error.remedy == "start a new process"


def test_a_card_that_cannot_be_opened_says_why(card: fake.Card) -> None:
    card.broken = RuntimeError("HAL error on ClusterId(npu0pe0-3): EBUSY: Device or resource busy")
    error = failure(lambda: RngdDevice().check([compiled("add", ADD)[0]]))
    assert error.what.startswith("cannot open furiosa:0: HAL error")
    assert "Unconfined" in (error.remedy or "")


def test_a_device_that_the_kit_does_not_know_is_refused(card: fake.Card) -> None:
    device = RngdDevice()
    card.cards = ()
    assert failure(lambda: device.check([compiled("add", ADD)[0]])).what.endswith("knows no furiosa:0, only none")


# -- which card --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cards", "wanted"),
    [
        ("furiosa", (0,), "furiosa:0"),
        ("furiosa:auto", (5,), "furiosa:0"),
        ("furiosa:0", (5,), "furiosa:0"),
        ("furiosa:1", (10, 2), "furiosa:1"),
    ],
)
def test_cards_are_counted_among_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, cards: tuple[int, ...], wanted: str
) -> None:
    fake.install(monkeypatch, tmp_path, cards=cards)
    device = open_device(name)
    device.check([compiled("add", ADD)[0]])
    assert device.name == wanted
    device.settle()
    device.close()


@pytest.mark.parametrize("name", ["furiosa", "furiosa:auto"])
def test_of_several_cards_one_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    fake.install(monkeypatch, tmp_path, cards=(10, 2))
    error = failure(lambda: open_device(name))
    assert (error.what, error.where) == ("2 RNGD cards are visible here, and none was chosen", "npu2, npu10")
    assert "furiosa:0, furiosa:1" in (error.remedy or "")


@pytest.mark.parametrize("there", [False, True])
def test_without_a_card_nothing_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool) -> None:
    nodes = tmp_path / "rngd"
    if there:
        nodes.mkdir()
        (nodes / "npu0pe0").touch()
    monkeypatch.setattr(rngd, "NODES", nodes)
    monkeypatch.setitem(sys.modules, "furiosa", None)
    for name in ("furiosa:0", "furiosa:auto"):
        error = failure(lambda name=name: open_device(name))  # type: ignore[misc]
        assert (error.what, error.where) == ("no RNGD card is visible here", str(nodes))
        assert "furiosa.ai/rngd" in (error.remedy or "")


def test_without_the_kit_the_device_says_where_to_run(card: fake.Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "furiosa", None)
    error = failure(lambda: open_device("furiosa:0"))
    assert error.what.startswith("the device furiosa:0 needs furiosa-torch")
    assert "in the environment where furiosa-torch is installed" in (error.remedy or "")


@pytest.mark.parametrize("name", ["furiosa:", "furiosa:x", "furiosa:-1", "furiosa:0:1", "rngd", "furiosa:٣"])
def test_other_names_are_refused_with_those_that_exist(card: fake.Card, name: str) -> None:
    error = failure(lambda: open_device(name))
    assert error.remedy == "devices of this release: cpu, rngd-sim, furiosa:N, furiosa:auto"


def test_the_help_names_all_devices() -> None:
    assert all(name in DEVICE.help for name in NAMES)
