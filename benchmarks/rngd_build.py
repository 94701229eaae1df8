"""What an RNGD bundle costs to build on this host, cold, warm and with another rank, and what its step is estimated at.

No card takes part. There is no rival to run beside it: the prototype npu-train took about 5,400 s for the Llama-3.1-8B
bundle on 64 cores, which is printed as a ratio where that bundle is built.

    python benchmarks/rngd_build.py [--config FILE] [--seq-len 128] [--fusion 8] [--jobs 2] [--rank 16] [--other-rank 8]
        [--work DIR]

With --work, a folder that stays, a run that was ended goes on where it was; its time then is that of the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil
from workshop import BIN, ROOT, rngd_python, signing_key, versions, work_folder

from npurt import Bundle

#: Seconds of the prototype's build of this model, as its authors reported them.
PROTOTYPE = {"llama-3.1-8b": 5400.0}


class Memory:
    """The most resident memory that this process's descendants had at once, in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    def _sample(self) -> None:
        while not self._done.wait(0.5):
            self.peak = max(self.peak, sum(map(resident, psutil.Process().children(recursive=True))))


def resident(process: psutil.Process) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def npucc(*words: object) -> dict[str, Any]:
    """Run a command of npucc with --json; progress goes to standard error."""
    command = [str(BIN / "npucc"), *map(str, words), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def build(step: list[str], work: Path, name: str) -> tuple[dict[str, Any], Path]:
    """Build a bundle; what the command says of it, and its file."""
    path = work / f"{name}.npub"
    path.unlink(missing_ok=True)
    files = ["--key", signing_key(work)[0], "--cache-dir", work / "cache", "-o", path]
    started = time.monotonic()
    said = npucc("build", *step, *files)
    return said | {"seconds": round(time.monotonic() - started, 1)}, path


def launches_of_a_layer(path: Path, trust: Path) -> int:
    """Programs that the card runs for one layer in a micro-step, forward and backward."""
    with Bundle.open(path, trust=trust) as bundle:
        calls = bundle.program().calls("micro_step")
        return sum(call.layer == 1 and call.queue != "host" for call in calls)


def after_another_rank(step: list[str], jobs: list[str], work: Path) -> dict[str, Any]:
    """Which parts a build with another rank compiles, and which of those have LoRA matrices or their gradients."""
    plan = npucc("plan", *step, "--cache-dir", work / "cache")
    missing = [part["name"] for part in plan["parts"] if not part["cached"]]
    said, path = build([*step, *jobs], work, "rank")
    with Bundle.open(path, trust=signing_key(work)[1]) as bundle:
        state = {"lora", "grad", "grad_step"}
        trained = {
            call.part
            for program in map(bundle.program, bundle.config.programs)
            for phase in program.phases
            for call in program.calls(phase)
            if any(program.root(o.buffer).name in state for o in (*call.args, *call.results))
        }
    return {
        "seconds": said["seconds"],
        "compiled": said["compiled"],
        "parts": missing,
        # The reference's parts run on the host, and are compiled in no time.
        "parts_without_lora": [n for n in sorted(missing) if n not in trained and not n.startswith("reference.")],
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "tests/npucc/data/smollm2-135m.json")
    parser.add_argument("--seq-len", default="128")
    parser.add_argument("--fusion", default="8")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--rank", default="16")
    parser.add_argument("--other-rank", default="8", help="0 leaves that build out")
    parser.add_argument("--work", type=Path)
    chosen = parser.parse_args()
    with work_folder(chosen.work) as work:
        print(json.dumps(measure(chosen, work), indent=2, sort_keys=True))


def measure(chosen: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All figures."""
    rngd_python()
    _, trust = signing_key(work)
    step = ["--model", str(chosen.config), "--target", "rngd", "--seq-len", chosen.seq_len, "--fusion", chosen.fusion]
    step += ["--targets", "q,v", "--activations", "save"]
    jobs = ["-j", chosen.jobs]
    with Memory() as memory:
        cold, path = build([*step, "--rank", chosen.rank, *jobs], work, "cold")
    warm, again = build([*step, "--rank", chosen.rank, *jobs], work, "warm")
    figures: dict[str, Any] = {
        "model": chosen.config.stem,
        "seq_len": int(chosen.seq_len),
        "fusion": int(chosen.fusion),
        "jobs": int(chosen.jobs),
        "parts": cold["parts"],
        "compiled": cold["compiled"],
        "cold_s": cold["seconds"],
        "peak_memory_bytes": memory.peak,
        "warm_s": warm["seconds"],
        "warm_compiled": warm["compiled"],
        "warm_is_the_same_file": path.read_bytes() == again.read_bytes(),
        "bundle_bytes": path.stat().st_size,
        "launches_per_layer": launches_of_a_layer(path, trust),
        "estimate": cold["estimate"],
    }
    if chosen.other_rank != "0":
        figures["other_rank"] = after_another_rank([*step, "--rank", chosen.other_rank], jobs, work)
    if chosen.config.stem in PROTOTYPE and cold["cached"] == 0:
        figures["ratios"] = {"prototype_on_64_cores": round(PROTOTYPE[chosen.config.stem] / cold["seconds"], 2)}
    return figures | {"versions": versions() | {"python": sys.version.split()[0]}}


if __name__ == "__main__":
    main()
