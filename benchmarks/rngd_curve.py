"""A bundle for RNGD in the vendor's executor against the cpu target: gradients, and the losses of a training run.

The executor computes the graphs as the compiler imported them, or, with --verify lowered, with the device's casts. It
is no card, and its speed says nothing. Gradients are compared with the bundle's own f32 reference program, losses with
a cpu bundle of the same recipe: same model, rows, order, seed and initial adapter.

    python benchmarks/rngd_curve.py [--steps 30] [--layers 30] [--fusion 8] [--verify imported|lowered] [--work DIR]

With --steps 0 only gradients are compared, of the first --layers layers. With --work, a folder that stays, a run that
was ended goes on with the parts that were compiled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from workshop import BIN, model_folder, rngd_python, signing_key, versions, work_folder

#: Documents of the text, which is the Python language reference.
ROWS = 60


def run(*words: object, allowed: Sequence[int] = (0,)) -> str:
    """Run a command; return its output. Raises CalledProcessError for another exit code."""
    done = subprocess.run([str(word) for word in words], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode not in allowed:
        done.check_returncode()
    return done.stdout


def build(chosen: argparse.Namespace, work: Path, model: Path, target: str) -> Path:
    """A signed bundle of the target."""
    path = work / f"{target}.npub"
    recipe = ["--rank", 16, "--targets", "q,v", "--seq-len", chosen.seq_len]
    device = ["--fusion", chosen.fusion, "-j", chosen.jobs, "--verify", chosen.verify] if target == "rngd" else []
    files = ["--model", model, "--key", signing_key(work)[0], "--cache-dir", work / "cache", "-o", path]
    run(BIN / "npucc", "build", "--target", target, *recipe, *device, *files)
    return path


def rows_in(folder: Path) -> Path:
    """The text, a row for each document."""
    path = folder / "train.jsonl"
    texts = [text.strip() for _, text in sorted(topics.items())][:ROWS]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def losses(npurt: Sequence[object], device: str, bundle: Path, model: Path, steps: int) -> tuple[list[float], float]:
    """Losses of a training run, and seconds per step."""
    folder = bundle.parent
    log, out = folder / f"{bundle.stem}.jsonl", folder / f"{bundle.stem}.adapter"
    files = ["--weights", model, "--data", rows_in(folder), "--out", out, "--log-file", log, "--overwrite"]
    how = ["--steps", steps, "--lr", "1e-3", "--seed", 1, "--device", device]
    log.unlink(missing_ok=True)
    started = time.monotonic()
    run(*npurt, "train", "--bundle", bundle, "--trust", signing_key(folder)[1], *files, *how)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    found = [line["loss"] for line in lines if line["event"] == "step"]
    return found, (time.monotonic() - started) / steps


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--fusion", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verify", choices=["imported", "lowered"], default="imported")
    parser.add_argument("--work", type=Path)
    chosen = parser.parse_args()
    with work_folder(chosen.work) as work:
        print(json.dumps(measure(chosen, work), indent=2, sort_keys=True))


def measure(chosen: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All figures."""
    python = rngd_python()
    model, npurt = model_folder(), [python, "-m", "npurt"]
    device = build(chosen, work, model, "rngd")
    words = ["--trust", signing_key(work)[1], "--weights", model, "--device", "rngd-sim", "--layers", chosen.layers]
    started = time.monotonic()
    cosines = {}
    for tokens, data in (("text", ["--data", rows_in(work)]), ("random", [])):
        asked = [*npurt, "check", "--bundle", device, *words, *data, "--json"]
        report = json.loads(run(*asked, allowed=(0, 1)))  # 1: out of bounds
        cosines[tokens] = sorted(tensor["cosine"] for tensor in report["tensors"])
    figures: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "seq_len": chosen.seq_len,
        "fusion": chosen.fusion,
        "graphs": chosen.verify,
        "layers": chosen.layers,
        "gradients": len(cosines["text"]),
        "cosine_min": {tokens: found[0] for tokens, found in cosines.items()},
        "cosine_median": {tokens: found[len(found) // 2] for tokens, found in cosines.items()},
        "cosines_below_0.999": {tokens: sum(c < 0.999 for c in found) for tokens, found in cosines.items()},
        "check_s": round(time.monotonic() - started, 1),
    }
    if chosen.steps:
        ours, seconds = losses(npurt, "rngd-sim", device, model, chosen.steps)
        theirs, _ = losses([BIN / "npurt"], "cpu", build(chosen, work, model, "cpu"), model, chosen.steps)
        off = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
        figures |= {
            "steps": chosen.steps,
            "losses_rngd_sim": ours,
            "losses_cpu": theirs,
            "difference_max": max(off),
            "executor_s_per_step": round(seconds, 1),
        }
    return figures | {"versions": versions()}


if __name__ == "__main__":
    main()
