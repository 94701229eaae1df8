"""Make `.venv`, the development environment, and print its bin folder on stdout and nothing else.

Run by every target of the Makefile, so it must cost nothing when there is nothing to do: a stamp in the environment
holds a digest of everything that decides what is installed. It needs only the standard library of the Python it is
started with, which must be one that npucc supports and becomes the environment's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
BIN = ENVIRONMENT / "bin"
STAMP = ENVIRONMENT / "pins.sha256"
CONSTRAINTS = ROOT / "constraints.txt"
PROJECTS = [ROOT / "formats", ROOT / "runtime", ROOT]
PIP = "pip==26.3"
# What builds the three projects; installed first, because editable installs without build isolation need it.
BUILD_TOOLS = ["hatchling", "editables"]
PYTHONS = ((3, 11), (3, 13))


def pins() -> str:
    """Digest of what decides the environment's content: versions, dependencies, where the projects lie."""
    tables = ("build-system", "project", "dependency-groups")
    described = {}
    for project in PROJECTS:
        settings = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
        described[str(project)] = {table: settings.get(table) for table in tables}
    text = json.dumps([PIP, BUILD_TOOLS, sys.version_info[:2], CONSTRAINTS.read_text(encoding="utf-8"), described])
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> int:
    """Bring the environment up to date if it is not, then print its bin folder."""
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        _say(f"{sys.executable} is Python {sys.version.split()[0]}; needed: 3.11 to 3.13 (make PYTHON=python3.12 …)")
        return 1
    wanted = pins()
    if not _is(wanted):
        with _alone():
            if not _is(wanted):  # another make may have been at it while this one waited
                try:
                    _install()
                except subprocess.CalledProcessError as error:
                    _say(f"failed (exit {error.returncode}): {' '.join(map(str, error.cmd))}")
                    return 1
                STAMP.write_text(wanted, encoding="ascii")
    print(BIN)
    return 0


def _say(text: str) -> None:
    print(f"env: {text}", file=sys.stderr, flush=True)


def _is(wanted: str) -> bool:
    """Whether the environment is there, was finished, and from the same pins."""
    return STAMP.is_file() and STAMP.read_text(encoding="ascii") == wanted and _usable()


def _usable() -> bool:
    """Whether the environment exists and its Python is of the version asked for."""
    return (BIN / "python").exists() and (ENVIRONMENT / "lib" / "python{}.{}".format(*sys.version_info)).is_dir()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One installation at a time: the lock is the operating system's, and goes with its process."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "env.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install() -> None:
    """Create the environment where it is missing or broken, and install everything pinned into it."""
    _say(f"installing into {ENVIRONMENT.relative_to(ROOT)}, a few minutes the first time")
    if not _usable():
        _need_venv()
        run(sys.executable, "-m", "venv", "--clear", ENVIRONMENT)
    pip: list[str | Path] = [BIN / "python", "-m", "pip", "--disable-pip-version-check", "install", "-c", CONSTRAINTS]
    run(BIN / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", PIP)
    run(*pip, "--quiet", *BUILD_TOOLS)
    editable = [argument for name in ("formats", "runtime[cpu]", ".[hub]") for argument in ("-e", name)]
    run(*pip, "--no-build-isolation", "--group", "dev", *editable)


def _need_venv() -> None:
    """Debian ships `venv` apart from Python; install it where that can be done without asking."""
    probe = [sys.executable, "-c", "import ensurepip, venv"]
    if subprocess.run(probe, check=False, capture_output=True).returncode == 0:
        return
    install_system_packages("this Python lacks venv", [f"python3.{sys.version_info.minor}-venv"])


def install_system_packages(what_is_missing: str, packages: Sequence[str]) -> None:
    """Install Debian packages where that can be done without asking; otherwise say which, and end."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        _say(f"{what_is_missing}; install it first (Debian: apt-get install {' '.join(packages)})")
        raise SystemExit(1)
    run("apt-get", "update", "-q")
    run("apt-get", "install", "-q", "-y", "--no-install-recommends", *packages)


def run(*command: str | Path) -> None:
    """Run with the output on stderr, where progress belongs."""
    subprocess.run(command, check=True, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
