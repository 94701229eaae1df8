"""Runs of the command line, with the simulator as its engine, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Cli:
    """`cli("train", …)` runs the command; options that every training needs are there already."""

    folder: Path
    model: Path
    data: Path

    @property
    def out(self) -> Path:
        return self.folder / "adapter"

    @property
    def log(self) -> Path:
        return self.folder / "run.jsonl"

    def common(self, command: str) -> list[str]:
        words = ["--bundle", "any.npub", "--weights", str(self.model), "--data", str(self.data)]
        if command == "train":
            words += ["--out", str(self.out), "--steps", "4", "--lr", "0.05", "--log-file", str(self.log)]
        return words if command in {"train", "eval"} else []

    def start(
        self, command: str, *words: str, simulator: dict[str, Any] | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        settings = {"SIMULATOR": json.dumps(simulator or {}), "SIMULATOR_ALIVE": str(self.folder / "alive")}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NPURT_")}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.npurt.simulated_cli", command, *self.common(command), *words],
            cwd=ROOT,
            env=clean | settings | {"COLUMNS": "100"} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, command: str, *words: str, simulator: dict[str, Any] | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        with self.start(command, *words, simulator=simulator, env=env) as process:
            stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def wait_for_micro_step(self, number: int) -> None:
        """Until the simulator is inside this micro-step."""
        self.wait_until(lambda: int((self.folder / "alive").read_text() or 0) >= number)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if happened():
                    return
            except FileNotFoundError:
                pass
            time.sleep(0.01)
        pytest.fail("waited in vain")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def cli(tmp_path: Path, simulated_model: Path, rows: Path) -> Cli:
    return Cli(tmp_path, simulated_model, rows)
