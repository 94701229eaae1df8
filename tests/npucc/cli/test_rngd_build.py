"""`npucc build --target rngd` as a command, from the first part to the bundle and through kills.

In place of furiosa-torch, a stand-in "compiles" to the graph itself and computes it with PyTorch. The real compiler is
in `tests/npucc/workers` and `tests/e2e`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.npucc import tiny
from tests.npucc.rngd_stand_in import interpreter

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Farm:
    """A host with the stand-in, a model and a key."""

    root: Path

    def npucc(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "npucc", *map(str, words)]

    def step(self, cache: str) -> list[object]:
        lora = ["--rank", 3, "--seq-len", tiny.SEQ_LEN, "--targets", "q,v,down"]
        return ["--model", self.root / "config.json", "--target", "rngd", *lora, "--cache-dir", self.root / cache]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"NPUCC_RNGD_PYTHON": str(self.root / "sdk" / "python"), "HOME": str(self.root)}

    def run(self, *words: object, code: int = 0) -> str:
        done = subprocess.run(
            self.npucc(*words), env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == code, done.stderr
        return done.stdout

    def build(self, name: str, cache: str, *words: object) -> dict[str, object]:
        files = ["--key", self.root / "key", "-o", self.root / f"{name}.npub", "--json", "--progress", "plain"]
        found: dict[str, object] = json.loads(self.run("build", *self.step(cache), *files, *words))
        return found

    def workers(self) -> list[int]:
        """Stand-ins that live."""
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and str(self.root / "sdk" / "worker.py") in command_line(entry)
        ]


def command_line(entry: Path) -> Sequence[str]:
    try:
        return (entry / "cmdline").read_text().split("\0")
    except OSError:
        return ()


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    made = Farm(tmp_path_factory.mktemp("farm"))
    interpreter(made.root / "sdk")
    (made.root / "config.json").write_text(json.dumps(tiny.config()))
    made.run("keygen", "--out", made.root / "key")
    return made


@pytest.fixture(scope="module")
def whole(farm: Farm) -> dict[str, object]:
    """A build that nobody disturbed."""
    return farm.build("whole", "cache", "-j", 2)


def test_all_parts_are_compiled_and_pass_their_check(farm: Farm, whole: dict[str, object]) -> None:
    assert whole["cached"] == 0
    told = json.loads(farm.run("inspect", farm.root / "whole.npub", "--trust", farm.root / "key.pub", "--json"))
    device = [part for part in told["parts"] if part["media_type"].endswith("+furiosa-rngd")]
    assert len(device) > 20
    assert all(part["numerics"]["verdict"] == "pass" and part["graph"] and part["estimate"] for part in device)
    assert all(part["onnx"]["size"] > 0 and part["onnx"]["requires"]["onnxruntime"] for part in device)
    assert not any("onnx" in part for part in told["parts"] if part not in device)
    assert told["estimate"]["phases"]["micro_step"]["launches"] > 0


@pytest.mark.parametrize(
    "flag", [("--fusion", 4), ("--tactic", "Default"), ("--max-shapes", 1), ("--verify", "lowered")]
)
def test_what_changes_a_program_compiles_again(farm: Farm, whole: dict[str, object], flag: tuple[object, ...]) -> None:
    del whole
    plan = json.loads(farm.run("plan", *farm.step("cache"), *flag, "--json"))
    compiled = [part["name"] for part in plan["parts"] if not part["cached"]]
    assert "layer.forward.save.0" in compiled
    assert "embed" not in compiled  # of the host


def test_another_rank_compiles_only_what_has_lora_matrices(farm: Farm, whole: dict[str, object]) -> None:
    del whole
    step = [word if word != 3 else 5 for word in farm.step("cache")]
    plan = json.loads(farm.run("plan", *step, "--json"))
    missing = {part["name"] for part in plan["parts"] if not part["cached"]}
    assert {"accumulate", "clip", "adamw", "layer.forward.save.0"} <= missing
    told = json.loads(farm.run("inspect", farm.root / "whole.npub", "--trust", farm.root / "key.pub", "--json"))
    inputs = {part["name"]: part["inputs"] for part in told["parts"]}
    for name in missing - {"accumulate", "clip", "adamw", "reference.accumulate"}:
        # A LoRA matrix, or a value that is as wide as the rank.
        assert any(".lora_" in port["name"] or "3]" in port["type"] for port in inputs[name]), name


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_killed_build_loses_at_most_the_parts_in_flight(farm: Farm, whole: dict[str, object], seed: int) -> None:
    (farm.root / "sdk" / "seconds").write_text("0.05")
    cache, done = f"killed{seed}", random.Random(seed).randrange(2, 15)
    words = ["build", *farm.step(cache), "--key", farm.root / "key", "-o", farm.root / "killed.npub", "-j", 2]
    command = farm.npucc(*words, "--progress", "plain")
    with subprocess.Popen(command, env=farm.environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        finished: list[str] = []
        for line in process.stderr:
            ours = "[trace]" not in line and "[onnx]" not in line
            if line.rstrip().rpartition(" ")[0].endswith("DONE") and ours:
                finished.append(line.split()[2])
            if len(finished) == done:
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
    (farm.root / "sdk" / "seconds").write_text("0")
    assert not (farm.root / "killed.npub").exists()
    plan = json.loads(farm.run("plan", *farm.step(cache), "--json"))
    cached = {part["name"] for part in plan["parts"] if part["cached"]}
    assert set(finished) <= cached
    again = farm.build(f"again{seed}", cache, "-j", 2)
    assert again["digest"] == whole["digest"]
    assert isinstance(again["cached"], int)
    assert again["cached"] >= done - 1  # parts of equal graphs are counted once
    assert farm.workers() == []


def test_a_worker_that_is_killed_is_replaced(farm: Farm, whole: dict[str, object]) -> None:
    (farm.root / "sdk" / "seconds").write_text("0.2")
    words = ["build", *farm.step("replaced"), "--key", farm.root / "key", "-o", farm.root / "replaced.npub", "--json"]
    (farm.root / "sdk" / "compiled").unlink()
    with subprocess.Popen(
        farm.npucc(*words, "--progress", "quiet"), env=farm.environment, stdout=subprocess.PIPE, text=True
    ) as process:
        log = farm.root / "sdk" / "compiled"
        while not log.exists() or not log.read_text().endswith("\n"):
            assert process.poll() is None
        os.kill(int(log.read_text().split()[0]), signal.SIGKILL)
        (farm.root / "sdk" / "seconds").write_text("0")
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert json.loads(out)["digest"] == whole["digest"]
