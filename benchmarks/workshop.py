"""What the benchmarks share: the model, a bundle for it, worker processes that print one JSON object, and medians.

Contenders run in processes of their own, in turn, round after round, so that a machine whose speed drifts treats them
alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
Figures = Mapping[str, float]


def model_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    command = [sys.executable, str(ROOT / "tools" / "smollm2.py")]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(made.stdout.strip())


def rngd_python() -> str:
    """The Python of the RNGD toolchain, which npucc is told of too."""
    command = [sys.executable, str(ROOT / "tools" / "rngd_environment.py")]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    os.environ["NPUCC_RNGD_PYTHON"] = made.stdout.strip()
    return made.stdout.strip()


@contextmanager
def work_folder(chosen: Path | None) -> Iterator[Path]:
    """The folder that was chosen, made if need be; without one, a temporary folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def signing_key(folder: Path) -> tuple[Path, Path]:
    """A private key and its public one; made once per folder."""
    key = folder / "bench.key"
    if not key.exists():
        subprocess.run([BIN / "npucc", "keygen", "--out", key], check=True, stdout=subprocess.DEVNULL)
    return key, key.with_suffix(".key.pub")


def build_bundle(folder: Path, model: Path, seq_len: int) -> tuple[Path, Path]:
    """A signed bundle for LoRA r16 on q and v, and the public key; built once per folder."""
    (key, trust), bundle = signing_key(folder), folder / f"s{seq_len}.npub"
    if not bundle.exists():
        recipe = ["--rank", "16", "--alpha", "32", "--targets", "q,v", "--seq-len", str(seq_len)]
        files = ["--model", str(model), "--key", str(key), "-o", str(bundle)]
        command = [str(BIN / "npucc"), "build", "--target", "cpu", *recipe, *files, "--progress", "quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return bundle, trust


def run_worker(command: Sequence[str | Path], **environment: str) -> dict[str, Any]:
    """Run a process and return the JSON object in its last line of output."""
    done = subprocess.run(
        [str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_turn(contenders: Mapping[str, Callable[[], Figures]], rounds: int) -> dict[str, dict[str, float]]:
    """Run every contender once per round; the median of each of its figures."""
    found: dict[str, list[Figures]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, run in contenders.items():
            figures = run()
            found[name].append(figures)
            shown = "  ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"round {number + 1}/{rounds}  {name:<14} {shown}", file=sys.stderr, flush=True)
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def versions() -> dict[str, str]:
    """Versions that a reader of the figures wants to know."""
    from importlib.metadata import version

    names = ("npucc", "npurt", "onnxruntime", "torch", "transformers", "peft", "numpy")
    return {name: version(name) for name in names} | {"cpus": str(len(os.sched_getaffinity(0)))}
