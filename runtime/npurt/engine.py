"""What the training loop needs of whatever executes a program: the whole interface between the two.

`npurt.session.Session` is the implementation that runs bundles; tests train a small model written in numpy through the
same interface. The names of buffers and phases are those of `docs/reference/program.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from npubundle.config import BundleConfig
from npubundle.program import Program

Array: TypeAlias = NDArray[Any]
Float32: TypeAlias = NDArray[np.float32]


class Engine(Protocol):
    """A program with memory for its buffers and a device that runs its phases."""

    @property
    def program(self) -> Program:
        """The training program."""

    @property
    def config(self) -> BundleConfig:
        """`bundle.json` of the bundle that the program comes from."""

    @property
    def manifest_digest(self) -> str:
        """Digest of the bundle's manifest: equal digest, equal program and parts."""

    def write(self, name: str, value: Array) -> None:
        """Fill a buffer, or a view of one; shape and dtype are the buffer's own."""

    def read(self, name: str) -> Array:
        """A copy of a buffer's or view's content."""

    def view(self, name: str) -> Array:
        """The content to look at before the next call; without a copy where the device's memory is the host's."""

    def run(self, phase: str) -> None:
        """Execute a phase. It may still be at work afterwards; `read`, `view` and `write` wait for it."""

    def init_parameters(self, seed: int) -> None:
        """Fill trained parameters (weights from the checkpoint, others by the seed), and moments with zeros."""

    def close(self) -> None:
        """Release memory and device. Nothing else may be called afterwards."""


def parameter_views(program: Program) -> dict[str, str]:
    """For each trained tensor, in the order of exported names: the name under which it is exported, and its buffer."""
    named = {
        buffer.tensor: name for name, buffer in program.buffers.items() if buffer.role == "param" and buffer.tensor
    }
    return dict(sorted(named.items()))


def first_micro_step(program: Program) -> str:
    """The phase of the first micro-step of an optimizer step."""
    return "first_micro_step" if "first_micro_step" in program.phases else "micro_step"


def state_buffers(program: Program) -> tuple[str, ...]:
    """The buffers that make up the state of a run: trained parameters and moments, without views into them."""
    return tuple(
        name
        for name, buffer in program.buffers.items()
        if buffer.role in {"param", "moment"} and buffer.view_of is None
    )


class StateArrays(Mapping[str, Float32]):
    """Copies of the buffers of `state_buffers` by name, each made when it is asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names = state_buffers(engine.program)

    def __getitem__(self, name: str) -> Float32:
        """A copy of the buffer."""
        return self._engine.read(name)

    def __iter__(self) -> Iterator[str]:
        """The names, in the program's order."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)
