"""RNGD's executor as a device: with stand-ins for the vendor's code, and once with that code itself."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from npubundle.errors import FormatError
from npubundle.part import Numerics, Part, PartGraph, Port
from npubundle.tensor import TensorType
from npurt.devices import open_device
from npurt.devices.rngd_sim import GRAPH_MEDIA_TYPES, RngdSimDevice
from npurt.errors import DeviceError

DIGEST = "sha256:" + "0" * 64


def part(inputs: list[str], outputs: list[str]) -> Part:
    ports = [tuple(Port(str(n), TensorType.from_str(t)) for n, t in enumerate(side)) for side in (inputs, outputs)]
    graph = PartGraph(DIGEST, 1, min(GRAPH_MEDIA_TYPES))
    numerics = Numerics(1e-5, "pass")
    return Part("p", DIGEST, ports[0], ports[1], (), DIGEST, 1, "application/compiled", {}, numerics, graph)


class Panic(BaseException):
    """What a panic of the vendor's code looks like."""


class Executor:
    """Gives back its arguments' doubles as bare bytes."""

    @classmethod
    def deserialize(cls, payload: bytes) -> Executor:
        if payload != b"graph":
            raise Panic("no graph\nat some line")
        return cls()

    def execute(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        if any(torch.isnan(arg).any() for arg in args if arg.is_floating_point()):
            raise RuntimeError("cannot take NaN")
        return [(arg + arg).reshape(-1).view(torch.uint8) for arg in args]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> RngdSimDevice:
    names = ["furiosa", "furiosa.torch", "furiosa.torch._C", "furiosa.torch._C.executor"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "DfgExecutor", Executor, raising=False)
    monkeypatch.setattr(metadata, "version", lambda _name: "2026.4.0")
    opened = open_device("rngd-sim")
    assert isinstance(opened, RngdSimDevice)
    return opened


def test_it_doubles_tensors_of_every_kind_where_they_lie(device: RngdSimDevice) -> None:
    values: dict[str, Any] = {
        "f32[2,3]": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bf16[4]": np.arange(4).astype(ml_dtypes.bfloat16),
        "bf16[]": np.array(3, ml_dtypes.bfloat16),
        "i32[]": np.array(-7, np.int32),
        "f32[0]": np.zeros(0, np.float32),
    }
    regions = []
    for text, value in values.items():
        kind = TensorType.from_str(text)
        regions.append(device.allocate(64).region(0, kind))
        device.upload(value, regions[-1])
    bound = device.load(part(list(values), list(values)), b"graph", {}).bind(regions, regions)
    bound.run()
    bound.run()
    for region, value in zip(regions, values.values(), strict=True):
        assert device.download(region).dtype == value.dtype
        np.testing.assert_array_equal(device.host(region), value * np.array(4, value.dtype))


def test_results_of_another_size_than_the_bundle_says_are_refused(device: RngdSimDevice) -> None:
    one = device.allocate(4).region(0, TensorType("f32", ()))
    two = device.allocate(8).region(0, TensorType("f32", (2,)))
    bound = device.load(part(["f32[]"], ["f32[2]"]), b"graph", {}).bind([one], [two])
    with pytest.raises(FormatError, match=r"gives \[4\] bytes, the bundle says \[8\]"):
        bound.run()
    with pytest.raises(ValueError, match="not the inputs of part p"):
        device.load(part(["f32[]"], ["f32[2]"]), b"graph", {}).bind([two], [two])


def test_faults_name_the_part(device: RngdSimDevice) -> None:
    with pytest.raises(DeviceError, match=r"cannot load the graph of part p: no graph \(furiosa-torch 2026.4.0\)$"):
        device.load(part([], []), b"nonsense", {})
    place = device.allocate(4).region(0, TensorType("f32", ()))
    device.upload(np.array(np.nan, np.float32), place)
    with pytest.raises(DeviceError, match="part p failed: cannot take NaN"):
        device.load(part(["f32[]"], ["f32[]"]), b"graph", {}).bind([place], [place]).run()


def test_an_interrupt_is_nobody_elses_fault(device: RngdSimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_payload: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Executor, "deserialize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        device.load(part([], []), b"graph", {})


def test_graphs_are_asked_for_at_once(device: RngdSimDevice) -> None:
    good = part([], [])
    device.check(
        [
            good,
            dataclasses.replace(
                good, requires={"furiosa-torch": "furiosa-torch 2026.4.0 (rev: 5800e2ba24)", "fusion": "8"}
            ),
        ]
    )
    strange = dataclasses.replace(good, graph=PartGraph(DIGEST, 1, "text/plain"), requires={"furiosa-torch": "2027.1"})
    with pytest.raises(DeviceError) as caught:
        device.check([dataclasses.replace(good, graph=None), strange])
    said = [str(problem) for problem in caught.value.problems]
    assert "rebuild with npucc build --graphs" in said[0]
    assert said[1:] == [
        "parts: text/plain is no form of graph that this device runs",
        "furiosa-torch: the bundle needs 2027.1, 2026.4.0 is installed",
    ]


def test_without_the_vendors_kit_the_device_says_where_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "furiosa", None)
    with pytest.raises(DeviceError, match="needs furiosa-torch") as caught:
        open_device("rngd-sim")
    assert "in the environment where furiosa-torch is installed" in (caught.value.remedy or "")


@pytest.mark.timeout(1500)  # making the environment, the first time, takes minutes
def test_the_real_executor_computes_a_part(rngd_python: str, tmp_path: Path) -> None:
    program = """
        import numpy as np, torch
        from ml_dtypes import bfloat16
        from furiosa.torch import DfgModule
        from npubundle.part import Numerics, Part, PartGraph, Port
        from npubundle.tensor import TensorType
        from npurt.devices import open_device
        from npurt.devices.rngd_sim import GRAPH_MEDIA_TYPES

        class Product(torch.nn.Module):
            def forward(self, x, w, s):
                return [x @ w.t() * s, s + 1]

        samples = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16), torch.tensor(2.0)
        exported = torch.export.export(Product(), samples, strict=False)
        raw = bytes(DfgModule.from_exported(exported).dfg.serialize())
        kinds = [TensorType.from_str(t) for t in ("bf16[2,8]", "bf16[4,8]", "f32[]", "bf16[2,4]", "f32[]")]
        ports = [Port(str(n), kind) for n, kind in enumerate(kinds)]
        digest = "sha256:" + "0" * 64
        part = Part("p", digest, tuple(ports[:3]), tuple(ports[3:]), (), digest, 1, "x",
                    {"furiosa-torch": "2026.4.0"}, Numerics(1e-2, "pass"),
                    PartGraph(digest, len(raw), min(GRAPH_MEDIA_TYPES)))
        device = open_device("rngd-sim")
        device.check([part])
        block = device.allocate(64 * 5 * 2)
        regions = [block.region(128 * n, kind) for n, kind in enumerate(kinds)]
        x, w = (np.arange(8 * n).reshape(n, 8).astype(bfloat16) for n in (2, 4))
        for value, region in zip((x, w, np.float32(0.5)), regions):
            device.upload(value, region)
        bound = device.load(part, raw, {}).bind(regions[:3], regions[3:])
        bound.run()
        wanted = (x.astype(np.float32) @ w.astype(np.float32).T * 0.5).astype(bfloat16)
        np.testing.assert_array_equal(device.download(regions[3]), wanted)
        assert device.download(regions[4]) == 1.5
        try:
            device.load(part, b"nonsense", {})
        except Exception as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run(
        [rngd_python, "-c", textwrap.dedent(program)],
        check=False, capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "DeviceError" in done.stdout
    assert "cannot load the graph of part p" in done.stdout
