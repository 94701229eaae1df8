"""What npucc raises on purpose."""

from __future__ import annotations

from npubundle.errors import Error, ExitCode


class CompilerError(Error):
    """Root of npucc's errors."""

    code = "compiler"


class UsageError(CompilerError):
    """The command's arguments do not make sense together."""

    code = "usage"
    exit_code = ExitCode.USAGE


class UnsupportedModelError(CompilerError):
    """The model, or something it needs, is not one that npucc compiles."""

    code = "unsupported-model"
    exit_code = ExitCode.UNSUPPORTED


class UnsupportedOperatorError(CompilerError):
    """A graph has an operator that the target cannot express."""

    code = "unsupported-operator"
    exit_code = ExitCode.UNSUPPORTED


class ResourceError(CompilerError):
    """Memory, disk or a tool of the host is not enough."""

    code = "resource"
    exit_code = ExitCode.RESOURCE


class NumericsError(CompilerError):
    """A compiled part computes something else than its graph says."""

    code = "numerics"
    exit_code = ExitCode.FIXABLE


class InternalError(CompilerError):
    """A fault of npucc itself, not of its user."""

    code = "internal"
    exit_code = ExitCode.INTERNAL
