"""Training speed and peak memory on the CPU: npurt against transformers with PEFT, eager and compiled.

SmolLM2-135M, LoRA rank 16 on q and v, f32, one sequence per step with all tokens supervised, no accumulation. All
contenders are processes that stay alive and take a few steps in turn, so that a machine whose speed drifts drifts for
all of them. The first step of a turn is not timed: it finds the caches full of another contender's weights. Tokens per
second are those of the median step; memory is the largest resident set of the whole process. Ratios are against the
faster rival, for memory against the leaner one.

    python benchmarks/cpu_train.py [--seq-len 128 512] [--turns 8]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from workshop import build_bundle, model_folder, versions

WARM_UP = 2
STEPS_IN_TURN = 4
LR = 1e-4
RIVALS = ("peft-eager", "peft-compile")


def tokens_of(seq_len: int) -> np.ndarray:
    """The sequence that every contender trains on."""
    return np.random.default_rng(0).integers(100, 40_000, seq_len).astype(np.int32)


def serve(step: Callable[[], object]) -> None:
    """In a worker: a turn for each line of standard input, answered by the seconds of its steps and the peak memory."""
    for _ in range(WARM_UP):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = []
        for _ in range(1 + STEPS_IN_TURN):
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
        print(json.dumps([seconds[1:], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]), flush=True)


def train_npurt(options: argparse.Namespace, prepack: str) -> None:
    """Steps through the public API."""
    from npurt import Bundle, Pack, TrainConfig, Trainer

    tokens = tokens_of(options.seq_len[0])
    labels = np.append(tokens[1:], -100).astype(np.int32)
    pack = Pack(tokens, np.arange(len(tokens), dtype=np.int32), np.ones(len(tokens), np.int32), labels)
    config = TrainConfig(lr=LR, schedule="constant", warmup=0, prepack=prepack)  # type: ignore[arg-type]
    with (
        Bundle.open(options.bundle, trust=options.trust) as bundle,
        Trainer(bundle, weights=options.model, config=config) as trainer,
    ):
        serve(lambda: trainer.train_step([pack], lr=LR))


def train_peft(options: argparse.Namespace, *, compiled: bool) -> None:
    """The loop that PEFT's own documentation shows."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    forward = torch.compile(model) if compiled else model
    ids = torch.from_numpy(tokens_of(options.seq_len[0]).astype(np.int64))[None]

    def step() -> None:
        loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    serve(step)


def work(options: argparse.Namespace) -> None:
    """What a worker process does."""
    if options.worker.startswith("peft"):
        train_peft(options, compiled=options.worker == "peft-compile")
    else:
        train_npurt(options, options.worker.removeprefix("prepack-"))


class Worker:
    """A contender's process, ready to take steps."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("ready")

    def turn(self) -> tuple[list[float], float]:
        """Take steps: their seconds, and the peak of resident memory in MiB."""
        if self._process.stdin is None:
            raise RuntimeError("a worker without input")
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds, peak = json.loads(self._answer("["))
        return seconds, peak

    def end(self) -> None:
        """Close the input, upon which the process ends."""
        self._process.communicate()

    def _answer(self, start: str) -> str:
        if self._process.stdout is None:
            raise RuntimeError("a worker without output")
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError(f"a worker ended with exit code {self._process.wait()}")


def take_turns(workers: dict[str, Worker], turns: int) -> dict[str, list[tuple[list[float], float]]]:
    """One turn of each worker after the other, `turns` times."""
    found: dict[str, list[tuple[list[float], float]]] = {name: [] for name in workers}
    for number in range(turns):
        for name, worker in workers.items():
            found[name].append(worker.turn())
        shown = "  ".join(f"{name} {statistics.median(values[-1][0]):.2f}" for name, values in found.items())
        print(f"turn {number + 1}/{turns}, seconds a step: {shown}", file=sys.stderr, flush=True)
    return found


def compare(seq_len: int, options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """All contenders at one sequence length, with ratios to the rivals."""
    model = model_folder()
    bundle, key = build_bundle(folder, model, seq_len)

    def start(name: str) -> Worker:
        print(f"starting {name}, sequence length {seq_len}", file=sys.stderr, flush=True)
        files = ["--model", str(model), "--bundle", str(bundle), "--trust", str(key)]
        return Worker([sys.executable, __file__, "--worker", name, "--seq-len", str(seq_len), *files])

    workers = {name: start(name) for name in ("prepack-on", *RIVALS, "prepack-off")}
    turns = take_turns(workers, options.turns)
    for worker in workers.values():
        worker.end()
    found = {
        name: {
            "tokens_per_s": seq_len / statistics.median(second for seconds, _ in values for second in seconds),
            "peak_mib": max(peak for _, peak in values),
        }
        for name, values in turns.items()
    }
    fastest = max(found[name]["tokens_per_s"] for name in RIVALS)
    leanest = min(found[name]["peak_mib"] for name in RIVALS)
    for name in ("prepack-on", "prepack-off"):
        found[name]["speed_ratio"] = found[name]["tokens_per_s"] / fastest
        found[name]["memory_ratio"] = found[name]["peak_mib"] / leanest
    return found


def main() -> None:
    """Run the benchmark, or one worker of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--turns", type=int, default=8)
    for name in ("--worker", "--model", "--bundle", "--trust"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = {f"s{seq_len}": compare(seq_len, options, Path(folder)) for seq_len in options.seq_len}
    for length, found in results.items():
        for name, values in found.items():
            print(f"{length:<5} {name:<14}" + "".join(f"  {key} {value:8.2f}" for key, value in values.items()))
    print(json.dumps({"benchmark": "cpu_train", "versions": versions(), "results": results}))


if __name__ == "__main__":
    main()
