"""The device of RNGD against a stand-in for furiosa-torch: no card was at hand."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from npubundle.errors import FormatError
from npubundle.tensor import TensorType
from npurt.bundle import Bundle
from npurt.devices import rngd
from npurt.devices.rngd import RngdDevice
from npurt.gradient_check import check_gradients
from npurt.session import Session
from tests.npurt import fake_furiosa as fake
from tests.npurt import toy_bundle as toy
from tests.npurt.rngd_parts import ADD, F32, REQUIRES, compiled, failure, regions, rngd_part, write_bundle
from tests.npurt.test_apart import bf16_parts, check_bf16
from tests.npurt.test_session import SCALE, check_a_step, fill

Array = NDArray[Any]


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
    with Session.open(bundle, folder, device="furiosa:0") as session:
        check_a_step(session)


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
    parts, models = bf16_parts()
    parts["widen"], models["widen"] = rngd_part(parts["widen"], models["widen"])
    device = RngdDevice()
    device.check([parts["widen"]])
    check_bf16(device, parts, models, folder)


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
