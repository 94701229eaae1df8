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

#: `furiosa` with a number, or with the choice left to npurt.
_FURIOSA = re.compile(r"furiosa(?::(?:auto|(\d{1,4})))?", re.ASCII)

#: Names that `open_device` knows, N being a number; `furiosa` alone is `furiosa:auto`.
NAMES = (*_OPENERS, "furiosa:N", "furiosa:auto")


def open_device(name: str, options: DeviceOptions | None = None) -> Device:
    """Open a device. Raises `DeviceError` if there is none of this name or it cannot be used."""
    opener = _OPENERS.get(name)
    if opener is not None:
        return opener(options or DeviceOptions())
    if found := _FURIOSA.fullmatch(name):
        return _furiosa(None if found[1] is None else int(found[1]))
    raise DeviceError(f"there is no device {name!r}", remedy=f"devices of this release: {', '.join(NAMES)}")
