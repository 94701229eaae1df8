"""What tests of all packages share: the one real model, and the environment of RNGD's toolchain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16, made on the first use; a test that needs it fails without it."""
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "smollm2.py"], check=False, capture_output=True, text=True, timeout=600
    )
    if made.returncode != 0:
        pytest.fail(f"the test model cannot be made:\n{made.stderr}")
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def rngd_python() -> str:
    """The Python of RNGD's toolchain, whose environment is made on the first use; a test that needs it fails without.

    Making it takes minutes: tests that ask for it need a longer time limit.
    """
    tool = ROOT / "tools" / "rngd_environment.py"
    made = subprocess.run([sys.executable, tool], check=False, capture_output=True, text=True, timeout=1400)
    if made.returncode != 0:
        pytest.fail(f"the RNGD environment cannot be made:\n{made.stderr}")
    return made.stdout.strip()
