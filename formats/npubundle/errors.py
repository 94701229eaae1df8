"""The errors a user sees, in one shape for all three packages.

Every failure that a person can act on says three things: what went wrong, where, and what to do about it.
Each package derives one root from `Error` (`npucc.errors.CompilerError`, `npurt.errors.RuntimeFault`), so that a
program that embeds a package can catch just that one.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterable
from dataclasses import dataclass


class ExitCode(enum.IntEnum):
    """Process exit codes, the same for `npucc` and `npurt`."""

    OK = 0
    FIXABLE = 1
    USAGE = 2
    UNSUPPORTED = 3
    RESOURCE = 4
    INTEGRITY = 5
    DATA = 6
    MISMATCH = 7
    DIVERGED = 8
    INTERNAL = 70
    INTERRUPTED = 130
    TERMINATED = 143


_SHOWN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a document: its place (`rope_scaling.type`, `train.jsonl:3:17`) and the fault."""

    where: str
    what: str

    def __str__(self) -> str:
        """`where: what`, as it is printed below the headline."""
        return f"{self.where}: {self.what}"


class Error(Exception):
    """Root of all errors that npubundle, npucc and npurt raise on purpose."""

    code = "error"
    exit_code = ExitCode.FIXABLE

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        remedy: str | None = None,
        problems: Iterable[Problem] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy
        self.problems = tuple(problems)

    def __str__(self) -> str:
        """The message, its place and its problems, in a form fit for a log line or a traceback."""
        place = f" ({self.where})" if self.where else ""
        return self.what + place + "".join(f"\n  {problem}" for problem in self.problems)

    def render(self) -> str:
        """The text that a command prints on standard error: `error[code]: …`, `where: …`, the problems, `hint: …`.

        Control characters, which names and texts of strangers may hold, are shown and do not reach the terminal.
        """
        lines = [f"error[{self.code}]: {self.what}"]
        if self.where:
            lines.append(f"  where: {self.where}")
        lines += [f"  - {problem}" for problem in self.problems]
        if self.remedy:
            lines.append(f"  hint: {self.remedy}")
        return "\n".join(lines).translate(_SHOWN)

    def as_dict(self) -> dict[str, object]:
        """The same, for `--json`."""
        return {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "remedy": self.remedy,
            "problems": [{"where": p.where, "what": p.what} for p in self.problems],
            "exit_code": int(self.exit_code),
        }


class IntegrityError(Error):
    """Bytes are not what their digest, signature or canonical form promises."""

    code = "integrity"
    exit_code = ExitCode.INTEGRITY


class SignatureError(IntegrityError):
    """No signature that the trust policy accepts."""

    code = "signature"


class FormatError(IntegrityError):
    """A document does not have the form that its specification gives it."""

    code = "format"


class FileError(Error):
    """A file or folder that the user named is missing, unreadable, in the way, or of the wrong kind."""

    code = "file"


class ResourceError(Error):
    """The machine lacks something: space on the disk, a working device."""

    code = "resource"
    exit_code = ExitCode.RESOURCE


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def os_failure(error: OSError, doing: str) -> Error:
    """The error to raise for a failed system call: `doing` completes "cannot …", as in "write the bundle"."""
    kind = ResourceError if error.errno in _NO_SPACE else FileError
    return kind(f"cannot {doing}: {error.strerror or error}", where=str(error.filename) if error.filename else None)
