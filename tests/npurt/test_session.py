"""Running programs: the toy bundle through a session, against the same mathematics in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from npubundle.errors import FormatError
from npurt import session as sessions
from npurt.bundle import Bundle
from npurt.devices.cpu import CpuDevice
from npurt.errors import DataError, DeviceError, MismatchError, UsageError
from npurt.session import Session
from tests.npurt import toy_bundle as toy

Array = NDArray[Any]
TOKENS = np.array([3, 1, 4, 1, 5, 9], np.int32)
ROWS = np.array([[0, 1], [2, 5], [3, 0]], np.int32)
WEIGHTS = np.array([[1, 1], [1, 0.5], [1, 0]], np.float32)
SCALE = np.linspace(-1, 1, toy.LAYERS * toy.H, dtype=np.float32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    path, key = toy.write_bundle(tmp_path_factory.mktemp("toy"))
    with Bundle.open(path, key) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(params=["off", "on"])
def session(request: pytest.FixtureRequest, bundle: Bundle, folder: Path) -> Iterator[Session]:
    with Session.open(bundle, folder, prepack=request.param) as opened:
        fill(opened)
        yield opened


def fill(session: Session, blocks: int = toy.B) -> None:
    for name, value in {"tokens": TOKENS, "rows": ROWS, "weights": WEIGHTS, "lora": SCALE}.items():
        session.write(name, value)
    session.write("blocks", np.array(blocks, np.int32))
    session.write("accumulate", np.zeros((), np.float32))


def expected(blocks: int = toy.B) -> tuple[float, Array]:
    rows, weights = ROWS[:blocks].ravel(), WEIGHTS[:blocks].ravel()
    result: tuple[float, Array] = toy.micro_step(toy.weights(), SCALE, TOKENS, rows, weights)
    return result


def check_a_step(session: Session) -> None:
    """Loss and gradient of one micro-step are those of float64, on whatever device the session has opened."""
    loss, gradient = expected()
    fill(session)
    session.run("micro_step")
    assert session.read("loss_sum") == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(session.read("grad"), gradient, rtol=1e-4, atol=1e-4)


def test_micro_step_computes_loss_and_gradient(session: Session) -> None:
    check_a_step(session)


def test_gradients_accumulate_in_place(session: Session) -> None:
    _, gradient = expected()
    session.run("micro_step")
    session.write("accumulate", np.ones((), np.float32))
    session.run("micro_step")
    np.testing.assert_allclose(session.read("grad"), 2 * gradient, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(session.read("grad_step"), gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_a_repeat_runs_as_often_as_its_count_says(session: Session, blocks: int) -> None:
    loss, gradient = expected(blocks)
    before = np.full((toy.B, toy.N), -7, np.float32)
    session.write("logprobs", before)
    session.write("blocks", np.array(blocks, np.int32))
    session.run("micro_step")
    assert session.read("loss_sum") == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(session.read("grad"), gradient, rtol=1e-4, atol=1e-4)
    written = (session.read("logprobs") != before).all(axis=1)
    assert written.tolist() == [True] * blocks + [False] * (toy.B - blocks)


@pytest.mark.parametrize("blocks", [-1, 4])
def test_a_count_beyond_the_limit_is_refused(session: Session, blocks: int) -> None:
    session.write("blocks", np.array(blocks, np.int32))
    with pytest.raises(DataError, match=f"blocks is {blocks}; the bundle's limit is 3"):
        session.run("micro_step")


def test_update_uses_the_fixed_scalar_and_writes_in_place(session: Session) -> None:
    session.run("micro_step")
    gradient = session.read("grad")
    session.write("learning_rate", np.array(0.125, np.float32))
    session.run("update")
    np.testing.assert_allclose(session.read("lora"), SCALE - 0.125 * gradient, rtol=1e-5, atol=1e-6)
    assert session.read("grad_norm") == pytest.approx(np.linalg.norm(gradient), rel=1e-5)


def test_views_share_memory_with_their_buffer(session: Session) -> None:
    session.write("lora.1", np.full(toy.H, 9, np.float32))
    np.testing.assert_array_equal(session.read("lora"), [*SCALE[: toy.H], 9, 9, 9, 9])
    np.testing.assert_array_equal(session.view("lora.1"), [9, 9, 9, 9])


def test_read_copies_and_view_does_not(session: Session) -> None:
    copied, seen = session.read("lora"), session.view("lora")
    session.write("lora", SCALE + 1)
    np.testing.assert_array_equal(copied, SCALE)
    np.testing.assert_array_equal(seen, SCALE + 1)


def test_a_phase_that_was_not_loaded_is_loaded_when_it_runs(session: Session) -> None:
    session.write("lora", SCALE)
    session.run("evaluate")
    session.run("micro_step")
    assert session.read("loss_sum") == pytest.approx(expected()[0], rel=1e-5)


def test_packed_and_unpacked_weights_give_equal_results(bundle: Bundle, folder: Path) -> None:
    results: list[Array] = []
    prepack: sessions.Prepack
    for prepack in ("off", "on"):
        with Session.open(bundle, folder, prepack=prepack) as session:
            assert session.prepacked == (prepack == "on")
            fill(session)
            session.run("micro_step")
            results.append(session.read("grad"))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_packed_weights_have_no_other_memory(bundle: Bundle, folder: Path) -> None:
    with Session.open(bundle, folder, prepack="on") as session:
        np.testing.assert_array_equal(session.read("table"), toy.weights()[toy.EMBEDDING])
        with pytest.raises(KeyError, match="w\\.0 has no memory of its own"):
            session.read("w.0")


def test_weights_are_transformed_on_the_way_in(bundle: Bundle, folder: Path) -> None:
    with Session.open(bundle, folder, prepack="off") as session:
        np.testing.assert_array_equal(session.read("w.1"), toy.weights()["layers.1.w"].T)
        np.testing.assert_array_equal(session.read("head.1"), toy.weights()[toy.EMBEDDING][toy.V // 2 :])


@pytest.mark.parametrize("prepack", ["off", "on"])
def test_a_program_can_be_cut_to_its_first_layers(bundle: Bundle, folder: Path, prepack: sessions.Prepack) -> None:
    tensors = toy.weights()
    with Session.open(bundle, folder, layers=1, prepack=prepack) as session:
        fill(session)
        session.run("micro_step")
        scale = SCALE.copy()
        scale[toy.H :] = 0  # a layer with a scale of zero does nothing
        loss, gradient = toy.micro_step(tensors, scale, TOKENS, ROWS.ravel(), WEIGHTS.ravel())
        assert session.read("loss_sum") == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(session.read("grad_step.0"), gradient[: toy.H], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [0, 3])
def test_a_number_of_layers_that_the_model_does_not_have_is_refused(bundle: Bundle, folder: Path, layers: int) -> None:
    with pytest.raises(UsageError, match=f"the model has 2 layers, {layers} were asked for"):
        Session.open(bundle, folder, layers=layers)


def test_parameters_start_as_the_program_says(session: Session) -> None:
    session.write("moment1", SCALE)
    session.init_parameters(seed=3)
    lora = session.read("lora")
    assert not lora[: toy.H].any()
    assert lora[toy.H :].all()
    assert np.abs(lora).max() <= 1 / np.sqrt(toy.H)
    assert not session.read("moment1").any()


def test_progress_ends_at_the_number_of_jobs(bundle: Bundle, folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Session.open(bundle, folder, progress=lambda done, jobs: seen.append((done, jobs))):
        pass
    jobs = seen[0][1]
    assert seen == [(done, jobs) for done in range(jobs + 1)]
    assert jobs > 0


def test_a_written_value_must_have_the_type_of_the_buffer(session: Session) -> None:
    with pytest.raises(UsageError, match=r"lora is f32\[8\], the value is float64\[8\]"):
        session.write("lora", SCALE.astype(np.float64))
    with pytest.raises(UsageError, match=r"blocks is i32\[\], the value is int32\[1\]"):
        session.write("blocks", np.array([1], np.int32))


def test_an_unknown_phase_is_named_with_the_known_ones(session: Session) -> None:
    with pytest.raises(UsageError, match="no phase 'logits'") as caught:
        session.run("logits")
    assert "logits = true" in (caught.value.remedy or "")


def test_unknown_device_prepack_and_program(bundle: Bundle, folder: Path) -> None:
    with pytest.raises(DeviceError, match="there is no device 'abacus'") as caught:
        Session.open(bundle, folder, device="abacus")
    assert "cpu" in (caught.value.remedy or "")
    with pytest.raises(UsageError, match="prepack is 'maybe'"):
        Session.open(bundle, folder, prepack="maybe")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="no program 'other'"):
        Session.open(bundle, folder, program="other")


def test_a_bundle_for_another_target_is_refused(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "targets", frozenset({"cpu"}))  # as devices that load compiled payloads have it
    path, key = toy.write_bundle(tmp_path, target="rngd")
    with Bundle.open(path, key) as other, pytest.raises(DeviceError, match="built for rngd") as caught:
        Session.open(other, folder, device="cpu")
    assert "npucc build --target cpu" in (caught.value.remedy or "")


def test_weights_of_another_model_are_refused_before_anything_is_loaded(bundle: Bundle, tmp_path: Path) -> None:
    folder = toy.write_weights(tmp_path / "other", rms_norm_eps=1e-3)
    with pytest.raises(MismatchError, match="rms_norm_eps"):
        Session.open(bundle, folder, progress=lambda done, jobs: pytest.fail(f"loading: {done}/{jobs}"))


def test_another_thread_count_in_the_same_process_is_refused(bundle: Bundle, folder: Path) -> None:
    with Session.open(bundle, folder), pytest.raises(UsageError, match="cannot change to 63"):
        Session.open(bundle, folder, threads=63)


def test_so_many_threads_that_the_host_would_stand_still_are_refused(bundle: Bundle, folder: Path) -> None:
    with pytest.raises(UsageError, match="4096 threads are too many"):
        Session.open(bundle, folder, threads=4096)


AUTO: list[tuple[str, int | None, int, bool]] = [
    ("too few steps to pay", sessions.PAYS_AFTER - 1, 1 << 40, False),
    ("length unknown", None, 1 << 40, False),
    ("enough steps and memory", sessions.PAYS_AFTER, 1 << 40, True),
    ("enough steps, little memory", 1000, 1300, False),
]


@pytest.mark.parametrize(("steps", "free", "packed"), [case[1:] for case in AUTO], ids=[case[0] for case in AUTO])
def test_auto_packs_if_it_pays_and_memory_is_ample(
    bundle: Bundle, folder: Path, steps: int | None, free: int, packed: bool, limit_memory: Callable[[int], None]
) -> None:
    limit_memory(free)
    with Session.open(bundle, folder, expected_micro_steps=steps) as session:
        assert session.prepacked == packed


def test_too_little_memory_is_said_before_it_is_taken(
    bundle: Bundle, folder: Path, limit_memory: Callable[[int], None]
) -> None:
    limit_memory(500)
    with pytest.raises(DeviceError, match=r"of memory, 0\.00 GB are free"):
        Session.open(bundle, folder)


@pytest.fixture
def limit_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def limit(free: int) -> None:
        monkeypatch.setattr("npurt.devices.host_memory.available_memory", lambda: free)

    return limit
