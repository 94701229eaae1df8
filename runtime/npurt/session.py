"""A bundle, the weights of a model and a device, made ready to run: checked, loaded, and driven by names of buffers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

import numpy as np

from npubundle.config import BundleConfig
from npubundle.liveness import truncated
from npubundle.program import SPACES, Program, Space
from npurt.arrays import Array, dtype_of
from npurt.bundle import Bundle
from npurt.devices import HOST, OWN, DeviceOptions, device_for, open_device
from npurt.devices.device import Device
from npurt.errors import DeviceError, UsageError
from npurt.loading import memory_needed
from npurt.machine import Machine, Progress
from npurt.parameters import initial
from npurt.spaces import Devices, space_of
from npurt.timeline import Timeline
from npurt.weights import Checkpoint
from npurt.weights_fit import check_fit

Prepack = Literal["auto", "on", "off"]

#: Packing all layers takes a second for a model of 135 million parameters and makes a step of 128 tokens some 5 %
#: faster, one of 512 hardly at all. A run must be long for that to be worth the later start and the weights' copy.
PAYS_AFTER = 1000
#: Share of the free memory that `auto` may plan to use.
_COMFORTABLE = 0.8
_MORE_MEMORY = "free memory, or rebuild the bundle with a smaller --memory-budget"
#: What training runs; other phases are loaded when they are first run.
_TRAINING = ("upload", "first_micro_step", "micro_step", "norm", "update")


class Session:
    """A program with memory for its buffers and a device that runs its phases. Buffers are named as in the program.

    In whose memory a buffer lies makes no difference to `write`, `read` and `view`.
    """

    def __init__(
        self, bundle: Bundle, program: Program, checkpoint: Checkpoint, devices: Devices, *, pack: bool
    ) -> None:
        """Allocate buffers. `open` is the usual way here; this one takes what is decided and checked already."""
        self.program = program
        self.prepacked = pack
        self._bundle = bundle
        self._checkpoint = checkpoint
        self._machine = Machine(program, bundle.parts, devices.device, constants=pack, host=devices.host)

    @classmethod
    def open(  # noqa: PLR0913 -- what a user may choose, each by keyword and with a default
        cls,
        bundle: Bundle,
        weights: str | Path,
        *,
        device: str = OWN,
        prepack: Prepack = "auto",
        threads: int | None = None,
        expected_micro_steps: int | None = None,
        phases: Sequence[str] | None = None,
        layers: int | None = None,
        program: str = "train",
        progress: Progress | None = None,
    ) -> Self:
        """Check device and weights against the bundle, then load the phases (default: those of training).

        `prepack` packs the layers' weights once instead of at every step, for about twice their memory; `auto` does so
        if `expected_micro_steps` are enough to pay for it and memory is ample. `layers` cuts the model down to its
        first layers, for checks. The bundle must stay open as long as phases may be loaded. Raises `DeviceError`,
        `MismatchError` with all that does not fit, `WeightsError` for damaged files, `UsageError`.

        `device` is by default what the bundle was built for. A program with buffers on the host runs its host calls on
        the CPU. One that has no others opens no device.
        """
        if prepack not in get_args(Prepack):
            raise UsageError(f"prepack is {prepack!r}", remedy=f"it can be {', '.join(get_args(Prepack))}")
        chosen = _cut(bundle.program(program), layers)
        devices = _open_devices(bundle, chosen, device, DeviceOptions(threads))
        try:
            _check_parts(bundle, chosen, devices)
            checkpoint = Checkpoint.open(weights)
            check_fit(checkpoint, chosen, bundle.config.model)
            eager = [p for p in _TRAINING if p in chosen.phases] if phases is None else list(phases)
            _check_phases(chosen, eager)
            pack = _pack(prepack, chosen, eager, devices, expected_micro_steps)
            session = cls(bundle, chosen, checkpoint, devices, pack=pack)
            session.prepare(eager, progress)
        except BaseException:
            for opened in devices.all():
                opened.close()
            raise
        return session

    @property
    def config(self) -> BundleConfig:
        """`bundle.json` of the bundle."""
        return self._bundle.config

    @property
    def manifest_digest(self) -> str:
        """Digest of the bundle's manifest: equal digest, equal program and parts."""
        return self._bundle.manifest_digest

    def prepare(self, phases: Sequence[str], progress: Progress | None = None) -> None:
        """Load phases now that would otherwise be loaded when they first run. `progress` gets (done, all) jobs."""
        _check_phases(self.program, phases)
        self._machine.prepare(phases, self._checkpoint, self._bundle.payload, progress)

    def record(self, timeline: Timeline | None) -> None:
        """Note from now on when each instruction runs; None: no longer."""
        self._machine.record(timeline)

    def run(self, phase: str) -> None:
        """Execute a phase. Where its queues overlap, it may end later: what is read or written waits where it has to.

        Raises `DeviceError` if a part fails, `DataError` if a count is beyond its limit.
        """
        if not self._machine.prepared(phase):
            self.prepare([phase])
        self._machine.run(phase)

    def finish(self) -> None:
        """Wait until nothing is at work. Raises as `run` does."""
        self._machine.finish()

    def write(self, name: str, value: Array) -> None:
        """Fill a buffer, or a view of one; the value must have its shape and dtype. Raises `UsageError` otherwise."""
        region = self._machine.region(name)
        array = np.asarray(value)
        if array.shape != region.kind.shape or array.dtype != dtype_of(region.kind):
            raise UsageError(f"{name} is {region.kind}, the value is {array.dtype}{list(array.shape)}")
        self._machine.write(name, array)

    def read(self, name: str) -> Array:
        """A copy of the content of a buffer or view."""
        return self._machine.read(name)

    def view(self, name: str) -> Array:
        """The content until the next call; without a copy where the device computes in host memory."""
        array = self._machine.view(name)
        return self._machine.read(name) if array is None else array

    def init_parameters(self, seed: int) -> None:
        """Give trained parameters their initial values, and zero the moments.

        Weights come from the checkpoint; what is added to them is a function of the seed and of its name.
        """
        for buffer in (*self.program.with_role("param"), *self.program.with_role("moment")):
            has_own_value = buffer.init is not None or buffer.view_of is None
            if has_own_value:
                self.write(buffer.name, initial(buffer, seed))
        self._machine.fill([b for b in self.program.with_role("param") if b.source], self._checkpoint)
        if "upload" in self.program.phases:
            self.run("upload")

    def close(self) -> None:
        """Release memory and device. Nothing else may be called afterwards."""
        self._machine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_devices(bundle: Bundle, program: Program, name: str, options: DeviceOptions) -> Devices:
    """The device, if the program has anything there, and the host's CPU, likewise."""
    if not program.uses("device"):
        cpu = open_device(HOST, options)
        return Devices(cpu, cpu)
    chosen = device_for(bundle.config.target.name, name)
    device = open_device(chosen, options)
    try:
        _check_target(bundle, device)
        if not program.uses("host"):
            return Devices(device)
        return Devices(device, device if chosen == HOST else open_device(HOST, options))
    except BaseException:
        device.close()
        raise


