"""Weight: what `npurt[cpu]` occupies once installed and how long `import npurt` takes, against transformers with PEFT.

npurt is installed from wheels into an environment of its own, at the pinned versions. The rival is measured in the
development environment: torch, transformers, peft, and what they require. Sizes count files, byte-compiled ones
included; pip and setuptools are left out on both sides.

    python benchmarks/footprint.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from workshop import ROOT, in_turn, versions

_TOOLS = {"pip", "setuptools"}


def install(home: Path) -> Path:
    """Make an environment with npurt[cpu] only; return its Python."""
    dist = home / "dist"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist)]
    subprocess.run([*wheel, str(ROOT / "formats"), str(ROOT / "runtime")], check=True)
    npubundle, npurt = sorted(dist.glob("*.whl"))
    venv.create(home / "env", with_pip=False, symlinks=True)
    python = home / "env" / "bin" / "python"
    target = [*pip, "--python", str(python), "install", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*target, str(npubundle), f"{npurt}[cpu]"], check=True)
    return python


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def required(name: str, seen: set[str]) -> Iterator[str]:
    """A distribution and everything it requires, as installed here."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in seen | _TOOLS:
        return
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return
    seen.add(name)
    yield name
    for requirement in found.requires or ():
        if "extra ==" not in requirement:
            yield from required(re.split(r"[\s;<>=!~\[(]", requirement, maxsplit=1)[0], seen)


def size_of_distributions(names: set[str]) -> int:
    """Bytes of the files that these distributions installed, and their byte-compiled forms."""
    total = 0
    for name in names:
        for entry in distribution(name).files or ():
            file = Path(str(entry.locate()))
            if file.is_file():
                total += file.stat().st_size
    return total


def seconds_to_import(python: Path | str, module: str) -> dict[str, float]:
    """Seconds for a process that imports a module, beyond those of one that imports nothing."""

    def run(code: str) -> float:
        started = time.perf_counter()
        subprocess.run([str(python), "-c", code], check=True)
        return time.perf_counter() - started

    bare = run("pass")
    return {"seconds": run(f"import {module}") - bare}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python = install(Path(folder))
        ours = size_of(Path(folder) / "env" / "lib")
        imports = in_turn(
            {
                "npurt": lambda: seconds_to_import(python, "npurt"),
                "npurt.trainer": lambda: seconds_to_import(python, "npurt.trainer"),
                "peft": lambda: seconds_to_import(sys.executable, "peft"),
            },
            options.rounds,
        )
    seen: set[str] = set()
    names = {name for root in ("torch", "transformers", "peft") for name in required(root, seen)}
    theirs = size_of_distributions(names)
    print(
        f"npurt[cpu] {ours / 1e6:.0f} MB, torch + transformers + peft {theirs / 1e6:.0f} MB: {theirs / ours:.1f} times"
    )
    for name, values in imports.items():
        print(f"import {name:<14} {values['seconds']:.3f} s")
    figures = {"npurt_mb": ours / 1e6, "peft_mb": theirs / 1e6, "size_ratio": theirs / ours, "imports": imports}
    ratio = imports["peft"]["seconds"] / max(1e-3, imports["npurt"]["seconds"])
    print(json.dumps({"benchmark": "footprint", "versions": versions(), "import_ratio": ratio} | figures))


if __name__ == "__main__":
    main()
