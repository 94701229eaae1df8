"""The two memory spaces of a program, and the device that each of them belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from npubundle.program import Call, Space
from npurt.devices.device import Device
from npurt.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Devices:
    """Where a program runs. `host` is the CPU with the memory beside `device`; None if the program does without."""

    device: Device
    host: Device | None = None

    def of(self, space: Space) -> Device:
        """The device in whose memory a space lies."""
        if space == "device":
            return self.device
        if self.host is None:
            raise DeviceError("the program computes on the host, which was not opened for it")
        return self.host

    def all(self) -> tuple[Device, ...]:
        """Each of them once."""
        return (self.device,) if self.host in {None, self.device} else (self.device, self.of("host"))


def space_of(call: Call) -> Space:
    """The space whose device runs a call."""
    return "host" if call.queue == "host" else "device"
