"""Parts and bundles for a card, that the stand-in for furiosa-torch can run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npubundle.digest import sha256_of
from npubundle.errors import ExitCode
from npubundle.part import Part
from npubundle.tensor import TensorType
from npurt.devices import rngd
from npurt.devices.device import Region
from npurt.devices.rngd import RngdDevice
from npurt.errors import DeviceError
from tests.npurt import apart
from tests.npurt import fake_furiosa as fake
from tests.npurt import toy_bundle as toy

REQUIRES = {"furiosa-torch": fake.VERSION, "furiosa-compiler": fake.COMPILER, "fusion": "8"}
ADD = "(float[4] x, float[4] y) => (float[4] sum, float[4] twice) { sum = Add(x, y) twice = Add(sum, sum) }"
F32 = TensorType("f32", (4,))


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
