"""The RNGD worker with the real compiler: small graphs, compiled and executed on this host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npucc.workers
from npubundle.tensor import TensorType
from npucc.graph import Graph
from npucc.graph.capture import capture
from npucc.passes import simplify
from npucc.targets.rngd import estimate_of
from npucc.workers.pool import Command, Pool

SCRIPT = Path(npucc.workers.__file__).parent / "rngd.py"
OPTIONS = {"tactic_hint": "ForLlmModelComputeBound"}

# Making the environment, the first time, takes minutes.
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def pool(rngd_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("rngd")
    gcc = shutil.which("aarch64-linux-gnu-gcc")
    assert gcc is not None
    environment = {"PATH": str(Path(gcc).parent), "HOME": str(folder), "LANG": "C.UTF-8"}
    with Pool(Command([rngd_python, "-I", str(SCRIPT)], {"fusion": 1}, environment), 1, folder) as made:
        yield made


def product(rows: int = 32) -> Graph:
    """`y = x wᵀ + x · 0.5`, in bf16."""
    x, w = TensorType("bf16", (rows, 64)), TensorType("bf16", (64, 64))
    return simplify(capture("product", lambda x, w: [x @ w.t() + x * 0.5], {"x": x, "w": w}, ["y"]))


def ask(pool: Pool, what: str, graph: Graph, folder: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "graph.json").write_bytes(graph.encode())
    request = {
        "do": what,
        "graph": str(folder / "graph.json"),
        "options": OPTIONS,
        "out": str(folder),
        "form": "imported",
    } | more
    return dict(pool.ask(request, about=graph.name))


def test_it_says_what_it_is(pool: Pool) -> None:
    versions = pool.greeting()
    assert "2026.4.0" in versions["furiosa-torch"]
    assert versions["torch"] == "2.10.0"
    assert versions["furiosa-compiler"]


def test_equal_graphs_give_equal_bytes_and_an_estimate(pool: Pool, tmp_path: Path) -> None:
    for name in ("one", "two"):
        answer = ask(pool, "compile", product(), tmp_path / name)
        assert answer["ok"]["fusion"] == 1, answer
    programs = [(tmp_path / name / "part.bin").read_bytes() for name in ("one", "two")]
    assert programs[0] == programs[1]
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    estimate = estimate_of(summary)
    assert estimate.cycles > 0
    assert estimate.peak_power is not None
    assert 0 < estimate.peak_power < 500
    assert estimate.memory is not None
    assert estimate.memory > 0
    assert not (tmp_path / "one" / "sdk").exists()


@pytest.mark.parametrize("form", ["imported", "lowered"])
def test_a_graph_computes_what_it_says_in_either_form(form: str, pool: Pool, tmp_path: Path) -> None:
    ask(pool, "import", product(), tmp_path, form=form)
    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal(shape).astype(np.float32) / 8 for shape in ((32, 64), (64, 64)))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "w.npy", w)
    inputs = [["bf16[32,64]", str(tmp_path / "x.npy")], ["bf16[64,64]", str(tmp_path / "w.npy")]]
    request = {
        "dfg": str(tmp_path / "part.dfg"),
        "inputs": inputs,
        "outputs": [["bf16[32,64]", str(tmp_path / "y.npy")]],
    }
    answer = ask(pool, "execute", product(), tmp_path, **request)
    assert "ok" in answer, answer
    narrow = [torch.from_numpy(value).bfloat16().double() for value in (x, w)]
    expected = (narrow[0] @ narrow[1].T + narrow[0] * 0.5).numpy()
    found = np.load(tmp_path / "y.npy").astype(np.float64)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 5e-3


def test_a_lowered_graph_is_another_than_the_imported_one(pool: Pool, tmp_path: Path) -> None:
    for form in ("imported", "lowered"):
        answer = ask(pool, "compile", product(), tmp_path / form, form=form)
        assert "ok" in answer, answer
    graphs = {(tmp_path / form / "part.dfg").read_bytes() for form in ("imported", "lowered")}
    programs = {(tmp_path / form / "part.bin").read_bytes() for form in ("imported", "lowered")}
    assert len(graphs) == 2
    assert len(programs) == 1


def test_the_nodes_that_the_compiler_blames_are_ours(pool: Pool, tmp_path: Path) -> None:
    """No tactic of it sums up an axis that long."""
    kind = TensorType("f32", (6_815_744,))
    graph = simplify(capture("sum", lambda x: [torch.sqrt((x * 3).sum())], {"x": kind}, ["y"]))
    answer = ask(pool, "compile", graph, tmp_path)
    assert "no populated tactics" in answer["text"], answer
    assert {"aten.sum.dim_IntList"} <= {graph.producers[name].op for name in answer["nodes"]}


def test_a_graph_that_does_not_compile_is_an_answer(pool: Pool, tmp_path: Path) -> None:
    kind = TensorType("f32", (4, 8))
    refused = simplify(capture("erf", lambda x: [torch.special.erfinv(x)], {"x": kind}, ["y"]))
    answer = ask(pool, "compile", refused, tmp_path)
    assert "erfinv" in answer["text"], answer
    assert not (tmp_path / "part.bin").exists()
    assert "ok" in ask(pool, "compile", product(), tmp_path), "the worker lives on"


def test_an_output_that_is_an_input_is_refused(pool: Pool, tmp_path: Path) -> None:
    kind = TensorType("f32", (8, 64))
    graph = simplify(capture("pass", lambda x, y: [x + y, x], {"x": kind, "y": kind}, ["sum", "same"]))
    answer = ask(pool, "compile", graph, tmp_path)
    assert "an output of the part is an input of it" in answer["text"]


STARTER = """
import json, subprocess, sys, time
worker = subprocess.Popen([sys.argv[1], "-I", sys.argv[2]], stdin=subprocess.PIPE, start_new_session=True)
print(worker.pid, flush=True)
worker.stdin.write(b'{"fusion": 1}\\n' + sys.argv[3].encode() + b"\\n")
worker.stdin.flush()
time.sleep(600)
"""


def test_a_worker_at_work_ends_with_the_process_that_started_it(rngd_python: str, tmp_path: Path) -> None:
    """Though it is killed, and the worker is in the middle of a compilation."""
    size = TensorType("bf16", (2048, 2048))
    big = simplify(capture("big", lambda x, w: [x @ w], {"x": size, "w": size}, ["y"]))
    (tmp_path / "graph.json").write_bytes(big.encode())
    out = tmp_path / "out"
    out.mkdir()
    request = {
        "do": "compile",
        "graph": str(tmp_path / "graph.json"),
        "out": str(out),
        "options": {},
        "form": "imported",
    }
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, rngd_python, str(SCRIPT), json.dumps(request)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert starter.stdout is not None
    worker = int(starter.stdout.readline())
    try:
        wait_until((out / "sdk").exists, 120)
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()
    assert not (out / "part.bin").exists()
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), 30)


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Fail unless it holds within so many seconds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)
