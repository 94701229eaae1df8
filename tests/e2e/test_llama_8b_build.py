"""A model of eight billion parameters is built from its dimensions alone, with little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from npubundle import keys, verification
from npubundle.trust import TrustPolicy

CONFIG = Path(__file__).parents[1] / "npucc" / "data" / "llama-3.1-8b.json"
SIX_GB = 6 * 10**9


def test_llama_8b_is_built_in_less_than_six_gigabytes(tmp_path: Path) -> None:
    keys.save(keys.generate(), tmp_path / "dev")
    command = [sys.executable, "-m", "npucc", "build", "--model", str(CONFIG), "--target", "cpu", "--rank", "16"]
    command += ["--targets", "q,v", "--seq-len", "512", "--key", "dev", "-o", "llama.npub", "--json"]
    environment = os.environ | {"NPUCC_CACHE": str(tmp_path / "cache")}
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)  # the usage of this process, and of no other child
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (tmp_path / "err").read_text()
    told = json.loads((tmp_path / "out").read_text())
    assert usage.ru_maxrss * 1024 < SIX_GB
    assert told["cached"] == 0
    assert told["memory_peak"] > 8e9 * 4  # what training needs is another matter: the weights in f32
    assert (tmp_path / "llama.npub").stat().st_size < 1 << 20
    verified = verification.verify(tmp_path / "llama.npub", TrustPolicy.from_paths([tmp_path / "dev.pub"]))
    assert verified.digest == told["digest"]
