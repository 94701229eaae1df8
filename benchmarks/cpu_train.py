"""Training speed and peak memory on the CPU: npurt against transformers with PEFT, eager and compiled.

SmolLM2-135M, LoRA rank 16 on q and v, f32, one sequence per step with all tokens supervised, no accumulation. Tokens
per second are those of the median step; memory is the largest resident set of the whole process. Ratios are against the
faster rival, for memory against the leaner one.

    python benchmarks/cpu_train.py [--seq-len 128 512] [--steps 12] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from workshop import Figures, build_bundle, in_turn, model_folder, run_worker, versions

WARM_UP = 3
LR = 1e-4
RIVALS = ("peft-eager", "peft-compile")


def tokens_of(seq_len: int) -> np.ndarray:
    """The sequence that every contender trains on."""
    return np.random.default_rng(0).integers(100, 40_000, seq_len).astype(np.int32)


def figures(step: Callable[[], object], seq_len: int, steps: int) -> Figures:
    """Time `steps` steps after the warm-up."""
    for _ in range(WARM_UP):
        step()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"tokens_per_s": seq_len / statistics.median(seconds), "peak_mib": peak}


def train_npurt(options: argparse.Namespace, prepack: str) -> Figures:
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
        return figures(lambda: trainer.train_step([pack], lr=LR), len(tokens), options.steps)


def train_peft(options: argparse.Namespace, *, compiled: bool) -> Figures:
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

    return figures(step, options.seq_len[0], options.steps)


def work(options: argparse.Namespace) -> Figures:
    """What a worker process does."""
    if options.worker.startswith("peft"):
        return train_peft(options, compiled=options.worker == "peft-compile")
    return train_npurt(options, options.worker.removeprefix("prepack-"))


def compare(seq_len: int, options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """All contenders at one sequence length, with ratios to the rivals."""
    model = model_folder()
    bundle, key = build_bundle(folder, model, seq_len)

    def contender(name: str) -> Callable[[], Figures]:
        command = [sys.executable, __file__, "--worker", name, "--seq-len", str(seq_len), "--steps", str(options.steps)]
        return lambda: run_worker([*command, "--model", model, "--bundle", bundle, "--trust", key])

    names = ("prepack-on", *RIVALS, "prepack-off")
    found = in_turn({name: contender(name) for name in names}, options.rounds)
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
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    for name in ("--worker", "--model", "--bundle", "--trust"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = {f"s{seq_len}": compare(seq_len, options, Path(folder)) for seq_len in options.seq_len}
    for length, found in results.items():
        for name, values in found.items():
            print(f"{length:<5} {name:<14}" + "".join(f"  {key} {value:8.2f}" for key, value in values.items()))
    print(json.dumps({"benchmark": "cpu_train", "versions": versions(), "results": results}))


if __name__ == "__main__":
    main()
