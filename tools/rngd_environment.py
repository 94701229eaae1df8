"""Make the RNGD toolchain's own environment and print the path of its Python on stdout and nothing else.

furiosa-torch pins a torch of its own and takes 7 GB, so it lives apart from the development environment, outside the
checkout, and is made once for each set of pins: below `$NPUCC_CACHE`, `$XDG_CACHE_HOME/npucc` or `~/.cache/npucc`. The
compiler also calls the cross compiler for the card's cores, which comes from the system's packages.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from environment import install_system_packages, run
from smollm2 import cache_root

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints-rngd.txt"
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
    pip: list[str | Path] = [
        home / "bin" / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-cache-dir",
    ]
    run(*pip, "-c", CONSTRAINTS, *PACKAGES)
    (home / "complete").touch()


def _say(text: str) -> None:
    print(f"rngd-env: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
