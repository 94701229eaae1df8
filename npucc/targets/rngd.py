"""The `rngd` target: a part is a program for FuriosaAI's RNGD, compiled by furiosa-torch in processes of its own.

furiosa-torch needs another torch than npucc, so it lives in another Python environment; `NPUCC_RNGD_PYTHON` names its
interpreter. Canonical graphs travel there as JSON, programs and the compiler's estimates come back as files. Parts that
run on the host (what picks rows by index, and the reference program) are those of the `cpu` target.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from npubundle import canonical
from npubundle.digest import sha256_of
from npubundle.part import Estimate
from npucc.errors import CompilerError, ResourceError, UnsupportedOperatorError
from npucc.graph import Graph, described
from npucc.targets.target import CompiledPart, CutPolicy
from npucc.tuning import TunedCut, TunedPart, Tuning
from npucc.workers.pool import Command, Pool

NAME = "rngd"
MEDIA_TYPE = "application/vnd.npucc.part.v1+furiosa-rngd"
GRAPH_MEDIA_TYPES = {
    "imported": "application/vnd.npucc.graph.v1+furiosa-dfg",
    "lowered": "application/vnd.npucc.graph.v1+furiosa-lowered-dfg",
}
ENVIRONMENT_VARIABLE = "NPUCC_RNGD_PYTHON"

#: Processing elements of a card that a program uses: 8 are the whole card.
FUSIONS = (1, 2, 4, 8)
#: `npu_config.yaml` of the compiler.
CLOCK_MHZ = 1000
CROSS_COMPILER = "aarch64-linux-gnu-gcc"
HINT = "ForLlmModelComputeBound"
#: Products with weights per part of a layer.
PRODUCTS = 3

#: Raise it whenever the worker may hand the compiler another graph for the same canonical graph.
WORKER_VERSION = 2

_WORKER = Path(__file__).parent.parent / "workers" / "rngd.py"
_INSTALL = "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
#: All that a worker sees of the environment. The SDK reads dozens of variables, some of which change its programs.
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}


class OutOfMemoryError(ResourceError):
    """The host has less memory than the compilation of one part takes."""


@dataclass(frozen=True, slots=True)
class Tactics:
    """What the compiler is told about its search; None leaves it to the compiler."""

    hint: str = HINT
    max_shapes: int | None = None

    def __str__(self) -> str:
        """For people."""
        return self.hint if self.max_shapes is None else f"{self.hint}, shapes {self.max_shapes}"

    def to_dict(self) -> dict[str, str]:
        """As it stands in a part's identity."""
        shapes = {} if self.max_shapes is None else {"max_shapes": str(self.max_shapes)}
        return {"tactic": self.hint, **shapes}

    def request(self) -> dict[str, Any]:
        """As the worker wants it."""
        return {"tactic_hint": self.hint, "max_num_unique_shapes": self.max_shapes}


