"""The search for better variants, with a stand-in for the vendor's compiler whose costs depend on what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npucc import trials
from npucc.build import Lowered, lower
from npucc.cache import Cache
from npucc.cli import main
from npucc.errors import NumericsError, ResourceError
from npucc.graph import Graph
from npucc.numerics import Measured
from npucc.progress import Progress
from npucc.targets import CompiledPart
from npucc.targets.rngd import RngdTarget, Tactics
from npucc.trials import Bench, Budget, Outcome, Trial, winner
from npucc.tune import CutReport, Report, Search
from npucc.tuning import Cost, Table, Tuning
from tests.npucc import tiny
from tests.npucc.rngd_stand_in import EXECUTE, Sdk

#: Computes with PyTorch. A hint has a factor on the cycles; `Default` is refused, `ForLlmModelIOBound` takes for ever,
#: unless there is a file `prompt`. With a file `dear`, large parts are out of proportion.
WORKER = (
    EXECUTE
    + r"""
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
        if hint == "ForLlmModelIOBound" and not (here / "prompt").exists():
            time.sleep(3600)
        factor = 80 if hint == "ForLlmModelComputeIOBalanced" else 100
        size = len(raw) ** (2 if (here / "dear").exists() else 1)
        cycles = size * factor // (2 if shapes == 4 else 1)
        if hint == "Default":
            answer = {"error": "CompileError", "text": "no tactics"}
        else:
            out = Path(request["out"])
            (out / "part.bin").write_bytes(raw)
            (out / "part.dfg").write_bytes(raw)
            (out / "summary.json").write_text(json.dumps({"rlir_stats": {"total_cycle": cycles}, "peak_power": "-"}))
    else:
        execute(request)
    print(json.dumps(answer), flush=True)
