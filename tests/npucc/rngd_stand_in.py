"""A stand-in for an environment of furiosa-torch: an interpreter, its packages' records, cross tools, and a worker."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from npucc.targets import rngd

#: For the source of a worker whose graphs are canonical ones: computes one with PyTorch, as the SDK's executor would.
EXECUTE = r"""
def execute(request):
    import json
    from pathlib import Path

    import numpy as np
    import torch
    from npucc.graph import Graph
    from npucc.graph.interpret import interpret

    graph = Graph.from_dict("part", json.loads(Path(request["dfg"]).read_bytes()))
    found = interpret(graph, [torch.from_numpy(np.load(name)) for _, name in request["inputs"]])
    for tensor, (kind, name) in zip(found, request["outputs"]):
        np.save(name, tensor.numpy() if tensor.dtype == torch.int32 else tensor.float().numpy())
"""
#: Source of a worker that "compiles" a canonical graph to itself, in as many seconds as the file `seconds` says.
COMPILE = (
    EXECUTE
    + r"""
import json, os, sys, time
from pathlib import Path

print(json.dumps({"ok": {"furiosa-torch": "1.2.3", "furiosa-compiler": "4.5", "torch": "2.0"}}), flush=True)
here = Path(__file__).parent
fusion = json.loads(input())["fusion"]
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "compile":
        raw = Path(request["graph"]).read_bytes()
        log = here / "compiled"
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(float((here / "seconds").read_text()))
        out = Path(request["out"])
        (out / "part.bin").write_bytes(json.dumps([fusion, request["options"]]).encode() + raw)
        (out / "part.dfg").write_bytes(raw)
        summary = {"rlir_stats": {"total_cycle": len(raw)}, "peak_power": "-", "peak_memory_usage_bytes": 4096}
        (out / "summary.json").write_text(json.dumps(summary))
    else:
        execute(request)
    print(json.dumps({"ok": {}}), flush=True)
"""
)
VERSIONS = {"furiosa-torch": "1.2.3", "furiosa-compiler": "4.5", "torch": "2.0"}


def interpreter(folder: Path) -> Path:
    """What `NPUCC_RNGD_PYTHON` may name: a script in a new folder that runs the worker `COMPILE`."""
    script(folder / "worker.py", COMPILE)
    script(folder / "seconds", "0")
    script(folder / "python", f'#!/bin/sh\nexec "{sys.executable}" "{folder}/worker.py"\n')
    return folder / "python"


@dataclass
class Sdk:
    """An environment of furiosa-torch, and a folder with cross tools that a target finds instead of the host's."""

    root: Path

    @classmethod
    def install(cls, root: Path, worker: str, monkeypatch: pytest.MonkeyPatch) -> Sdk:
        """Make targets use it. `worker` is the source of the worker, which has a folder of its own to read from."""
        made = cls(root)
        script(root / "worker" / "rngd.py", worker)
        made.write("versions", VERSIONS)
        script(Path(made.python), f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        script(root / "env/lib/python3.12/site-packages/furiosa_torch-1.2.3.dist-info/RECORD", "a.py,sha256=1,9\n")
        for tool in ("gcc", "ld"):
            script(root / "tools" / f"aarch64-linux-gnu-{tool}", f"#!/bin/sh\necho '{tool} 13.2'\necho more\n")
        monkeypatch.setattr(rngd, "_WORKER", root / "worker" / "rngd.py")
        monkeypatch.setitem(rngd._ENVIRONMENT, "PATH", str(root / "tools"))
        return made

    @property
    def python(self) -> str:
        return str(self.root / "env" / "bin" / "python")

    @property
    def record(self) -> Path:
        (found,) = self.root.glob("env/lib/*/site-packages/furiosa_torch-1.2.3.dist-info/RECORD")
        return found

    @property
    def greeted(self) -> list[Any]:
        """What each worker was told at its start."""
        return self.lines("greeted")

    def lines(self, name: str) -> list[Any]:
        """A file that the stand-in writes, a JSON value in each line."""
        file = self.root / "worker" / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def write(self, name: str, value: object) -> None:
        """A file that the stand-in reads."""
        (self.root / "worker" / name).write_text(json.dumps(value))


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