@dataclass
class RngdTarget:
    """Compiles for `fusion` processing elements in at most `jobs` processes at once.

    `tactics` and `max_products` hold for all parts and layers. Where they are None, `tuning` says what is best for each
    of those that it knows.

    `verify` is the form of graph that is checked and kept: as the compiler `imported` it, or `lowered`, which models
    the device's casts, takes as long as the compilation, and runs a hundred times slower.
    """

    fusion: int = 8
    jobs: int = 1
    tactics: Tactics | None = None
    max_products: int | None = None
    verify: str = "imported"
    python: str | None = None
    tuning: Tuning = field(default_factory=Tuning)

    NAME = NAME
    MEDIA_TYPE = MEDIA_TYPE
    #: bf16 has 8 bits of mantissa: products of rounded factors, rounded once more. A wrong rewrite is off by far more.
    BOUND = 3e-2
    #: Of 16,000 random logits the two largest are the same bf16 number in one row of ten or so; half of those rows have
    #: the larger one later.
    TIES = 0.15
    #: HBM of one card.
    MEMORY = 48 << 30

    def __post_init__(self) -> None:
        """No process starts before a part has to be compiled or run."""
        self._pool: Pool | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._toolchain: dict[str, str] | None = None
        # Threads that compile meet at their first part: one of them makes the folder and the pool for all.
        self._starting = threading.Lock()

    @property
    def CUT(self) -> CutPolicy:  # noqa: N802 -- a constant of other targets
        """Small parts, attention whole, the head's rows in one block."""
        return CutPolicy(
            head_rows=None,
            head_slice=16384,
            query_rows=1 << 20,
            repeat_products_within=128,
            repeat_after_softmax=False,
            products="bf16",
            swap=True,
            products_per_part=self.max_products or PRODUCTS,
            own_memory=True,
            tuned_products=self._tuned_products if self.max_products is None else None,
        )

    @property
    def GRAPH_MEDIA_TYPE(self) -> str:  # noqa: N802 -- a constant of other targets
        """Of the graphs beside the programs."""
        return GRAPH_MEDIA_TYPES[self.verify]

    def toolchain(self) -> dict[str, str]:
        """Versions of the SDK, its compiler and torch, of the cross compiler and binutils.

        The SDK is asked once for each of its installations; the answer is kept beside its interpreter.
        """
        if self._toolchain is None:
            sdk = _remembered(self._python()) or self._ask_sdk()
            self._toolchain = {**sdk, **_cross_tools(), "worker": str(WORKER_VERSION)}
        return self._toolchain

    def options(self, graph: Graph) -> dict[str, str]:
        """What else than graph and toolchain decides a part's bytes."""
        return self.options_with(self.tactics_of(graph))

    def options_with(self, tactics: Tactics) -> dict[str, str]:
        """The same for tactics that a search tries."""
        form = {} if self.verify == "imported" else {"graph": self.verify}
        return {"fusion": str(self.fusion), **tactics.to_dict(), **form}

    def tactics_of(self, graph: Graph) -> Tactics:
        """What the compiler is told about this part."""
        if self.tactics is not None:
            return self.tactics
        known = self.tuned_part(graph)
        return Tactics() if known is None else Tactics(known.tactic, known.max_shapes)

    def tuned_part(self, graph: Graph) -> TunedPart | None:
        """What the tables know of a part, for this fusion and the installed compiler."""
        return self.tuning.part(graph, self.fusion, self.compiler)

    def tuned_cut(self, layer: Graph) -> TunedCut | None:
        """The same of a layer's joint graph."""
        return self.tuning.cut(layer, self.fusion, self.compiler)

    def _tuned_products(self, layer: Graph) -> int | None:
        known = self.tuned_cut(layer)
        return None if known is None else known.products_per_part

    def compiler(self) -> str:
        """The revision of the installed compiler."""
        return self.toolchain()["furiosa-compiler"]

    def bundle_options(self) -> dict[str, str]:
        """What a runtime has to know of the whole bundle."""
        return {"fusion": str(self.fusion), "clock_mhz": str(CLOCK_MHZ)}

    def requirements(self) -> Mapping[str, str]:
        """What a host needs to run a part: programs have no version of their own, so the SDK has to be the same."""
        toolchain = self.toolchain()
        return {name: toolchain[name] for name in ("furiosa-torch", "furiosa-compiler")} | {"fusion": str(self.fusion)}

    def compile_part(self, graph: Graph) -> CompiledPart:
        """The program, the graph in the form that is verified, and the estimate.

        Raises `UnsupportedOperatorError` for a graph that the compiler does not take, `ResourceError` for a toolchain
        that does not work, `WorkerFailedError` for a worker that died twice.
        """
        return self.compile_with(graph, self.tactics_of(graph))

    def compile_with(self, graph: Graph, tactics: Tactics, limit: float | None = None) -> CompiledPart:
        """The same with other tactics. Raises `OutOfTimeError` as well, after `limit` seconds."""
        with self._folder_for(graph) as folder:
            answer = self._ask_about(graph, "compile", folder, tactics, limit)
            summary = json.loads((folder / "summary.json").read_bytes())
            program, imported = (folder / "part.bin").read_bytes(), (folder / "part.dfg").read_bytes()
            return CompiledPart(program, imported, estimate_of(summary), answer.get("seconds"))

    def imported(self, graph: Graph) -> CompiledPart:
        """What `execute` runs, without a program."""
        with self._folder_for(graph) as folder:
            self._ask_about(graph, "import", folder, self.tactics_of(graph))
            return CompiledPart(b"", (folder / "part.dfg").read_bytes())

    def _ask_about(
        self, graph: Graph, what: str, folder: Path, tactics: Tactics, limit: float | None = None
    ) -> Mapping[str, Any]:
        request = {"do": what, "graph": str(folder / "graph.json"), "out": str(folder), "form": self.verify}
        asked = request | {"options": tactics.request()}
        answer = self._workers().ask(asked, about=f"part {graph.name}", limit=limit)
        if "ok" not in answer:
            raise _refusal(graph, answer)
        done: Mapping[str, Any] = answer["ok"]
        return done

    @contextmanager
    def _folder_for(self, graph: Graph) -> Iterator[Path]:
        """A folder for one request, with the graph in it."""
        folder = Path(tempfile.mkdtemp(dir=self._home()))
        try:
            (folder / "graph.json").write_bytes(graph.encode())
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def execute(self, part: CompiledPart, graph: Graph, inputs: Mapping[str, npt.NDArray[Any]]) -> Sequence[Any]:
        """Run the imported graph in the SDK's executor: the graph's meaning to the compiler, not the card's casts."""
        with self._folder_for(graph) as folder:
            (folder / "part.dfg").write_bytes(part.graph or b"")
            given, wanted = [], []
            for index, value in enumerate(graph.inputs):
                np.save(folder / f"in{index}.npy", inputs[value.name])
                given.append([str(value.type), str(folder / f"in{index}.npy")])
            for index, kind in enumerate(graph.output_types):
                wanted.append([str(kind), str(folder / f"out{index}.npy")])
            request = {"do": "execute", "dfg": str(folder / "part.dfg"), "inputs": given, "outputs": wanted}
            answer = self._workers().ask(request, about=f"the check of part {graph.name}")
            if "ok" not in answer:
                raise CompilerError(
                    f"the SDK's executor does not run part {graph.name}: {answer['text']}",
                    remedy="report this with the output of `npucc build --dump DIR`",
                )
            return [np.load(name) for _, name in wanted]

    def close(self) -> None:
        """End the workers, also those at work."""
        if self._pool is not None:
            self._pool.close()
        if self._folder is not None:
            self._folder.cleanup()

    # -- workers -----------------------------------------------------------------------------------------------------

    def _python(self) -> str:
        chosen = self.python or os.environ.get(ENVIRONMENT_VARIABLE) or sys.executable
        found = shutil.which(chosen)
        if found is None:
            raise ResourceError(
                "the Python of furiosa-torch is not there", where=chosen, remedy=f"set {ENVIRONMENT_VARIABLE}"
            )
        return found

    def _workers(self) -> Pool:
        home = self._home()
        with self._starting:
            if self._pool is None:
                command = Command(
                    [self._python(), "-I", str(_WORKER)],
                    {"fusion": self.fusion},
                    {**_ENVIRONMENT, "HOME": str(home), "TMPDIR": str(home)},
                )
                self._pool = Pool(command, self.jobs, home)
            return self._pool

    def _home(self) -> Path:
        with self._starting:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="npucc-rngd-", ignore_cleanup_errors=True)
            return Path(self._folder.name)

    def _ask_sdk(self) -> dict[str, str]:
        try:
            versions = {str(key): str(value) for key, value in self._workers().greeting().items()}
        except ResourceError as failure:
            raise ResourceError(
                failure.what,
                where=self._python(),
                remedy=f"install furiosa-torch in an environment and set {ENVIRONMENT_VARIABLE} to its python",
            ) from failure
        _remember(self._python(), versions)
        return versions


