"""An export that is killed at any of its system calls leaves no folder of its name, and the next one clears up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from npurt.export.model import save_model
from npurt.storage import PARTIAL
from npurt.weights import Checkpoint
from tests.npurt.test_weights import sharded

KILLED = """
import os, signal, sys
from pathlib import Path
from npurt.export.model import save_model
from npurt.weights import Checkpoint

base, out, moment = Checkpoint.open(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
calls = 0

def watched(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "open"), (os, "preadv")):
    setattr(owner, name, watched(getattr(owner, name)))
save_model(out, base, {})
"""


def killed_at(base: Path, out: Path, moment: int) -> bool:
    """Export in a process that is killed at its n-th system call; False once it gets through."""
    done = subprocess.run([sys.executable, "-c", KILLED, base, out, str(moment)], check=False, timeout=60)
    assert done.returncode in {0, -signal.SIGKILL}
    return done.returncode != 0


def test_kill_at_any_moment_leaves_a_whole_folder_or_none(tmp_path: Path) -> None:
    tensors = {f"{name}.safetensors": {name: np.ones(3, np.float32)} for name in ("a", "b")}
    base = sharded(tmp_path / "base", tensors)
    (tmp_path / "out").mkdir()
    whole = {"config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    whole |= {"model.safetensors.index.json"}
    for moment in range(1, 100):
        out = tmp_path / "out" / str(moment)
        killed = killed_at(base, out, moment)
        if out.exists():
            assert {path.name for path in out.iterdir()} == whole
            Checkpoint.open(out)
        if not killed:
            break
    else:
        pytest.fail("the export never ended")
    left = list((tmp_path / "out").glob(f".*{PARTIAL}"))
    assert left, "no kill fell into the export"
    for path in left:
        os.utime(path, (0, 0))
        name = path.name.split(".")[1]
        save_model(tmp_path / "out" / name, Checkpoint.open(base), {})
    assert not list((tmp_path / "out").glob(f".*{PARTIAL}"))