def _check_parts(bundle: Bundle, program: Program, devices: Devices) -> None:
    for space in SPACES:
        calls = (call for phase in program.phases for call in program.calls(phase) if space_of(call) == space)
        names = sorted({call.part for call in calls})
        if names:
            devices.of(space).check([bundle.parts[name] for name in names])


def _check_target(bundle: Bundle, device: Device) -> None:
    target = bundle.config.target.name
    if device.targets is not None and target not in device.targets:
        raise DeviceError(
            f"the bundle was built for {target}, which the device {device.name} cannot run",
            remedy=f"rebuild it with npucc build --target {min(device.targets)}",
        )


def _cut(program: Program, layers: int | None) -> Program:
    if layers is None or layers == program.layers:
        return program
    if not 1 <= layers <= program.layers:
        raise UsageError(f"the model has {program.layers} layers, {layers} were asked for", remedy="ask for fewer")
    return truncated(program, layers)


def _check_phases(program: Program, phases: Sequence[str]) -> None:
    for phase in phases:
        if phase not in program.phases:
            remedy = f"it has {', '.join(program.phases)}" + (
                "; rebuild it with logits = true in the recipe" if phase == "logits" else ""
            )
            raise UsageError(f"the bundle's program has no phase {phase!r}", remedy=remedy)


def _pack(prepack: Prepack, program: Program, phases: Sequence[str], devices: Devices, micro_steps: int | None) -> bool:
    """Whether to pack; raises `DeviceError` if there is no memory for what was chosen."""
    used = tuple(space for space in SPACES if program.uses(space))
    memories = [used] if devices.host is devices.device else [(space,) for space in used]
    free = {spaces: devices.of(spaces[0]).available_memory() for spaces in memories}

    def needed(spaces: Sequence[Space], *, constants: bool) -> int:
        return sum(memory_needed(program, phases, space, constants=constants) for space in spaces)

    if prepack == "auto":
        pays = devices.device.prepacks and (micro_steps or 0) >= PAYS_AFTER
        pack = pays and all(needed(spaces, constants=True) < _COMFORTABLE * free[spaces] for spaces in memories)
    else:
        pack = prepack == "on" and devices.device.prepacks
    for spaces, most in free.items():
        if (least := needed(spaces, constants=pack)) > most:
            raise DeviceError(
                f"the program needs {least / 1e9:.2f} GB of memory, {most / 1e9:.2f} GB are free",
                where=f"memory of the {spaces[0]}" if len(free) > 1 else None,
                remedy="use --prepack off" if pack else _MORE_MEMORY,
            )
    return pack
