"""A bundle, the weights of a model and a device, made ready to run: checked, loaded, and driven by names of buffers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

import numpy as np

from npubundle.config import BundleConfig
from npubundle.liveness import truncated
from npubundle.program import Program
from npurt.arrays import Array, dtype_of
from npurt.bundle import Bundle
from npurt.devices import DeviceOptions, open_device
from npurt.devices.device import Device
from npurt.errors import DeviceError, UsageError
from npurt.loading import memory_needed
from npurt.machine import Machine, Progress
from npurt.parameters import initial
from npurt.weights import Checkpoint
from npurt.weights_fit import check_fit

Prepack = Literal["auto", "on", "off"]

#: Packing all layers takes a second for a model of 135 million parameters and makes a step of 128 tokens some 5 %
#: faster, one of 512 hardly at all. A run must be long for that to be worth the later start and the weights' copy.
PAYS_AFTER = 1000
#: Share of the free memory that `auto` may plan to use.
_COMFORTABLE = 0.8
#: What training runs; other phases are loaded when they are first run.
_TRAINING = ("micro_step", "update")


class Session:
    """A program with memory for its buffers and a device that runs its phases. Buffers are named as in the program."""

    def __init__(self, bundle: Bundle, program: Program, checkpoint: Checkpoint, device: Device, *, pack: bool) -> None:
        """Allocate buffers. `open` is the usual way here; this one takes what is decided and checked already."""
        self.program = program
        self.prepacked = pack
        self._bundle = bundle
        self._checkpoint = checkpoint
        self._device = device
        self._machine = Machine(program, bundle.parts, device, constants=pack)

    @classmethod
    def open(  # noqa: PLR0913 -- what a user may choose, each by keyword and with a default
        cls,
        bundle: Bundle,
        weights: str | Path,
        *,
        device: str = "cpu",
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
        """
        if prepack not in get_args(Prepack):
            raise UsageError(f"prepack is {prepack!r}", remedy=f"it can be {', '.join(get_args(Prepack))}")
        opened = open_device(device, DeviceOptions(threads))
        try:
            _check_target(bundle, opened)
            chosen = _cut(bundle.program(program), layers)
            opened.check([bundle.parts[part] for part in chosen.parts()])
            checkpoint = Checkpoint.open(weights)
            check_fit(checkpoint, chosen, bundle.config.model)
            eager = [p for p in _TRAINING if p in chosen.phases] if phases is None else list(phases)
            _check_phases(chosen, eager)
            pack = _pack(prepack, chosen, eager, opened, expected_micro_steps)
            session = cls(bundle, chosen, checkpoint, opened, pack=pack)
            session.prepare(eager, progress)
        except BaseException:
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

    def run(self, phase: str) -> None:
        """Execute a phase to its end.

        Raises `DeviceError` if a part fails, `DataError` if a count is beyond its limit.
        """
        if not self._machine.prepared(phase):
            self.prepare([phase])
        self._machine.run(phase)

    def write(self, name: str, value: Array) -> None:
        """Fill a buffer, or a view of one; the value must have its shape and dtype. Raises `UsageError` otherwise."""
        region = self._machine.region(name)
        array = np.asarray(value)
        if array.shape != region.kind.shape or array.dtype != dtype_of(region.kind):
            raise UsageError(f"{name} is {region.kind}, the value is {array.dtype}{list(array.shape)}")
        self._device.upload(array, region)

    def read(self, name: str) -> Array:
        """A copy of the content of a buffer or view."""
        return self._device.download(self._machine.region(name))

    def view(self, name: str) -> Array:
        """The content until the next call; without a copy where the device computes in host memory."""
        region = self._machine.region(name)
        array = self._device.host(region)
        return self._device.download(region) if array is None else array

    def init_parameters(self, seed: int) -> None:
        """Give trained parameters their initial values, a function of the seed and their names; zero the moments."""
        for buffer in (*self.program.with_role("param"), *self.program.with_role("moment")):
            has_own_value = buffer.init is not None or buffer.view_of is None
            if has_own_value:
                self.write(buffer.name, initial(buffer, seed))

    def close(self) -> None:
        """Release memory and device. Nothing else may be called afterwards."""
        self._machine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_target(bundle: Bundle, device: Device) -> None:
    target = bundle.config.target.name
    if target not in device.targets:
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


def _pack(prepack: Prepack, program: Program, phases: Sequence[str], device: Device, micro_steps: int | None) -> bool:
    """Whether to pack; raises `DeviceError` if there is no memory for what was chosen."""
    free = device.available_memory()
    if prepack == "auto":
        pays = device.prepacks and (micro_steps or 0) >= PAYS_AFTER
        pack = pays and memory_needed(program, phases, constants=True) < _COMFORTABLE * free
    else:
        pack = prepack == "on" and device.prepacks
    needed = memory_needed(program, phases, constants=pack)
    if needed > free:
        raise DeviceError(
            f"the program needs {needed / 1e9:.2f} GB of memory, {free / 1e9:.2f} GB are free",
            remedy="use --prepack off" if pack else "free memory, or rebuild the bundle with a smaller --memory-budget",
        )
    return pack
