"""Programs for a device with memory of its own: what moves, who computes what, and that the numbers stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from npubundle.errors import FormatError
from npubundle.liveness import planned
from npubundle.part import Part
from npubundle.program import SPACES, Buffer, Call, Move, Operand, Program, Source
from npubundle.tensor import TensorType
from npurt import devices
from npurt.bundle import Bundle
from npurt.devices import DeviceOptions
from npurt.devices.cpu import CpuDevice
from npurt.devices.device import Device, Form
from npurt.errors import DeviceError
from npurt.gradient_check import check_gradients
from npurt.loading import memory_needed
from npurt.machine import Machine
from npurt.session import Session
from npurt.weights import Checkpoint
from tests.npurt import apart
from tests.npurt import toy_bundle as toy
from tests.npurt.test_session import SCALE, check_a_step, expected, fill

Array = NDArray[Any]


@pytest.fixture(params=["payload", "graph"])
def form(request: pytest.FixtureRequest) -> Form:
    chosen: Form = request.param
    return chosen


@pytest.fixture
def opened(form: Form, monkeypatch: pytest.MonkeyPatch) -> list[apart.FarDevice]:
    """The devices that were opened as `far`."""
    made: list[apart.FarDevice] = []

    def opener(_options: DeviceOptions) -> apart.FarDevice:
        made.append(apart.FarDevice(form))
        return made[-1]

    monkeypatch.setitem(devices._OPENERS, apart.TARGET, opener)
    return made


@pytest.fixture
def bundle(form: Form, tmp_path: Path) -> Iterator[Bundle]:
    path, key = apart.write_bundle(tmp_path, graphs=form == "graph")
    with Bundle.open(path, key) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return toy.write_weights(tmp_path / "weights")


@pytest.fixture
def session(bundle: Bundle, folder: Path, opened: list[apart.FarDevice]) -> Iterator[Session]:
    with Session.open(bundle, folder, device=apart.TARGET) as made:
        fill(made)
        yield made


def test_a_step_over_two_memories_is_the_step_in_one(session: Session) -> None:
    loss, gradient = expected()
    session.run("micro_step")
    session.write("accumulate", np.ones((), np.float32))
    session.run("micro_step")
    assert session.view("loss_sum") == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(session.read("grad"), 2 * gradient, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(session.read("grad_step.1"), gradient[toy.H :], rtol=1e-4, atol=1e-4)
    session.write("learning_rate", np.array(0.125, np.float32))
    session.run("update")
    np.testing.assert_allclose(session.read("lora"), SCALE - 0.25 * gradient, rtol=1e-4, atol=1e-4)
    session.run("evaluate")


def test_only_what_is_moved_crosses(session: Session, opened: list[apart.FarDevice]) -> None:
    (device,) = opened
    device.uploads.clear()
    device.downloads.clear()
    session.run("micro_step")
    session.finish()
    assert device.uploads == [f"f32[{toy.H}]"] * 4, "scales, for the forward and the backward pass of each layer"
    assert device.downloads == ["i32[]", *[f"f32[{toy.H}]"] * 2], "the repeat's count, and each layer's gradient"


def test_each_part_is_loaded_where_it_runs(session: Session, opened: list[apart.FarDevice], form: Form) -> None:
    parts = {call.part for phase in ("micro_step", "update") for call in session.program.calls(phase)}
    assert opened[0].loaded == parts - apart.HOST_PARTS
    assert all(name.endswith(".far") == (form == "graph") for name in opened[0].loaded)


def test_buffers_are_written_and_read_alike_in_both(session: Session) -> None:
    for name in ("lora.1", "loss_sum", "tokens"):
        value = session.read(name) + 1
        session.write(name, value)
        np.testing.assert_array_equal(session.view(name), value)
    np.testing.assert_array_equal(session.view("sign"), -1)


def test_weights_reach_memory_out_of_reach(session: Session) -> None:
    np.testing.assert_array_equal(session.read("w.1"), toy.weights()["layers.1.w"].T)


def test_gradients_agree_with_a_reference_on_the_host(
    bundle: Bundle, folder: Path, opened: list[apart.FarDevice]
) -> None:
    report = check_gradients(bundle, folder, device=apart.TARGET, layers=1)
    assert report.good
    assert [agreement.tensor for agreement in report.tensors] == ["layers.0.s"]
    assert check_gradients(bundle, folder, device=apart.TARGET).good
    assert len(opened) == 2, "the reference program opens no device"
    assert all(device.closed for device in opened)


def test_the_cpu_runs_a_devices_program_from_onnx_forms(bundle: Bundle, folder: Path) -> None:
    with Session.open(bundle, folder, device="cpu") as session:
        check_a_step(session)
    assert check_gradients(bundle, folder, device="cpu").good


def test_the_cpus_memory_is_one_for_both_spaces(bundle: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(memory_needed(bundle.program(), ["micro_step", "update"], s, constants=False) for s in SPACES)
    monkeypatch.setattr(CpuDevice, "available_memory", lambda _self: needed - 1)
    with pytest.raises(DeviceError, match="the program needs"):
        Session.open(bundle, folder, device="cpu")
    monkeypatch.setattr(CpuDevice, "available_memory", lambda _self: needed)
    Session.open(bundle, folder, device="cpu").close()


def test_without_an_onnx_form_the_cpu_says_which_part_lacks_it(tmp_path: Path, folder: Path) -> None:
    path, key = apart.write_bundle(tmp_path, graphs=True, onnx=False)
    with Bundle.open(path, key) as bare, pytest.raises(DeviceError, match=r"have no ONNX form \(\w+\.far is one\)"):
        Session.open(bare, folder, device="cpu")
    with Bundle.open(path, key) as bare, pytest.raises(FormatError, match=r"no ONNX form of part forward\.far"):
        bare.payload("forward.far", "onnx")


def test_the_usual_device_is_that_of_the_target(bundle: Bundle, folder: Path) -> None:
    assert [devices.device_for(target) for target in ("cpu", "rngd")] == ["cpu", "furiosa:auto"]
    assert devices.device_for("rngd", "cpu") == "cpu"
    with pytest.raises(DeviceError, match="no device of this release runs bundles for far by itself"):
        Session.open(bundle, folder)


def test_a_device_is_closed_when_the_host_cannot_be_opened(
    bundle: Bundle, folder: Path, opened: list[apart.FarDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_options: DeviceOptions) -> CpuDevice:
        raise DeviceError("no")

    monkeypatch.setitem(devices._OPENERS, devices.HOST, refuse)
    with pytest.raises(DeviceError, match="no"):
        Session.open(bundle, folder, device=apart.TARGET)
    assert opened[0].closed


def test_a_bundle_without_graphs_says_how_to_get_them(tmp_path: Path) -> None:
    path, key = toy.write_bundle(tmp_path)
    with Bundle.open(path, key) as plain, pytest.raises(FormatError, match="no graph of part forward") as caught:
        plain.payload("forward", "graph")
    assert caught.value.remedy == "rebuild with npucc build --graphs"


def test_memory_is_counted_by_space() -> None:
    program, phases = apart.program(), ["micro_step", "update"]
    both = sum(memory_needed(program, phases, space, constants=False) for space in ("device", "host"))
    host = memory_needed(program, phases, "host", constants=False)
    scalars = 4 * 4  # accumulate, learning_rate, sign, grad_norm
    assert host == 4 * toy.LAYERS * toy.H * 4 + scalars
    one = memory_needed(toy.program(), phases, constants=False)
    assert both >= one


def test_host_weights_are_filled_and_moved_and_bf16_is_what_ml_dtypes_calls_so(folder: Path) -> None:
    check_bf16(apart.FarDevice(), *bf16_parts(), folder)


def bf16_parts() -> tuple[dict[str, Part], dict[str, bytes]]:
    """`widen` for the device and `narrow` for the host, and their models."""
    text = "(bfloat16[4,4] x) => (float[4,4] y) { y = Cast <to = 1> (x) }"
    back = "(float[4,4] x) => (bfloat16[4,4] y) { y = Cast <to = 16> (x) }"
    raw = {"widen": toy.payload(text), "narrow": toy.payload(back)}
    return {name: toy.part(name, model) for name, model in raw.items()}, raw


def check_bf16(device: Device, parts: Mapping[str, Part], raw: Mapping[str, bytes], folder: Path) -> None:
    """A bf16 weight of the checkpoint in `folder` comes through `bf16_program` on a device as it was."""
    program = planned(bf16_program(TensorType("bf16", (toy.H, toy.H))))
    machine = Machine(program, parts, device, constants=False, host=CpuDevice())
    machine.prepare(["step"], Checkpoint.open(folder), lambda part, _form: raw[part])
    machine.run("step")
    wanted = toy.weights()["layers.0.w"]
    assert machine.read("again").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(machine.read("wide"), wanted)
    np.testing.assert_array_equal(machine.read("again"), wanted.astype(ml_dtypes.bfloat16))
    assert machine.view("again") is None
    machine.close()


def bf16_program(kind: TensorType) -> Program:
    """A weight on the host, moved up, made wide there, moved down and made narrow here, and moved up once more."""
    wide = TensorType("f32", kind.shape)
    buffers = [
        Buffer("w", kind, "weight", source=Source("layers.0.w"), space="host"),
        Buffer("w.up", kind, "activation"),
        Buffer("wide.up", wide, "activation"),
        Buffer("wide", wide, "output", space="host"),
        Buffer("narrow", kind, "activation", space="host"),
        Buffer("again", kind, "output"),
    ]
    step = (
        Move("w", "w.up", "h2d"),
        Call("widen", (Operand("w.up"),), (Operand("wide.up"),)),
        Move("wide.up", "wide", "d2h"),
        Call("narrow", (Operand("wide"),), (Operand("narrow"),), queue="host"),
        Move("narrow", "again", "h2d"),
    )
    return Program({b.name: b for b in buffers}, {"step": step})
