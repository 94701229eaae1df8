"""The device of RNGD against a stand-in for furiosa-torch: no card was at hand."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from npubundle.digest import sha256_of
from npubundle.errors import ExitCode, FormatError
from npubundle.liveness import planned
from npubundle.part import Part
from npubundle.tensor import TensorType
from npurt.bundle import Bundle
from npurt.cli.tables import DEVICE
from npurt.devices import NAMES, open_device, rngd
from npurt.devices.cpu import CpuDevice
from npurt.devices.device import Region
from npurt.devices.rngd import RngdDevice
from npurt.errors import DeviceError
from npurt.gradient_check import check_gradients
from npurt.machine import Machine
from npurt.session import Session
from npurt.weights import Checkpoint
from tests.npurt import apart
from tests.npurt import fake_furiosa as fake
from tests.npurt import toy_bundle as toy
from tests.npurt.test_apart import bf16_program
from tests.npurt.test_session import SCALE, expected, fill

Array = NDArray[Any]
REQUIRES = {"furiosa-torch": fake.VERSION, "furiosa-compiler": fake.COMPILER, "fusion": "8"}
ADD = "(float[4] x, float[4] y) => (float[4] sum, float[4] twice) { sum = Add(x, y) twice = Add(sum, sum) }"
F32 = TensorType("f32", (4,))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> fake.Card:
    return fake.install(monkeypatch, tmp_path)


@pytest.fixture
def device(card: fake.Card) -> Iterator[RngdDevice]:
    opened = RngdDevice()
    opened.check([compiled("add", ADD)[0]])
    yield opened
    opened.close()


def compiled(name: str, graph: str, **changes: Any) -> tuple[Part, bytes]:
    """A part for the card, and its program."""
    part = toy.part(name, toy.payload(graph))
    return rngd_part(part, toy.payload(graph), **changes)


def rngd_part(part: Part, model: bytes, **changes: Any) -> tuple[Part, bytes]:
    raw = fake.payload(part, model)
    made = dataclasses.replace(
        part, media_type=rngd.MEDIA_TYPE, requires=REQUIRES, digest=sha256_of(raw), size=len(raw)
    )
    return dataclasses.replace(made, **changes), raw


def write_bundle(folder: Path) -> tuple[Path, Path]:
    """The toy bundle with parts for the card, other parts for the host, and moves between them."""
    parts, payloads = toy.parts()
    changed: dict[str, Part] = {}
    for name in [name for name in parts if name not in apart.HOST_PARTS]:
        part = dataclasses.replace(parts[name], name=f"{name}.far")
        changed[part.name], payloads[part.name] = rngd_part(part, payloads[name])
    programs = {"train": apart._compiled(apart.program(), changed), "reference": apart.reference()}
    return toy.write_bundle(folder, target="rngd", changed=changed, payloads=payloads, programs=programs)


def regions(device: RngdDevice, count: int, kind: TensorType = F32) -> list[Region]:
    block = device.allocate(count * 64)
    return [block.region(64 * index, kind) for index in range(count)]


def failure(act: Callable[[], object]) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        act()
    assert caught.value.exit_code is ExitCode.RESOURCE
    return caught.value


# -- whole programs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    path, key = write_bundle(tmp_path_factory.mktemp("rngd"))
    with Bundle.open(path, key) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_weights(tmp_path_factory.mktemp("weights"))


def trained(session: Session, steps: int = 2) -> Mapping[str, Array]:
    """What is left after some steps of two micro steps each."""
    fill(session)
    session.write("learning_rate", np.array(0.125, np.float32))
    for _ in range(steps):
        for accumulate in (0, 1):
            session.write("accumulate", np.array(accumulate, np.float32))
            session.run("micro_step")
        session.run("update")
    session.run("evaluate")
    names = ("lora", "grad", "grad_step", "loss_sum", "grad_norm", "logprobs")
    return {name: session.read(name) for name in names}


def test_training_is_that_of_the_cpu(card: fake.Card, bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    path, key = toy.write_bundle(tmp_path)
    with Bundle.open(path, key) as plain, Session.open(plain, folder, prepack="off") as session:
        wanted = trained(session)
    with Session.open(bundle, folder, device="furiosa:auto") as session:
        found = trained(session)
    assert not np.array_equal(found["lora"], SCALE)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_step_agrees_with_float64(card: fake.Card, bundle: Bundle, folder: Path) -> None:
    loss, gradient = expected()
    with Session.open(bundle, folder, device="furiosa:0") as session:
        fill(session)
        session.run("micro_step")
        assert session.read("loss_sum") == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(session.read("grad"), gradient, rtol=1e-4, atol=1e-4)


def test_gradients_agree_with_a_reference_on_the_host(card: fake.Card, bundle: Bundle, folder: Path) -> None:
    assert check_gradients(bundle, folder, device="furiosa:auto", layers=1).good
    assert check_gradients(bundle, folder, device="furiosa:auto").good
    gc.collect()
    assert card.used == 0


def test_fusion_comes_first_and_all_memory_goes_back(card: fake.Card, bundle: Bundle, folder: Path) -> None:
    with Session.open(bundle, folder, device="furiosa") as session:
        trained(session, 1)
        loaded = card.used
        trained(session, 3)
        assert card.used == loaded, "a step leaves nothing behind"
        # The arenas may be half full of what the last phase left; programs and what is still queued come on top.
        assert card.peak < sum(session.program.arenas("device").values()) + 2 * card.used
    assert card.calls[0] == "set_fusion(8)"
    assert card.calls.count("load forward.far") == 1, "one program serves both layers"
    gc.collect()
    assert card.used == 0


def test_results_stay_where_the_card_put_them(card: fake.Card, bundle: Bundle, folder: Path) -> None:
    with Session.open(bundle, folder, device="furiosa") as session:
        fill(session)
        session.run("micro_step")
        before = card.started
        session.run("micro_step")
        ups = sum(1 for move in session.program.moves("micro_step") if move.queue == "h2d")
        calls = [call.part for call in session.program.calls("micro_step") if call.queue != "host"]
        calls += ["head.far"] * (toy.B - 1)
        assert card.started - before == ups + len(calls), "nothing is copied on the card"
        before = card.started
        session.read("logprobs")
        assert card.started - before == toy.B, "but for the rows of a buffer that is read as a whole"


def test_bf16_crosses_in_both_directions(card: fake.Card, folder: Path) -> None:
    texts = {
        "widen": "(bfloat16[4,4] x) => (float[4,4] y) { y = Cast <to = 1> (x) }",
        "narrow": "(float[4,4] x) => (bfloat16[4,4] y) { y = Cast <to = 16> (x) }",
    }
    program = planned(bf16_program(TensorType("bf16", (toy.H, toy.H))))
    models = {name: toy.payload(text) for name, text in texts.items()}
    parts = {name: toy.part(name, model) for name, model in models.items()}
    parts["widen"], models["widen"] = rngd_part(parts["widen"], models["widen"])
    device = RngdDevice()
    device.check([parts["widen"]])
    machine = Machine(program, parts, device, constants=False, host=CpuDevice())
    machine.prepare(["step"], Checkpoint.open(folder), lambda part, _form: models[part])
    machine.run("step")
    wanted = toy.weights()["layers.0.w"]
    assert machine.read("again").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(machine.read("wide"), wanted)
    np.testing.assert_array_equal(machine.read("again"), wanted.astype(ml_dtypes.bfloat16))
    assert machine.view("again") is None
    machine.close()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_values_of_every_type_return_as_they_went(device: RngdDevice) -> None:
    values: dict[str, Any] = {
        "f32[2,3]": np.arange(6, dtype=np.float32).reshape(2, 3).T.reshape(2, 3),
        "bf16[4]": np.arange(4).astype(ml_dtypes.bfloat16),
        "bf16[]": np.array(3, ml_dtypes.bfloat16),
        "f16[3]": np.arange(3, dtype=np.float16),
        "i32[]": np.array(-7, np.int32),
        "i64[2]": np.array([1 << 40, -1]),
        "bool[2]": np.array([True, False]),
    }
    for text, value in values.items():
        place = device.allocate(64).region(0, TensorType.from_str(text))
        np.testing.assert_array_equal(device.download(place), np.zeros_like(value))
        device.upload(value, place)
        found = device.download(place)
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)


def test_an_array_may_change_once_its_upload_started(device: RngdDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (rngd._STAGED, 0):
        monkeypatch.setattr(rngd, "_STAGED", limit)
        (place,) = regions(device, 1)
        array = np.arange(4, dtype=np.float32)
        device.upload(array, place)
        array[:] = -1
        np.testing.assert_array_equal(device.download(place), [0, 1, 2, 3])


def test_transfers_wait_in_the_stream_up_to_a_limit(
    card: fake.Card, device: RngdDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = regions(device, 3)
    for place in places[:2]:
        device.upload(np.ones(4, np.float32), place)
    assert len(card.queue) == 2
    monkeypatch.setattr(rngd, "_UNDER_WAY", 40)
    device.upload(np.ones(4, np.float32), places[2])
    assert not card.queue
    assert not device._staged


def test_arrays_that_cannot_be_written_or_lie_askew_are_uploaded(
    device: RngdDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = device.allocate(128)
    fixed = np.arange(4, dtype=np.float32)
    fixed.flags.writeable = False
    askew = np.arange(6, dtype=np.float32).reshape(2, 3).T
    for limit in (rngd._STAGED, 0):
        monkeypatch.setattr(rngd, "_STAGED", limit)
        for array in (fixed, askew):
            place = block.region(64, TensorType("f32", array.shape))
            device.upload(array, place)
            np.testing.assert_array_equal(device.download(place), array)


def test_memory_is_counted(device: RngdDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    free = device.available_memory()
    assert free == 48 << 30
    device.allocate(1 << 30)
    part, raw = compiled("add", ADD)
    device.load(part, raw, {})
    assert free - (1 << 30) - device.available_memory() == len(toy.payload(ADD)) + fake.STACK
    error = failure(lambda: device.allocate(48 << 30))
    assert error.what.startswith("cannot allocate 51.54 GB on furiosa:0: 50.47 of 51.54 GB are free")
    assert "--memory-budget" in (error.remedy or "")


def test_part_of_a_card_has_its_share_of_memory(card: fake.Card) -> None:
    device = RngdDevice(3)
    device.check([compiled("add", ADD, requires=REQUIRES | {"fusion": "2"})[0]])
    assert device.available_memory() == 12 << 30


@pytest.mark.parametrize("memory", [0, 8, 16 + 8])
def test_a_card_without_room_says_how_much_it_has(card: fake.Card, device: RngdDevice, memory: int) -> None:
    part, raw = compiled("add", ADD)
    program = device.load(part, raw, {})
    x, two, three = regions(device, 3)
    card.memory = card.used + memory

    def step() -> None:
        device.upload(np.ones(4, np.float32), x)
        program.bind([x, x], [two, three]).run()

    error = failure(step)
    assert "failed to allocate 16 bytes; npurt takes 0.00 of 51.54 GB" in error.what
    assert "--memory-budget" in (error.remedy or "")


# -- programs ----------------------------------------------------------------------------------------------------------


def test_results_are_new_tensors_and_go_where_they_belong(card: fake.Card, device: RngdDevice) -> None:
    part, raw = compiled("add", ADD)
    block = device.allocate(64)
    x, flat = block.region(0, F32), block.region(16, TensorType("f32", (8,)))
    high = block.region(32, F32)
    device.upload(np.full(8, 5, np.float32), flat)
    device.upload(np.arange(4, dtype=np.float32), x)
    bound = device.load(part, raw, {}).bind([x, high], [x, high])  # in place, and a view of a buffer
    bound.run()
    bound.run()
    device.synchronize()
    sums = 3 * (np.arange(4) + 5.0)
    np.testing.assert_array_equal(device.download(x), sums)
    np.testing.assert_array_equal(device.download(flat), [5, 5, 5, 5, *(2 * sums)])


def test_operands_must_be_those_of_the_part(device: RngdDevice) -> None:
    part, raw = compiled("add", ADD)
    program = device.load(part, raw, {})
    good, other = regions(device, 2), regions(device, 2, TensorType("f32", (2, 2)))
    for args, results, what in ((other, good, "inputs"), (good, other, "outputs"), (good[:1], good, "inputs")):
        with pytest.raises(ValueError, match=f"not the {what} of part add"):
            program.bind(args, results)
    with pytest.raises(ValueError, match="takes no constants"):
        device.load(part, raw, {0: np.zeros(4, np.float32)})


@pytest.mark.parametrize(
    "changes",
    [
        {"fusion": 4},
        {"inputs": ["f32[4]", "bf16[4]"]},
        {"inputs": ["f32[4]"]},
        {"outputs": ["f32[4]", "f32[2,2]"]},
        {"contiguous": False},
        {"broadcast": False},
    ],
)
def test_a_program_that_is_not_what_the_bundle_says_is_not_loaded(
    card: fake.Card, device: RngdDevice, changes: dict[str, Any]
) -> None:
    part, _ = compiled("add", ADD)
    with pytest.raises(
        FormatError, match=r"the payload of part add has a fusion of \d; the inputs .*; the bundle says"
    ):
        device.load(part, fake.payload(part, toy.payload(ADD), **changes), {})
    assert "load add" not in card.calls


def test_bytes_that_are_no_program_are_refused(device: RngdDevice) -> None:
    part, _ = compiled("add", ADD)
    error = failure(lambda: device.load(part, b"nonsense", {}))
    assert error.what == "cannot load part add: failed to deserialize: Hit the end of buffer, expected more data"
    assert error.where == f"furiosa:0, furiosa-torch {fake.VERSION}"


def test_a_program_with_more_results_than_it_said_is_refused(
    device: RngdDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, raw = compiled("add", ADD)
    bound = device.load(part, raw, {}).bind(regions(device, 2), regions(device, 2))
    monkeypatch.setattr(fake.IrRunnable, "execute", lambda *_: [])
    with pytest.raises(FormatError, match="gives 0 tensors, the bundle says 2"):
        bound.run()


@pytest.mark.parametrize(
    "fault", [RuntimeError("card lost\nbacktrace"), fake.PanicException("card lost"), OSError("card lost")]
)
def test_what_the_card_does_wrong_is_a_device_error(card: fake.Card, device: RngdDevice, fault: BaseException) -> None:
    def broken(_name: str) -> None:
        raise fault

    part, raw = compiled("add", ADD)
    bound = device.load(part, raw, {}).bind(regions(device, 2), regions(device, 2))
    card.interfere = broken
    bound.run()  # only started: the fault comes to light when somebody waits
    assert failure(device.synchronize).what == "furiosa:0 failed: card lost"
    bound.run()
    place = bound._results[0]
    assert failure(lambda: device.download(place)).what == "cannot copy f32[4] from furiosa:0: card lost"


def test_what_fails_at_the_start_names_the_part(device: RngdDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    part, raw = compiled("add", ADD)
    program = device.load(part, raw, {})
    bound = program.bind(regions(device, 2), regions(device, 2))

    def panics(*_: object) -> None:
        raise fake.PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(fake.IrRunnable, "execute", panics)
    assert failure(bound.run).what == "part add failed: called `Option::unwrap()` on a `None` value"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake.IrRunnable, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bound.run()


def test_nothing_works_before_the_check_or_after_the_end(card: fake.Card) -> None:
    part, raw = compiled("add", ADD)
    device = RngdDevice()
    assert "no parts were checked" in failure(lambda: device.allocate(64)).what
    device.check([part])
    bound = device.load(part, raw, {}).bind(regions(device, 2), places := regions(device, 2))
    bound.run()
    device.close()
    for act in (
        bound.run,
        device.synchronize,
        lambda: device.allocate(64),
        lambda: device.load(part, raw, {}),
        lambda: device.download(places[0]),
        lambda: device.upload(np.zeros(4, np.float32), places[0]),
    ):
        assert "was closed" in failure(act).what
    card.wait()
    del bound
    gc.collect()
    assert card.used == 0, "regions that are still around hold no memory of the card"
    device.close()


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


# -- the stand-in keeps its word ---------------------------------------------------------------------------------------


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> fake.FlatDramShape:
    return fake.FlatDramShape.new_as_broadcast(list(sizes), dtype)


def test_the_stand_in_refuses_what_a_card_would(card: fake.Card) -> None:
    _, raw = compiled("add", ADD)
    program = fake.IrRunnable(card, raw)
    with pytest.raises(AssertionError, match="must be the first call"):
        fake.empty(card, shape(4), "furiosa:0")
    card.set_fusion(8)
    x, y = (fake.empty(card, shape(4), "furiosa:0") for _ in range(2))
    with pytest.raises(ValueError, match="Runnable is not loaded"):
        program.execute([x, y])
    fake.Runnable(program).to("furiosa:0")
    short, narrow = (
        fake.empty(card, shape(3), "furiosa:0"),
        fake.empty(card, shape(4, dtype=torch.bfloat16), "furiosa:0"),
    )
    refused: list[tuple[list[Any], type[Exception], str]] = [
        ([x], ValueError, "wrong number of inputs"),
        ([x, torch.zeros(4)], RuntimeError, "Got: cpu"),
        ([x, short], RuntimeError, "Input tensor mismatch"),
        ([x, narrow], RuntimeError, "Input tensor mismatch"),
    ]
    for inputs, kind, message in refused:
        with pytest.raises(kind, match=message):
            program.execute(inputs)
    found = program.execute([x, x])
    assert all(result.storage not in {x.storage, y.storage} for result in found)
    card.fusion = 4
    with pytest.raises(AssertionError, match="another fusion"):
        program.execute([x, y])
    with pytest.raises(RuntimeError, match="already set"):
        card.set_fusion(8)
    with pytest.raises(RuntimeError, match="out of range"):
        fake.empty(card, shape(4), "furiosa:2")


def test_the_stand_in_copies_late(card: fake.Card) -> None:
    card.set_fusion(8)
    tensor = fake.empty(card, shape(4), "furiosa:0")
    assert set(tensor.bytes) == {fake.RUBBISH}
    source = torch.ones(4)
    tensor.copy_(source, non_blocking=True)
    source[:] = 2
    assert tensor.cpu().tolist() == [2, 2, 2, 2]
    tensor.copy_(torch.ones(4), non_blocking=True)
    with pytest.raises(AssertionError, match="given up"):
        card.wait()
    for count in range(fake.IN_FLIGHT + 1):
        tensor.copy_(source, non_blocking=True)
        assert len(card.queue) == min(count + 1, fake.IN_FLIGHT)
    part_of_it = fake.strided_view(tensor, shape(2), offset=4)
    with pytest.raises(AssertionError, match="onto itself"):
        part_of_it.copy_(fake.strided_view(tensor, shape(2), offset=8))
    for offset, message in ((2, "not multiple of itemsize 4"), (12, "out of bounds")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            fake.strided_view(tensor, shape(2), offset=offset)


# -- furiosa-torch itself, on a host without a card --------------------------------------------------------------------


@pytest.mark.skipif(rngd.NODES.exists(), reason="it would open the card of this host")
@pytest.mark.timeout(1500)  # making the environment, the first time, takes minutes
def test_what_the_real_kit_does_without_a_card(rngd_python: str, tmp_path: Path) -> None:
    program = """
        from pathlib import Path
        import numpy as np, torch
        from npubundle.errors import FormatError
        from npubundle.part import Numerics, Part, Port
        from npubundle.tensor import TensorType
        from npurt.devices import rngd
        from npurt.errors import DeviceError

        rngd.NODES = Path("nodes")
        rngd.NODES.mkdir()
        (rngd.NODES / "npu3mgmt").touch()
        device = rngd.RngdDevice()
        kit = device._kit

        def part(requires, *kinds):
            ports = tuple(Port(str(n), TensorType.from_str(kind)) for n, kind in enumerate(kinds))
            digest = "sha256:" + "0" * 64
            return Part("p", digest, ports[:2], ports[2:], (), digest, 1, rngd.MEDIA_TYPE, requires,
                        Numerics(1e-2, "pass"))

        requires = {"furiosa-torch": kit.version, "furiosa-compiler": kit.compiler, "fusion": "8"}
        kinds = ["bf16[4,256]", "bf16[4,256]", "bf16[4,256]"]
        for wanted in (requires | {"furiosa-compiler": "older"}, requires):
            try:
                device.check([part(wanted, *kinds)])
            except DeviceError as error:
                print(error.render())
        print("fusion", kit.furiosa.get_fusion().num_fusion)

        # Views, of host tensors: offsets in bytes, of any type, with the memory of what they are views of.
        raw = torch.arange(64, dtype=torch.uint8)
        view = kit.view(raw, 16, TensorType("bf16", (2, 4)))
        view.zero_()
        print("shared", raw[15:34].tolist(), view.dtype, tuple(view.shape))

        # A program: what it says of itself, and that it must be loaded first.
        from furiosa.torch import CompileModule
        from furiosa.torch._C.config import cache
        from furiosa.torch._C.config.compiler import CompilerConfig, ProgressMode
        cache.set_cache_config(root_dir=str(Path("cache").absolute()))

        class Sum(torch.nn.Module):
            def forward(self, x, y):
                return x + y

        samples = torch.ones(4, 256, dtype=torch.bfloat16), torch.ones(4, 256, dtype=torch.bfloat16)
        exported = torch.export.export(Sum(), samples, strict=False)
        quiet = CompilerConfig(progress_mode=ProgressMode.Silence)
        module = CompileModule.from_exported(exported, compiler_config=quiet)
        found = kit.furiosa.ir.Runnable.deserialize(module.runnable._inner.serialize())
        device._check_program(part(requires, *kinds), found)
        try:
            device._check_program(part(requires, "f32[4,256]", *kinds[1:]), found)
        except FormatError as error:
            print(error)
        try:
            found.execute(samples)
        except ValueError as error:
            print(error)
        print("plain", found.binary.nbytes > 0, found.stacks, hasattr(kit.furiosa.Runnable(found), "to"))
    """
    done = subprocess.run(
        [rngd_python, "-c", textwrap.dedent(program)],
        check=False, capture_output=True, text=True, timeout=600, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in (
        "furiosa-compiler: the bundle needs older",
        "error[device]: cannot open furiosa:0: ",
        "fusion 8\n",
        f"shared {[15, *[0] * 16, 32, 33]} torch.bfloat16 (2, 4)\n",
        "has a fusion of 8; the inputs bf16[4,256], bf16[4,256]; the outputs bf16[4,256]; the bundle says a fusion",
        "Runnable is not loaded.",
        "plain True [] True\n",
    ):
        assert text in done.stdout, done.stdout
