"""The search for better variants, with a stand-in for the vendor's compiler whose costs depend on what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from npucc import trials
from npucc.cache import Cache
from npucc.cli import main
from npucc.progress import Progress
from npucc.targets.rngd import RngdTarget, Tactics
from npucc.trials import Bench, Budget, Outcome, Trial, winner
from npucc.tune import Report, Search
from npucc.tuning import Cost, Table, Tuning
from tests.npucc import tiny
from tests.npucc.rngd_stand_in import Sdk

#: Computes with PyTorch. A hint has a factor on the cycles; `Default` is refused, `ForLlmModelIOBound` takes for ever.
WORKER = r"""
import json, os, sys, time
from pathlib import Path

here = Path(__file__).parent
first = input()
print(json.dumps({"ok": json.loads((here / "versions").read_text())}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    answer = {"ok": {"seconds": 0.25}}
    if request["do"] == "compile":
        hint, shapes = request["options"]["tactic_hint"], request["options"]["max_num_unique_shapes"]
        raw = Path(request["graph"]).read_bytes()
        with (here / "asked").open("a") as file:
            file.write(json.dumps([hint, shapes]) + "\n")
        if hint == "ForLlmModelIOBound":
            time.sleep(3600)
        factor = {"ForLlmModelComputeBound": 100, "ForLlmModelComputeIOBalanced": 80, "Default": 1}[hint]
        cycles = len(raw) * factor // (1 if shapes is None else 2 if shapes == 4 else 1)
        if hint == "Default":
            answer = {"error": "CompileError", "text": "no tactics"}
        else:
            out = Path(request["out"])
            (out / "part.bin").write_bytes(raw)
            (out / "part.dfg").write_bytes(raw)
            (out / "summary.json").write_text(json.dumps({"rlir_stats": {"total_cycle": cycles}, "peak_power": "-"}))
    else:
        import numpy as np
        import torch
        from npucc.graph import Graph
        from npucc.graph.interpret import interpret

        graph = Graph.from_dict("part", json.loads(Path(request["dfg"]).read_bytes()))
        found = interpret(graph, [torch.from_numpy(np.load(name)) for _, name in request["inputs"]])
        for tensor, (kind, name) in zip(found, request["outputs"]):
            np.save(name, tensor.numpy() if tensor.dtype == torch.int32 else tensor.float().numpy())
    print(json.dumps(answer), flush=True)
"""
PATTERNS = ("head.begin", "layer.forward.save.2")


@pytest.fixture
def sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sdk:
    monkeypatch.setattr(trials, "SHORTEST", 1.0)
    return Sdk.install(tmp_path, WORKER, monkeypatch)


@pytest.fixture
def target(sdk: Sdk) -> Iterator[RngdTarget]:
    made = RngdTarget(python=sdk.python)
    yield made
    made.close()


def search(target: RngdTarget, folder: Path, seconds: float = 600, names: tuple[str, ...] = PATTERNS) -> Report:
    bench = Bench(target, Cache(folder / "cache"), Progress("quiet"), Budget(seconds))
    found = Search(tiny.model(), tiny.recipe(), bench, folder / "table.json")
    return found.run(lambda calls: [name for name in calls if name in names])


def test_the_cheapest_variant_is_found_and_recorded(target: RngdTarget, tmp_path: Path) -> None:
    report = search(target, tmp_path)
    assert {part.name for part in report.parts} == set(PATTERNS)
    for part in report.parts:
        assert part.tactics == Tactics("ForLlmModelComputeIOBalanced", 4)
        outcomes = {trial.tactics.hint: trial.outcome for trial in part.trials if trial.tactics.max_shapes is None}
        assert outcomes == {
            "ForLlmModelComputeBound": Outcome.COMPILED,
            "ForLlmModelComputeIOBalanced": Outcome.COMPILED,
            "ForLlmModelIOBound": Outcome.STOPPED,
            "Default": Outcome.FAILED,
        }
    assert report.gain == pytest.approx(0.6 * report.cycles, rel=0.01)
    entries = Table.load(tmp_path / "table.json").parts
    assert {(entry.tactic, entry.max_shapes) for entry in entries.values()} == {("ForLlmModelComputeIOBalanced", 4)}
    assert all(entry.compiler == "4.5" and entry.default for entry in entries.values())


def test_a_build_with_the_table_finds_the_winners_compiled(target: RngdTarget, sdk: Sdk, tmp_path: Path) -> None:
    report = search(target, tmp_path, names=("head.begin",))
    tuned = RngdTarget(python=sdk.python, tuning=Tuning([Table.load(tmp_path / "table.json")]))
    bench = Bench(tuned, Cache(tmp_path / "cache"), Progress("quiet"), Budget(600))
    try:
        lowered = Search(tiny.model(), tiny.recipe(), bench, tmp_path / "table.json")._lower("again", None)
        entry = bench.cache.get(lowered.identities["head.begin"])
    finally:
        tuned.close()
    assert entry is not None
    assert entry.part.estimate is not None
    assert report.parts[0].best is not None
    assert entry.part.estimate.cycles == report.parts[0].best.cycles
    assert entry.measured


def test_what_a_table_knows_is_not_tried_again(target: RngdTarget, sdk: Sdk, tmp_path: Path) -> None:
    search(target, tmp_path)
    asked = len(sdk.lines("asked"))
    target.tuning = Tuning([Table.load(tmp_path / "table.json")])
    report = search(target, tmp_path)
    assert all(part.known for part in report.parts)
    assert len(sdk.lines("asked")) == asked


def test_a_budget_of_nothing_tries_nothing_and_says_so(target: RngdTarget, sdk: Sdk, tmp_path: Path) -> None:
    report = search(target, tmp_path, seconds=0)
    assert sdk.lines("asked") == []
    assert all(part.best is None and part.untried for part in report.parts)
    assert Table.load(tmp_path / "table.json") == Table()


def compiled(cycles: int, seconds: float | None, tactics: Tactics) -> Trial:
    return Trial(tactics, Outcome.COMPILED, Cost(cycles, seconds))


USUAL, OTHER = Tactics(), Tactics("Default")


@pytest.mark.parametrize(
    ("usual", "other", "best"),
    [
        ((100, 10.0), (90, 500.0), OTHER),  # fewer cycles win
        ((90, 500.0), (100, 10.0), USUAL),
        ((1000, 100.0), (1005, 20.0), OTHER),  # of equal ones the quicker
        ((1000, 22.0), (1005, 20.0), USUAL),  # unless it is hardly so: another key is a price
        ((1000, None), (1005, 20.0), USUAL),
    ],
)
def test_the_winner(usual: tuple[int, float | None], other: tuple[int, float | None], best: Tactics) -> None:
    found = winner([compiled(*usual, USUAL), compiled(*other, OTHER)])
    assert found is not None
    assert found.tactics == best


def test_nobody_wins_where_nothing_compiles() -> None:
    assert winner([Trial(USUAL, Outcome.FAILED), Trial(OTHER, Outcome.UNTRIED)]) is None


def test_the_command(
    sdk: Sdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPUCC_RNGD_PYTHON", sdk.python)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.config()))
    words = ["tune", "--model", "config.json", "--seq-len", str(tiny.SEQ_LEN), "--rank", "3", "--cache-dir", "cache"]
    assert main([*words, "--target", "rngd", "--part", "head.begin", "-o", "mine.json", "--progress", "quiet"]) == 0
    said = capsys.readouterr().out
    assert "head.begin" in said
    assert "60.0 %" in said
    assert "head.begin, Default: failed:" in said
    assert len(Table.load(tmp_path / "mine.json").parts) == 1
    assert main([*words, "--target", "rngd", "--part", "none"]) == 2
    assert main([*words, "--target", "cpu"]) == 2
    assert main([*words, "--target", "rngd", "--tactic", "Default"]) == 2