def estimate_of(summary: Mapping[str, Any]) -> Estimate:
    """What the bundle keeps of the compiler's summary."""
    memory = summary.get("peak_memory_usage_bytes")
    return Estimate(
        int(summary["rlir_stats"]["total_cycle"]),
        _watts(summary.get("peak_power")),
        None if memory is None else int(memory),
    )


def _watts(said: Any) -> float | None:
    """The summary has a number in a string, or a dash for parts without a product."""
    try:
        return float(f"{float(said):.4g}")
    except (TypeError, ValueError):
        return None


def _identity(python: str) -> str | None:
    """Digest of what pip recorded of the installed SDK: another installation, another answer."""
    packages = Path(python).parent.parent / "lib"
    names = ("furiosa_*", "torch-*")
    found = sorted(file for name in names for file in packages.glob(f"python*/site-packages/{name}.dist-info/RECORD"))
    return sha256_of(b"".join(file.read_bytes() for file in found)) if found else None


def _memory(python: str) -> Path:
    return Path(python).parent.parent / "npucc-toolchain.json"


def _remembered(python: str) -> dict[str, str] | None:
    identity = _identity(python)
    try:
        document = json.loads(_memory(python).read_bytes())
        versions: dict[str, str] = document["versions"] if document["installation"] == identity else {}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return versions if identity and versions else None