"""
)
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


def search(target: RngdTarget, folder: Path, budget: Budget | None = None, names: tuple[str, ...] = PATTERNS) -> Report:
    bench = Bench(target, Cache(folder / "cache"), Progress("quiet"), budget or Budget(600))
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
    report = search(target, tmp_path, Budget(0))
    assert sdk.lines("asked") == []
    assert all(part.best is None and part.untried for part in report.parts)
    assert Table.load(tmp_path / "table.json") == Table()


def test_time_that_runs_out_leaves_the_rest_for_the_next_search(target: RngdTarget, sdk: Sdk, tmp_path: Path) -> None:
    sdk.write("prompt", 1)
    budget = Budget(350, lambda: 100.0 * len(sdk.lines("asked")))  # four compilations: two of them as usual
    first, second = search(target, tmp_path, budget).parts
    assert [trial.outcome.value for trial in first.trials] == ["compiled"] * 3 + ["untried"] * 3
    assert first.best is not None
    assert first.default is not None
    assert second.calls * (second.default or Cost(0)).cycles <= first.calls * first.default.cycles
    assert len(second.untried) == 5
    (entry,) = Table.load(tmp_path / "table.json").parts.values()
    assert (entry.cost, entry.untried) == (first.best, 3)

    target.tuning = Tuning([Table.load(tmp_path / "table.json")])
    again = search(target, tmp_path)
    assert not any(part.known or part.untried for part in again.parts)
    assert {entry.untried for entry in Table.load(tmp_path / "table.json").parts.values()} == {0}
    asked = sdk.lines("asked")
    assert len(asked) == 2 * 6  # nothing that was compiled is compiled again


def test_a_search_that_is_ended_keeps_what_it_found(
    target: RngdTarget, sdk: Sdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk.write("prompt", 1)
    compile_with = RngdTarget.compile_with

    def until_killed(self: RngdTarget, *words: Any, **more: Any) -> CompiledPart:
        if len(sdk.lines("asked")) == 8:
            raise KeyboardInterrupt
        return compile_with(self, *words, **more)

    monkeypatch.setattr(RngdTarget, "compile_with", until_killed)
    with pytest.raises(KeyboardInterrupt):
        search(target, tmp_path)
    (entry,) = Table.load(tmp_path / "table.json").parts.values()
    assert (entry.tactic, entry.max_shapes, entry.untried) == ("ForLlmModelComputeIOBalanced", 4, 0)
    assert sorted(file.name for file in tmp_path.glob("*.json")) == ["table.json"]
    assert not list(tmp_path.glob(".*"))


def test_parts_are_searched_side_by_side(sdk: Sdk, tmp_path: Path) -> None:
    sdk.write("prompt", 1)
    target = RngdTarget(python=sdk.python, jobs=2)
    try:
        report = search(target, tmp_path)
    finally:
        target.close()
    assert [part.tactics for part in report.parts] == [Tactics("ForLlmModelComputeIOBalanced", 4)] * 2
    assert len(Table.load(tmp_path / "table.json").parts) == 2


def test_a_variant_that_computes_wrong_results_never_wins(
    target: RngdTarget, sdk: Sdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(graph: Graph, *_: object) -> list[Measured]:
        if sdk.lines("asked")[-1] != ["ForLlmModelComputeBound", None]:
            raise NumericsError("differs", where=graph.name)
        return []

    sdk.write("prompt", 1)
    monkeypatch.setattr(trials, "measure", measure)
    (report,) = search(target, tmp_path, names=("head.begin",)).parts
    assert report.tactics == Tactics()
    assert next(trial.text for trial in report.trials if trial.outcome is Outcome.FAILED) == "differs"
    assert len(list((tmp_path / "cache").glob("parts/*/*.part"))) == 1


def test_a_host_that_fails_ends_the_search(target: RngdTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> CompiledPart:
        raise ResourceError("the disk is full")

    monkeypatch.setattr(RngdTarget, "compile_with", full)
    with pytest.raises(ResourceError, match="full"):
        search(target, tmp_path)
    assert Table.load(tmp_path / "table.json") == Table()


# -- cuts -------------------------------------------------------------------------------------------------------------


def whole(target: RngdTarget, folder: Path, seconds: float = 600) -> Report:
    bench = Bench(target, Cache(folder / "cache"), Progress("quiet"), Budget(seconds))
    return Search(tiny.model(), tiny.recipe(), bench, folder / "table.json").run()


def test_the_best_cut_is_recorded_and_builds_take_it(target: RngdTarget, sdk: Sdk, tmp_path: Path) -> None:
    for name in ("prompt", "dear"):
        sdk.write(name, 1)
    report = whole(target, tmp_path)
    cycles = {cut.products: cut.cycles for cut in report.cuts}
    launches = {cut.products: cut.launches for cut in report.cuts}
    assert set(cycles) == {3, 2, 1}
    assert report.products == 1
    assert launches[1] > launches[3]
    assert report.cut_gain == (cycles[3] or 0) - (cycles[1] or 0) > 0
    (entry,) = Table.load(tmp_path / "table.json").cuts.values()
    assert (entry.products_per_part, entry.cycles, entry.launches) == (1, cycles[1], launches[1])
    assert (entry.default, entry.untried, entry.compiler) == (cycles[3], 0, "4.5")

    tuning = Tuning([Table.load(tmp_path / "table.json")])
    tuned, by_hand = RngdTarget(python=sdk.python, tuning=tuning), RngdTarget(python=sdk.python, max_products=1)
    plain = lower(tiny.model(), tiny.recipe(), target)
    found = lower(tiny.model(), tiny.recipe(), tuned)
    assert found.traced.stages == lower(tiny.model(), tiny.recipe(), by_hand).traced.stages != plain.traced.stages
    assert found.traced.cut.products_per_part == 1
    entries = {entry.name.split()[0] for entry in Table.load(tmp_path / "table.json").parts.values()}
    assert {part.name for part in report.parts} == entries

    target.tuning = tuning
    asked = len(sdk.lines("asked"))
    again = whole(target, tmp_path)
    assert (again.products, again.cuts) == (1, ())
    assert all(part.known for part in again.parts)
    assert len(sdk.lines("asked")) == asked


def test_without_time_the_usual_cut_stays(target: RngdTarget, tmp_path: Path) -> None:
    report = whole(target, tmp_path, 0)
    assert report.products == 3
    assert report.cut_gain is None
    assert {cut.outcome for cut in report.cuts} == {Outcome.UNTRIED}
    assert Table.load(tmp_path / "table.json") == Table()


def test_of_equal_cuts_the_one_with_fewer_launches(
    target: RngdTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(_: Search, products: int, _lowered: Lowered) -> CutReport:
        cycles, launches = {3: (1000, 40), 2: (995, 50), 1: (992, 60)}[products]
        return CutReport(products, launches, cycles, Outcome.COMPILED)

    monkeypatch.setattr(Search, "_measure", measured)
    assert whole(target, tmp_path, 0).products == 3


def test_a_cut_by_hand_stays(sdk: Sdk, tmp_path: Path) -> None:
    target = RngdTarget(python=sdk.python, max_products=2)
    try:
        report = whole(target, tmp_path, 0)
    finally:
        target.close()
    assert (report.products, report.cuts) == (2, ())


# -- winners ----------------------------------------------------------------------------------------------------------


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
    assert "builds read it with --tuning mine.json" in said
    assert len(Table.load(tmp_path / "mine.json").parts) == 1
    before = (tmp_path / "mine.json").read_bytes(), len(sdk.lines("asked"))
    words += ["--target", "rngd", "--part", "head.begin", "-o", "mine.json", "--progress", "quiet", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    (part,) = told["parts"]
    assert (part["name"], part["known"], told["gain"]) == ("head.begin", True, part["gain"])
    assert part["variant"] == {"tactic": "ForLlmModelComputeIOBalanced", "max_shapes": 4}
    assert ((tmp_path / "mine.json").read_bytes(), len(sdk.lines("asked"))) == before
    assert main([*words, "--no-tuning"]) == 0
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    assert not part["known"]
    assert [trial["outcome"] for trial in part["trials"]].count("stopped") == 1


def test_the_command_refuses_before_it_works(
    sdk: Sdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPUCC_RNGD_PYTHON", sdk.python)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.config()))
    words = ["tune", "--model", "config.json", "--cache-dir", "cache"]
    (tmp_path / "bad.json").write_text("{}")
    assert main([*words, "--target", "rngd", "-o", "bad.json"]) == 2
    assert "bad.json" in capsys.readouterr().err
    assert (tmp_path / "bad.json").read_text() == "{}"
    assert main([*words, "--target", "rngd", "-o", "none/mine.json"]) == 4
    assert main([*words, "--target", "rngd", "--part", "none"]) == 2
    assert main([*words, "--target", "cpu"]) == 2
    assert main([*words, "--target", "rngd", "--tactic", "Default"]) == 2
