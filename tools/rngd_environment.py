"""Make the RNGD toolchain's own environment and print the path of its Python on stdout and nothing else.

furiosa-torch pins a torch of its own and takes 7 GB, so it lives apart from the development environment, outside the
checkout, and is made once for each set of pins: below `$NPUCC_CACHE`, `$XDG_CACHE_HOME/npucc` or `~/.cache/npucc`. The
compiler also calls the cross compiler for the card's cores, which comes from the system's packages.

npurt is installed there too, editable from this checkout, for its device `rngd-sim`. That is done again when another
checkout has put its own there, or what npurt depends on has changed; the toolchain's own packages keep their versions.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import environment
from environment import install_system_packages, run
from smollm2 import cache_root

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints-rngd.txt"
RUNTIME = [ROOT / "formats", ROOT / "runtime"]
PACKAGES = ["furiosa-torch==2026.4.0", "numpy"]
CROSS_COMPILER = "aarch64-linux-gnu-gcc"
SYSTEM_PACKAGES = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"]


def folder() -> Path:
    """Where the environment of these pins is or will be."""
    decides = json.dumps([PACKAGES, sys.version_info[:2], CONSTRAINTS.read_text(encoding="utf-8")])
    return cache_root() / "rngd" / hashlib.sha256(decides.encode()).hexdigest()[:16]


def main() -> int:
    """Make what is missing, then print the path of the environment's Python."""
    home = folder()
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _need_cross_compiler()
            if not (home / "complete").exists():
                _install(home)
            if not _has_runtime(home):
                _install_runtime(home)
        except subprocess.CalledProcessError as error:
            _say(f"failed (exit {error.returncode}): {' '.join(map(str, error.cmd))}")
            return 1
    print(home / "bin" / "python")
    return 0


def _need_cross_compiler() -> None:
    if shutil.which(CROSS_COMPILER):
        return
    install_system_packages(f"{CROSS_COMPILER} is missing", SYSTEM_PACKAGES)


def _install(home: Path) -> None:
    _say(f"installing furiosa-torch into {home}: 7 GB, about five minutes, once")
    run(sys.executable, "-m", "venv", "--clear", home)
    run(*_pip(home), "-c", CONSTRAINTS, *PACKAGES)
    (home / "complete").touch()


def runtime_stamp() -> str:
    """Digest of what decides how npurt is installed: where the checkout lies, and what npurt needs."""
    settings = [(project / "pyproject.toml").read_text(encoding="utf-8") for project in RUNTIME]
    decides = json.dumps([str(ROOT), settings, runtime_constraints()])
    return hashlib.sha256(decides.encode()).hexdigest()


def runtime_constraints() -> str:
    """The toolchain's pins, and for all that it does not need those of the development environment."""
    pins = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    taken = {_name(pin) for pin in pins}
    more = environment.CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return "\n".join([*pins, *(pin for pin in more if _name(pin) not in taken)]) + "\n"


def _name(pin: str) -> str:
    return pin.partition("==")[0].lower().replace("_", "-")


def _has_runtime(home: Path) -> bool:
    stamp = home / "runtime.sha256"
    return stamp.is_file() and stamp.read_text(encoding="ascii") == runtime_stamp()


def _install_runtime(home: Path) -> None:
    _say(f"installing npurt from {ROOT.name} into it")
    pins = home / "runtime-constraints.txt"
    pins.write_text(runtime_constraints(), encoding="utf-8")
    run(*_pip(home), "-c", pins, *environment.BUILD_TOOLS)
    formats, runtime = RUNTIME
    run(*_pip(home), "-c", pins, "--no-build-isolation", "-e", formats, "-e", f"{runtime}[cpu]")
    (home / "runtime.sha256").write_text(runtime_stamp(), encoding="ascii")


def _pip(home: Path) -> list[str | Path]:
    python = home / "bin" / "python"
    return [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-cache-dir"]


def _say(text: str) -> None:
    print(f"rngd-env: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
