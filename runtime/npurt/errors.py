"""The faults that `npurt` raises on purpose, each with the exit code of its kind."""

from __future__ import annotations

from npubundle.errors import Error, ExitCode


class RuntimeFault(Error):
    """Root of npurt's own errors; a program that embeds npurt catches this one."""


class UsageError(RuntimeFault):
    """An option has a value that it cannot have."""

    code = "usage"
    exit_code = ExitCode.USAGE


class DeviceError(RuntimeFault):
    """A device is missing, too small, or failed."""

    code = "device"
    exit_code = ExitCode.RESOURCE


class DataError(RuntimeFault):
    """Training data, tokenizer or chat template cannot give the tokens to train on."""

    code = "data"
    exit_code = ExitCode.DATA


class MismatchError(RuntimeFault):
    """Two things that belong together do not fit: weights and bundle, saved state and data."""

    code = "mismatch"
    exit_code = ExitCode.MISMATCH


class DivergedError(RuntimeFault):
    """A loss or gradient is no longer a finite number."""

    code = "diverged"
    exit_code = ExitCode.DIVERGED
