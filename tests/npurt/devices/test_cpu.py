"""The CPU device: parts of ONNX Runtime, their operands, and what is refused before anything runs."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import textwrap
import weakref
from typing import Any

import numpy as np
import pytest

from npubundle.errors import FormatError
from npubundle.part import Part, Port
from npubundle.tensor import TensorType
from npurt.devices import open_device
from npurt.devices.cpu import CpuDevice
from npurt.devices.device import Region
from npurt.errors import DeviceError
from tests.npurt import toy_bundle as toy

SIZE = 600
PRODUCT = f"""
    (float[2,{SIZE}] x, float[{SIZE}] n, float[{SIZE},{SIZE}] w, float[{SIZE},{SIZE}] v) => (float[2,{SIZE}] y)
    {{ a = Mul(x, n) b = Gemm <transB = 1> (a, w) t = Transpose <perm = [1, 0]> (v) y = MatMul(b, t) }}"""


def made(graph: str, **changes: object) -> tuple[Part, bytes]:
    raw = toy.payload(graph)
    return toy.part("made", raw, **changes), raw


def place(device: CpuDevice, array: object, dtype: str) -> Region:
    value = np.asarray(array)
    kind = TensorType(dtype, value.shape)
    region = device.allocate(kind.nbytes).region(0, kind)
    device.upload(value, region)
    return region


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice()


def test_the_registry_opens_it() -> None:
    assert open_device("cpu").name == "cpu"


def test_memory_is_aligned_and_zero(device: CpuDevice) -> None:
    for nbytes in (0, 1, 64, 1000):
        memory = device.allocate(nbytes).memory
        assert nbytes == 0 or memory.ctypes.data % 64 == 0
        assert memory.shape == (nbytes,)
        assert not memory.any()


def test_memory_that_is_not_there_is_a_device_error(device: CpuDevice) -> None:
    with pytest.raises(DeviceError, match="cannot allocate"):
        device.allocate(1 << 60)


def test_constants_are_kept_by_the_executable_and_not_by_reference(device: CpuDevice) -> None:
    part, raw = made(PRODUCT)
    rng = np.random.default_rng(0)
    shapes = [port.type.shape for port in part.inputs]
    x, n, w, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    wanted = ((x * n) @ w.T @ v.T).astype(np.float64)
    constants = {1: n, 2: w, 3: v}
    executable = device.load(part, raw, constants)
    for array in constants.values():
        array[...] = np.nan
    gone = [weakref.ref(array) for array in constants.values()]
    del n, w, v, array, constants
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    result = place(device, np.zeros((2, SIZE), np.float32), "f32")
    executable.bind([place(device, x, "f32")], [result]).run()
    np.testing.assert_allclose(device.download(result), wanted, rtol=1e-3, atol=1e-2)


def test_empty_and_scalar_operands(device: CpuDevice) -> None:
    part, raw = made("(float[0] x, float s) => (float[0] y, float t) { y = Add(x, s) t = Add(s, s) }".replace(
        "float s", "float[] s").replace("float t", "float[] t"))  # fmt: skip
    executable = device.load(part, raw, {})
    y, t = place(device, np.zeros(0, np.float32), "f32"), place(device, np.float32(0), "f32")
    executable.bind([place(device, np.zeros(0, np.float32), "f32"), place(device, np.float32(2), "f32")], [y, t]).run()
    assert device.download(t) == 4


@pytest.mark.parametrize(
    ("port", "kind", "what"),
    [
        ("inputs", TensorType("i32", (3,)), "inputs f32[3]; the bundle says i32[3]"),
        ("inputs", TensorType("f32", (2,)), "inputs f32[3]; the bundle says f32[2]"),
        ("outputs", TensorType("f32", (4,)), "outputs f32[3]; the bundle says f32[4]"),
    ],
)
def test_a_payload_with_other_types_than_the_bundle_says_never_runs(
    device: CpuDevice, port: str, kind: TensorType, what: str
) -> None:
    part, raw = made("(float[3] x) => (float[3] y) { y = Neg(x) }")
    lie: Any = {port: (Port("x", kind),)}
    lying = dataclasses.replace(part, **lie)
    with pytest.raises(FormatError) as caught:
        device.load(lying, raw, {})
    assert what in str(caught.value)


def test_a_missing_output_is_noticed(device: CpuDevice) -> None:
    part, raw = made("(float[3] x) => (float[3] y) { y = Neg(x) }")
    with pytest.raises(FormatError, match="bundle says none"):
        device.load(dataclasses.replace(part, outputs=()), raw, {})


def test_a_payload_that_onnxruntime_cannot_load_names_the_part(device: CpuDevice) -> None:
    part, _ = made("(float[3] x) => (float[3] y) { y = Neg(x) }")
    with pytest.raises(DeviceError, match="cannot load part made"):
        device.load(part, b"not a model", {})


def test_a_part_that_fails_names_itself(device: CpuDevice) -> None:
    part, raw = made("(float[3] x, int32[1] i) => (float[1] y) { y = Gather(x, i) }")
    executable = device.load(part, raw, {})
    args = [place(device, np.zeros(3, np.float32), "f32"), place(device, np.array([7], np.int32), "i32")]
    bound = executable.bind(args, [place(device, np.zeros(1, np.float32), "f32")])
    with pytest.raises(DeviceError, match="part made failed"):
        bound.run()


def test_requirements_are_reported_together(device: CpuDevice) -> None:
    needs = {"onnxruntime": "99.0", "opset": "999", "cpu": "x86-64-v4", "sorcery": "3"}
    part, _ = made("(float[3] x) => (float[3] y) { y = Neg(x) }", requires=needs)
    bare, _ = made("(float[3] x) => (float[3] y) { y = Neg(x) }", media_type="text/plain")
    with pytest.raises(DeviceError) as caught:
        device.check([part, dataclasses.replace(bare, name="bare")])
    assert "1 have no ONNX form (bare is one); rebuild the bundle" in str(caught.value)
    assert {problem.where for problem in caught.value.problems} == {"parts", *needs}


def test_requirements_that_are_met(device: CpuDevice) -> None:
    part, _ = made("(float[3] x) => (float[3] y) { y = Neg(x) }")
    device.check([part])


def test_all_sessions_share_the_threads_that_were_asked_for() -> None:
    program = """
        import threading, numpy as np, sys
        from npurt.devices.cpu import CpuDevice
        from tests.npurt import toy_bundle as toy
        device = CpuDevice(3)
        raw = toy.payload("(float[3] x) => (float[3] y) { y = Neg(x) }")
        sessions = [device.load(toy.part("p", raw), raw, {}) for _ in range(5)]
        names = open("/proc/self/status").read()
        print(next(line.split()[1] for line in names.splitlines() if line.startswith("Threads")), device.threads)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=True, capture_output=True, text=True, timeout=60
    )
    threads, wanted = map(int, done.stdout.split())
    assert wanted == 3
    assert threads < 10  # ours, the pool's, and what libraries start when they are imported; a pool each would be more


def test_without_onnxruntime_the_device_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "npurt.devices.cpu")
    with pytest.raises(DeviceError, match="needs onnxruntime") as caught:
        open_device("cpu")
    assert caught.value.remedy == "pip install 'npurt[cpu]'"
