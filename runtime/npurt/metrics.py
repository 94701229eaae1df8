"""The log of a run: one JSON object per line, which scripts read while it grows and after it has ended.

    {"event": "run", "bundle": {…}, "config": {…}, "versions": {…}, "data": {…}, …}
    {"event": "step", "step": 1, "loss": 2.31, "grad_norm": 0.8, "lr": 6.7e-05, …}
    {"event": "evaluation", "step": 100, "loss": 2.02, "perplexity": 7.5, "accuracy": 0.53, "tokens": 4096}
    {"event": "end", "status": "finished", "steps": 400, "adapter": "adapter", …}

A run appends to its file, so a later run never destroys what an earlier one wrote. Every object has the time (`time`,
seconds since 1970) and is written at once, in one piece.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from npubundle.errors import os_failure
from npurt.reports import StepReport

_PACKAGES = ("npurt", "npubundle", "numpy", "onnxruntime", "tokenizers", "safetensors")


def versions() -> dict[str, str]:
    """Versions of what a run depends on; absent packages are left out."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


class RunLog:
    """Appends events to a file; without a path, it swallows them.

    A write that fails does not end the training: `on_fault` is then called with the reason, once, and nothing more is
    written.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file, which is made if need be. Raises `FileError` or `ResourceError` if it cannot be."""
        self.on_fault: Callable[[str], None] = lambda _: None
        self._path = path
        self._handle: int | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A pipe without a reader is an error at once, rather than a wait without end.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._handle = os.open(path, flags, 0o666)
            os.set_blocking(self._handle, True)
        except OSError as error:
            raise os_failure(error, "open the log file") from error

    def __enter__(self) -> Self:
        """The log itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether events go anywhere."""
        return self._handle is not None

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Append one object."""
        if self._handle is None:
            return
        line = json.dumps({"event": event, "time": round(time.time(), 3)} | dict(values), ensure_ascii=False)
        try:
            os.write(self._handle, (line + "\n").encode())
        except OSError as error:
            self.close()
            self.on_fault(f"the log file {self._path} ends here: {error.strerror or error}")

    def step(self, report: StepReport) -> None:
        """Append a step, and the evaluation after it as an object of its own."""
        values = report.to_dict()
        values.pop("evaluation", None)
        self.write("step", values)
        if report.evaluation is not None:
            self.write("evaluation", {"step": report.step} | report.evaluation.to_dict())
