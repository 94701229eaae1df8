"""Cold start: from the start of the process to the end of the first optimizer step, files in the page cache.

npurt runs as its users run it, `npurt train` with default settings and a run of 400 steps; the clock stops when it
prints the first step. The rivals are the same training with transformers and PEFT, eager and with torch.compile whose
cache on disk is warm.

    python benchmarks/cold_start.py [--rounds 5] [--no-compile] [--with-cold-compile]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from workshop import BIN, Figures, build_bundle, in_turn, model_folder, versions

SEQ_LEN = 128
#: What a rival does: a script of a dozen lines, as PEFT's documentation has it.
RIVAL = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text, compiled = sys.argv[1], sys.argv[2], sys.argv[3] == "compile"
tokenizer = AutoTokenizer.from_pretrained(folder)
base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
model = get_peft_model(base, lora).train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
forward = torch.compile(model) if compiled else model
ids = tokenizer(open(text).read(), return_tensors="pt").input_ids[:, :128]
forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
optimizer.step()
print("first step", flush=True)
"""


def first_line(command: list[str], marker: str, **environment: str) -> Figures:
    """Seconds until a process prints a line with `marker`; the process is then told to stop."""
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | environment
    ) as process:
        if process.stdout is None:
            raise RuntimeError("no output to wait for")
        for line in process.stdout:
            if marker in line:
                seconds = time.perf_counter() - started
                process.send_signal(signal.SIGKILL)
                return {"seconds": seconds}
    raise RuntimeError(f"{command[0]} ended before its first step")


def contenders(folder: Path, *, compile_rival: bool, cold_compile: bool) -> dict[str, Callable[[], Figures]]:
    """npurt and its rivals, each ready to run."""
    from pydoc_data.topics import topics

    model = model_folder()
    bundle, key = build_bundle(folder, model, SEQ_LEN)
    text = folder / "text.txt"
    text.write_text("\n\n".join(topics.values())[:20_000], encoding="utf-8")
    rows = folder / "train.jsonl"
    rows.write_text("".join(json.dumps({"text": topic[:2000]}) + "\n" for topic in topics.values()), encoding="utf-8")
    out = folder / "adapter"
    npurt = [BIN / "npurt", "train", "--bundle", bundle, "--trust", key, "--weights", model, "--data", rows,
             "--steps", "400", "--json", "--overwrite", "--out", out]  # fmt: skip
    rival = [sys.executable, "-c", RIVAL, model, text]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    found: dict[str, Callable[[], Figures]] = {
        "npurt": lambda: first_line([str(word) for word in npurt], '"event": "step"'),
        "peft-eager": lambda: first_line([*map(str, rival), "eager"], "first step"),
    }

    if not compile_rival:
        return found

    def compiled() -> Figures:
        return first_line([*map(str, rival), "compile"], "first step", **cache)

    cold = compiled()  # also warms the cache
    print(f"peft-compile with an empty cache: {cold['seconds']:.1f} s", file=sys.stderr)
    if cold_compile:
        found["peft-compile-cold"] = lambda: cold
    return found | {"peft-compile": compiled}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--with-cold-compile", action="store_true", help="report the first compilation as well")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled rival out, which takes minutes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = {"compile_rival": not options.no_compile, "cold_compile": options.with_cold_compile}
        found = in_turn(contenders(Path(folder), **flags), options.rounds)
    ours = found["npurt"]["seconds"]
    ratios = {name: values["seconds"] / ours for name, values in found.items() if name != "npurt"}
    for name, values in found.items():
        times = f"  {ratios[name]:6.1f} times npurt" if name in ratios else ""
        print(f"{name:<18} {values['seconds']:7.2f} s{times}")
    print(json.dumps({"benchmark": "cold_start", "versions": versions(), "seconds": found, "ratios": ratios}))


if __name__ == "__main__":
    main()