def _remember(python: str, versions: Mapping[str, str]) -> None:
    identity = _identity(python)
    if identity:
        with suppress(OSError):  # an environment that is read-only is asked every time
            _memory(python).write_bytes(canonical.encode({"installation": identity, "versions": dict(versions)}))


def _cross_tools() -> dict[str, str]:
    """Versions of what the compiler calls for the cores of the card. Raises ResourceError where it is missing."""
    found = {}
    for name, tool in (("cross-gcc", CROSS_COMPILER), ("binutils", "aarch64-linux-gnu-ld")):
        try:
            done = subprocess.run(
                [tool, "--version"], env=_ENVIRONMENT, capture_output=True, text=True, check=True, timeout=60
            )
        except (OSError, subprocess.SubprocessError) as failure:
            raise ResourceError(f"{tool} is missing or does not run", where=tool, remedy=_INSTALL) from failure
        found[name] = done.stdout.splitlines()[0].strip()
    return found


#: What the SDK says of a cross compiler that fails, whatever it calls the error.
_TOOL_FAULT = re.compile(r"aarch64-linux-gnu|cross.?compil|command not found|os error 2\b", re.IGNORECASE)


def _refusal(graph: Graph, answer: Mapping[str, Any]) -> CompilerError:
    """The SDK calls every failure an unsupported operator; tell apart what its user can do something about."""
    text = str(answer.get("text", "")).strip()
    short = text[-1500:]
    where = f"part {graph.name}"
    if answer.get("error") == "MemoryError":
        return OutOfMemoryError(f"out of memory while {where} was compiled", remedy="build with a smaller -j")
    if answer.get("error") == "OSError":
        what = f"the compile worker cannot read or write its files: {short}"
        return ResourceError(what, where=where, remedy="free space in the folder for temporary files, or set TMPDIR")
    if _TOOL_FAULT.search(text):
        return ResourceError(f"the cross compiler failed: {short}", where=where, remedy=_INSTALL)
    blamed = [node for node in graph.nodes if node.name in (answer.get("nodes") or ())]
    named = f" at {', '.join(map(described, blamed[:3]))}" if blamed else ""
    return UnsupportedOperatorError(
        f"the RNGD compiler does not take {where}{named}: {short}",
        where=where,
        remedy=f"`npucc diagnose --part {graph.name}` finds the first node; or try another --max-mm or --tactic",
    )
