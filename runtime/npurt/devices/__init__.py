"""Devices by name. An adapter is one file here; it imports its vendor's runtime only when it is opened."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from npurt.devices.device import Device
from npurt.errors import DeviceError


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What a user may say about a device. `threads`: CPU threads that compute together; None for one per usable CPU."""

    threads: int | None = None


def _cpu(options: DeviceOptions) -> Device:
    from npurt.devices.cpu import CpuDevice

    return CpuDevice(options.threads)


def _rngd_sim(_options: DeviceOptions) -> Device:
    from npurt.devices.rngd_sim import RngdSimDevice

    return RngdSimDevice()


def _furiosa(index: int | None) -> Device:
    from npurt.devices.rngd import RngdDevice

    return RngdDevice(index)


#: The device whose memory is the host's space of a program.
HOST = "cpu"

_OPENERS: dict[str, Callable[[DeviceOptions], Device]] = {HOST: _cpu, "rngd-sim": _rngd_sim}

#: The name for whatever a bundle was built for, and what that is.
OWN = "auto"
_OF_TARGET = {"cpu": HOST, "rngd": "furiosa:auto"}

#: `furiosa` with a number, or with the choice left to npurt.
_FURIOSA = re.compile(r"furiosa(?::(?:auto|(\d{1,4})))?", re.ASCII)

#: Names that `open_device` knows, N being a number; `furiosa` alone is `furiosa:auto`.
NAMES = (*_OPENERS, "furiosa:N", "furiosa:auto")


def device_for(target: str, name: str = OWN) -> str:
    """The device that a user means by a name, for a bundle of this target. Raises `DeviceError` if `auto` has none."""
    if name != OWN:
        return name
    if target not in _OF_TARGET:
        raise DeviceError(
            f"no device of this release runs bundles for {target} by itself",
            remedy=f"name one: {', '.join(NAMES)}",
        )
    return _OF_TARGET[target]


def open_device(name: str, options: DeviceOptions | None = None) -> Device:
    """Open a device. Raises `DeviceError` if there is none of this name or it cannot be used."""
    opener = _OPENERS.get(name)
    if opener is not None:
        return opener(options or DeviceOptions())
    if found := _FURIOSA.fullmatch(name):
        return _furiosa(None if found[1] is None else int(found[1]))
    raise DeviceError(f"there is no device {name!r}", remedy=f"devices of this release: {', '.join(NAMES)}")
