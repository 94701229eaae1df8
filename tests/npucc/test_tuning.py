"""Tuning tables: what a file may be, which of several holds, and whose part keys change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from npubundle.tensor import TensorType
from npucc.cli import main
from npucc.errors import UsageError
from npucc.graph import Graph
from npucc.graph.capture import capture
from npucc.passes import simplify
from npucc.targets import TargetOptions, find
from npucc.targets.rngd import RngdTarget
from npucc.tuning import SHIPPED, Cost, Table, TunedCut, TunedPart, Tuning, extend, key_of
from tests.npucc import tiny

PART = TunedPart("doubled", "Default", 4, Cost(80, 1.5), Cost(100, 9.0), "fc43")
CUT = TunedCut("llama 36 s14", 2, 900, 40, 1000, "fc43")


def doubled(rows: int = 4) -> Graph:
    return simplify(capture("doubled", lambda x: [x * 2 + 1], {"x": TensorType("f32", (rows, 6))}, ["y"]))


def table(part: TunedPart = PART, fusion: int = 8) -> Table:
    return Table({(key_of(doubled()), fusion): part}, {(key_of(doubled()), fusion): CUT})


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(table().encode())
    assert Table.load(path) == table()
    assert Table.load(path).encode() == path.read_bytes()


def test_the_table_that_ships_can_be_read() -> None:
    assert Table.load(SHIPPED).encode() == SHIPPED.read_bytes()


def test_a_file_is_extended_and_what_it_has_stays(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    extend(path, parts=table().parts)
    extend(path, cuts=table().cuts)
    better = dataclasses.replace(PART, cost=Cost(70, None))
    extend(path, parts={**table(better).parts, **table(fusion=4).parts})
    found = Table.load(path)
    assert found.cuts == table().cuts
    assert found.parts == {**table(better).parts, **table(fusion=4).parts}
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_a_file_stays_as_it_was_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    extend(path, parts=table().parts)

    def broken(_: Table) -> bytes:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Table, "encode", broken)
        with pytest.raises(OSError, match="no space"):
            extend(path, cuts=table().cuts)
    assert Table.load(path).parts == table().parts
    assert not Table.load(path).cuts
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def changed(**part: Any) -> bytes:
    document = json.loads(table().encode())
    (entries,) = document["parts"].values()
    entries["8"] |= part
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "the tuning table"),
        (b"{", "the tuning table"),
        (b"[]", "the tuning table"),
        (b'{"format":2,"target":"rngd","parts":{},"cuts":{}}', "format"),
        (b'{"format":1,"target":"cpu","parts":{},"cuts":{}}', "target"),
        (b'{"format":1,"target":"rngd","parts":{"x":{}},"cuts":{}}', "x"),
        (b'{"format":1,"target":"rngd","parts":{},"cuts":{},"more":1}', "more"),
        (changed(cycles=-1), "cycles"),
        (changed(tactic="a b"), "tactic"),
        (changed(max_shapes=0), "max_shapes"),
        (changed(seconds="long"), "seconds"),
    ],
)
def test_another_file_is_refused_by_what_is_wrong(raw: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(raw)
    with pytest.raises(UsageError) as caught:
        Table.load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find("rngd", TargetOptions(tables=(tmp_path / "none.json",)))
    assert "npucc tune" in str(caught.value.remedy)


def test_a_later_table_wins_unless_it_is_of_another_compiler() -> None:
    later = dataclasses.replace(PART, tactic="ForLlmModelIOBound")
    old = dataclasses.replace(PART, tactic="ForVisionModel", compiler="aaaa")
    tuning = Tuning([table(), table(later), table(old)])
    assert tuning.part(doubled(), 8, lambda: "fc43") == later
    assert tuning.part(doubled(), 8, lambda: "aaaa") == old
    assert tuning.part(doubled(), 8, lambda: "bbbb") is None
    assert tuning.part(doubled(), 4, lambda: "fc43") is None
    assert tuning.part(doubled(5), 8, lambda: "fc43") is None
    assert tuning.cut(doubled(), 8, lambda: "fc43") == CUT


class Known(RngdTarget):
    """A target that need not ask an SDK for its revision."""

    def compiler(self) -> str:
        return "fc43"


def test_only_parts_with_an_entry_have_another_key() -> None:
    tuned, plain = Known(tuning=Tuning([table()])), Known()
    assert tuned.options(doubled(5)) == plain.options(doubled(5))
    assert tuned.options(doubled()) == plain.options(doubled()) | {"tactic": "Default", "max_shapes": "4"}
    assert tuned.CUT.tuned_products is not None
    assert tuned.CUT.tuned_products(doubled()) == 2
    assert tuned.CUT.tuned_products(doubled(5)) is None


def test_flags_win_over_tables(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(table().encode())
    by_hand = find("rngd", TargetOptions(tactic="ForMiscModel", max_products=1, tables=(path,)))
    assert by_hand.options(doubled())["tactic"] == "ForMiscModel"
    assert by_hand.CUT.products_per_part == 1
    assert by_hand.CUT.tuned_products is None
    shapes = find("rngd", TargetOptions(max_shapes=2, tables=(path,)))
    assert shapes.options(doubled())["max_shapes"] == "2"
    assert find("rngd", TargetOptions(tables=None)).options(doubled())["tactic"] == "ForLlmModelComputeBound"


def test_the_variable_names_several_files_and_a_flag_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_bytes(table().encode())
    (tmp_path / "config.json").write_text(json.dumps(tiny.config()))
    words = ["plan", "--model", str(tmp_path / "config.json"), "--cache-dir", str(tmp_path / "cache")]
    monkeypatch.setenv("NPUCC_TUNING", f"{one}:{two}")
    assert main([*words, "--target", "rngd"]) == 2
    assert f"where: {two}" in capsys.readouterr().err
    assert main([*words, "--target", "rngd", "--tuning", str(tmp_path / "three.json")]) == 2
    assert "three.json" in capsys.readouterr().err
    assert main([*words, "--target", "cpu"]) == 0  # it has no tables
