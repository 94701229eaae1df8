from __future__ import annotations

from pathlib import Path

from npucc.build import Lowered
from tests.npucc.cli.conftest import Run


def test_everything_is_missing_before_the_first_build(
    run: Run, options: list[str], tmp_path: Path, lowered: Lowered
) -> None:
    told = run("plan", *options[:-2], "--cache-dir", tmp_path / "cache", "--json").json
    assert [part["name"] for part in told["parts"]] == sorted(lowered.identities)
    assert {part["why"] for part in told["parts"]} == {"never compiled on this cache"}
    assert told["cached"] == 0
    assert not (tmp_path / "cache").exists()  # nothing is compiled, and nothing is made


def test_everything_is_there_after_it(run: Run, options: list[str], lowered: Lowered) -> None:
    told = run("plan", *options, "--json").json
    assert told["cached"] == len(lowered.identities)
    assert {part["why"] for part in told["parts"]} == {None}
    calls = {part["name"]: part["calls"] for part in told["parts"]}
    assert calls["layer.forward.save"] == 4  # two layers, for training and for evaluation
    assert calls["adamw"] == 1


def test_a_miss_has_a_reason(run: Run, options: list[str]) -> None:
    told = run("plan", *options, "--rank", "7", "--json").json
    why = {part["name"]: part["why"] for part in told["parts"]}
    assert why["adamw"] == "the graph is another (model, recipe or passes)"
    assert why["tables"] is None


def test_memory_is_that_of_the_program(run: Run, options: list[str], lowered: Lowered) -> None:
    memory = run("plan", *options, "--json").json["memory"]
    assert memory["peak"] == lowered.memory.peak
    assert memory["peak"] == memory["weights"] + memory["state"] + memory["activations"] + memory["io"]
    assert (memory["saved_layers"], memory["layers"], memory["fits"]) == (2, 2, True)
    assert memory["arenas"] == dict(lowered.programs["train"].arena)


def test_a_plan_can_be_read(run: Run, options: list[str]) -> None:
    text = run("plan", *options, "--rank", "7").out
    assert "adamw" in text
    assert "miss: the graph is another (model, recipe or passes)" in text
    assert "26 parts, 17 of them cached" in text
    assert "memory of the training program on cpu: 0." in text
    assert "2 of 2 layers keep their activations" in text
    assert "warning" not in text


def test_a_budget_that_does_not_suffice_is_told(run: Run, options: list[str]) -> None:
    text = run("plan", *options, "--memory-budget", "1kB").out
    assert "0 of 2 layers keep their activations" in text
    assert "warning: more than the budget of 0.0 MiB" in text
