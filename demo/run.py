"""The whole path in one go: key, build, verify, train a real model on real text, export, refuse a flipped bit.

Every step is a command that can be typed; the script prints it before it runs it. The text is the Python language
reference, which comes with every Python.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

BIN = Path(sys.executable).parent
#: Topics of the reference kept for evaluation: one in this many.
HELD_OUT = 8
INTEGRITY = 5


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def command(*words: str | Path, expect: int = 0, read: bool = False) -> str:
    """Show a command and run it; end the demo if its exit code is not the expected one. Return its output if `read`."""
    shown = " ".join(str(word) for word in words)
    lines = textwrap.wrap(f"$ {shown}", 118, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    print("\n".join(lines), flush=True)
    output = subprocess.PIPE if read else None
    done = subprocess.run([BIN / str(words[0]), *map(str, words[1:])], stdout=output, text=True, check=False)
    if done.returncode != expect:
        sys.exit(f"demo: {words[0]} ended with exit code {done.returncode}, not {expect}")
    return done.stdout or ""


def write_text(folder: Path) -> tuple[Path, Path]:
    """Training and held-out rows from the Python language reference."""
    from pydoc_data.topics import topics

    rows = [{"text": text.strip()} for _, text in sorted(topics.items())]
    files = folder / "train.jsonl", folder / "held.jsonl"
    parts = [row for i, row in enumerate(rows) if i % HELD_OUT], rows[::HELD_OUT][:6]
    for file, part in zip(files, parts, strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return files


def plot(log: Path, before: float, picture: Path) -> float:
    """Draw the loss of every step and of the held-out text, which began at `before`; return where that ended."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [r for r in records if r["event"] == "step"]
    held = [(0, before), *((r["step"], r["loss"]) for r in records if r["event"] == "evaluation")]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    xs, ys = [r["step"] for r in steps], [r["loss"] for r in steps]
    axes.plot(xs, ys, color="tab:blue", alpha=0.6, label="training, per step")
    axes.plot([s for s, _ in held], [x for _, x in held], "o-", color="tab:red", label="held-out")
    title = "SmolLM2-135M, LoRA r16 on q and v, Python language reference"
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    return float(held[-1][1])


def flip_one_bit(bundle: Path, copy: Path) -> None:
    """Copy a bundle and turn one bit in its middle."""
    raw = bytearray(bundle.read_bytes())
    raw[len(raw) // 2] ^= 1
    copy.write_bytes(raw)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder for everything the demo makes")
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    work: Path = options.work
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    key, bundle, log = work / "demo.key", work / "smollm2.npub", work / "run.jsonl"

    say("1. A key to sign with")
    command("npucc", "keygen", "--out", key)
    say("2. Compile forward, backward and AdamW, check every part against float64, sign")
    recipe = [
        "--target",
        "cpu",
        "--mode",
        "lora",
        "--rank",
        "16",
        "--alpha",
        "32",
        "--targets",
        "q,v",
        "--seq-len",
        "128",
    ]
    command("npucc", "build", "--model", options.model, *recipe, "--key", key, "-o", bundle)
    say("3. What is in it, and is it what was signed?")
    command("npucc", "inspect", bundle, "--trust", f"{key}.pub")
    command("npucc", "verify", bundle, "--trust", f"{key}.pub")
    say("4. Train, without torch, transformers or a compiler")
    train, held = write_text(work)
    inputs = ["--bundle", bundle, "--trust", f"{key}.pub", "--weights", options.model]
    base = command("npurt", "eval", *inputs, "--data", held, "--json", read=True)
    before = float(json.loads(base.splitlines()[-1])["loss"])
    command("npurt", "train", *inputs, "--data", train, "--eval-data", held, "--eval-every", "10",
            "--steps", str(options.steps), "--accum", "2", "--lr", "1e-3", "--warmup", "4", "--log-file", log,
            "--out", work / "adapter")  # fmt: skip
    after = plot(log, before, work / "loss.png")
    say(f"5. Held-out loss fell from {before:.3f} to {after:.3f}; the curve is in {work / 'loss.png'}")
    if not after < before:
        sys.exit("demo: the held-out loss did not fall")
    for file in sorted((work / "adapter").iterdir()):
        print(f"   {file}  {file.stat().st_size:,} bytes")
    say("6. One flipped bit, and nobody touches the bundle")
    damaged = work / "damaged.npub"
    flip_one_bit(bundle, damaged)
    command("npucc", "verify", damaged, "--trust", f"{key}.pub", expect=INTEGRITY)
    command("npurt", "train", "--bundle", damaged, "--trust", f"{key}.pub", "--weights", options.model, "--data", train,
            "--steps", "1", "--out", work / "never", expect=INTEGRITY)  # fmt: skip
    say("Done: a signed bundle, an adapter that PEFT loads, and a refusal. Read on in docs/index.md")


if __name__ == "__main__":
    main()
