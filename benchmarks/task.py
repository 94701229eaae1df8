"""A small real task before and after training, by npurt and by PEFT: same rows, order, seed and initial adapter.

The task is that of `tools/language_task.py`: name the language of a short text, one of twelve. Accuracy is counted on
texts whose English original was not trained on; guessing gives 8.3 %.

    python benchmarks/task.py [--steps 300] [--held 120]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from workshop import ROOT, build_bundle, model_folder, run_worker, versions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npurt import Pack, TrainConfig

sys.path.append(str(ROOT / "tools"))

SEQ_LEN = 128
CONTENDERS = ("npurt", "peft")


def configuration(steps: int) -> TrainConfig:
    """What both contenders train with."""
    from npurt import TrainConfig

    return TrainConfig(steps=steps, lr=1e-3, template="plain", prepack="on")


def measure(logprobs: Callable[[Pack], NDArray[np.float32]], options: argparse.Namespace) -> dict[str, float]:
    """Accuracy among the twelve answers, and the mean loss of the right ones per token."""
    import language_task

    from npurt.data import load

    files = language_task.write(options.folder / "rows", held_rows=options.held)
    held = np.concatenate([logprobs(p) for p in load(files.held, options.model, SEQ_LEN, language_task.OPTIONS)])
    choices = language_task.load_choices(files, options.model, SEQ_LEN)
    return {
        "accuracy": language_task.accuracy(logprobs, choices, files.answers),
        "held_loss": -float(np.nanmean(held)),
    }


def train_npurt(options: argparse.Namespace) -> dict[str, Any]:
    """Train with the bundle; leaves the initial adapter for the rival."""
    from npurt import Bundle, Trainer

    with (
        Bundle.open(options.bundle, trust=options.trust) as bundle,
        Trainer(bundle, weights=options.model, config=configuration(options.steps)) as trainer,
    ):
        trainer.save_adapter(options.folder / "initial")
        before = measure(trainer.logprobs, options)
        started = time.perf_counter()
        curve = [report.loss for report in trainer.fit(options.folder / "rows" / "train.jsonl")]
        seconds = time.perf_counter() - started
        return {"before": before, "after": measure(trainer.logprobs, options), "seconds": seconds, "curve": curve}


def train_peft(options: argparse.Namespace) -> dict[str, Any]:
    """Train with PEFT from the adapter that npurt started with."""
    from peft_reference import Reference

    from npurt.data import load

    reference = Reference.load(options.model, options.folder / "initial", attention="sdpa")
    before = measure(reference.logprobs, options)
    config = configuration(options.steps)
    rates = config.learning_rates(options.steps)
    batches = load(options.folder / "rows" / "train.jsonl", options.model, SEQ_LEN, config.data_options())
    started = time.perf_counter()
    curve = [
        reference.step([batches.next_pack()], lr=rates.rate(step), max_norm=config.max_norm)[0]
        for step in range(1, options.steps + 1)
    ]
    seconds = time.perf_counter() - started
    return {"before": before, "after": measure(reference.logprobs, options), "seconds": seconds, "curve": curve}


def compare(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Both contenders, npurt first: it makes the initial adapter."""
    model = model_folder()
    bundle, key = build_bundle(folder, model, SEQ_LEN)
    command: list[str | Path] = [sys.executable, __file__, "--steps", str(options.steps), "--held", str(options.held)]
    paths: list[str | Path] = ["--folder", folder, "--model", model, "--bundle", bundle, "--trust", key]
    return {name: run_worker([*command, *paths, "--worker", name]) for name in CONTENDERS}


def main() -> None:
    """Run the benchmark, or one contender of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--held", type=int, default=120, help="held-out texts to count on")
    for name in ("--worker", "--model", "--bundle", "--trust"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(train_npurt(options) if options.worker == "npurt" else train_peft(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = compare(options, Path(folder))
    curves = [values.pop("curve") for values in found.values()]
    apart = float(np.max(np.abs(np.subtract(*curves))))
    for name, values in found.items():
        before, after = values["before"], values["after"]
        print(
            f"{name:<6} accuracy {before['accuracy']:6.1%} → {after['accuracy']:6.1%}   held-out loss "
            f"{before['held_loss']:.4f} → {after['held_loss']:.4f}   {options.steps} steps in {values['seconds']:.0f} s"
        )
    print(f"largest difference of the training loss at any step: {apart:.2g}")
    print(
        json.dumps(
            {
                "benchmark": "task",
                "versions": versions(),
                "steps": options.steps,
                "held_out_texts": options.held,
                "results": found,
                "largest_loss_difference": apart,
                "ratios": {"accuracy": found["npurt"]["after"]["accuracy"] / found["peft"]["after"]["accuracy"]},
            }
        )
    )


if __name__ == "__main__":
    main()
