"""The pages of npucc in docs/ say what the code does."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest
import typer

from npubundle.fields import read
from npubundle.recipe import FULL_FLAGS, RECIPE, Mode, Recipe
from npucc.cli import app
from npucc.cli.options import parse_size
from npucc.models import Architecture
from tests.npucc.cli.conftest import Run
from tests.npucc.tiny import model

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
#: Flags that say how to compile, and not what: no keys of a recipe file.
OF_A_TARGET = [
    "--fusion",
    "--jobs",
    "--max-mm",
    "--tactic",
    "--max-shapes",
    "--verify",
    "--tuning",
    "--no-tuning",
    "--graphs",
]
OURS = ["how-to/build.md", "how-to/tune.md", "how-to/add-an-architecture.md", "reference/recipe.md"]
OURS += ["reference/part-cache.md", "reference/tuning-table.md"]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def examples() -> list[str]:
    return [str(block) for block in re.findall(r"```toml\n(.*?)```", page("reference/recipe.md"), flags=re.DOTALL)]


def example() -> str:
    return examples()[0]


def test_help_is_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "")  # the tool sets it
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    reference = importlib.import_module("npucc_reference")
    assert page("reference/npucc-cli.md") == reference.page(), (
        "python tools/npucc_reference.py > docs/reference/npucc-cli.md"
    )


def test_the_example_of_a_recipe_file_is_one(run: Run, options: list[str], config_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    document = json.loads(config_file.read_text(encoding="utf-8")) | {"my_own_remark": "for the example"}
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "recipe.toml").write_text(example(), encoding="utf-8")
    told = run("plan", "--recipe", "recipe.toml", "--json").json
    assert told["memory"]["budget"] == 6 << 30
    flags = ["--rank", "16", "--alpha", "32", "--seq-len", "512", "--ignore-config-key", "my_own_remark"]
    same = run("plan", "--model", "models/llama", *flags, "--json").json
    assert [part["key"] for part in told["parts"]] == [part["key"] for part in same["parts"]]


def test_the_example_has_every_key_and_shows_the_defaults() -> None:
    document = tomllib.loads(example())
    assert set(document) == {"model", "target", "name", "ignore_config_keys", "recipe"}
    shown = document["recipe"] | {"memory_budget": None}
    assert shown == Recipe().to_dict()


def test_the_second_example_shows_the_keys_of_full_fine_tuning() -> None:
    (shown,) = (tomllib.loads(block)["recipe"] for block in examples()[1:])
    assert shown == {"mode": "full"} | dict.fromkeys(FULL_FLAGS, False)
    assert read(shown, RECIPE, what="it") == Recipe(Mode.FULL, targets=())


def test_the_table_of_a_recipe_file_has_every_key_flag_and_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| ?(.*?) ?\|$", page("reference/recipe.md"), flags=re.MULTILINE)
    listed = {key.removeprefix("recipe."): default.strip("`") for key, _, default in rows}
    defaults = Recipe().to_dict() | dict.fromkeys(FULL_FLAGS, False)
    assert set(listed) == {"model", "target", "name", "ignore_config_keys", *defaults}
    for key, value in defaults.items():
        if value is not None:
            text = ",".join(value) if isinstance(value, list) else json.dumps(value).strip('"')
            assert listed[key] == text.removesuffix(".0"), key
    flags = {flag for _, cell, _ in rows for flag in re.findall(r"--[\w-]+", cell)}
    assert flags == flags_of("build") - {
        "--recipe",
        "--key",
        "--output",
        "--dump",
        "--cache-dir",
        "--progress",
        "--json",
        *OF_A_TARGET,
    }


def test_flags_that_are_no_keys_of_a_recipe_file_are_named_beside_it() -> None:
    below = page("reference/recipe.md").split("| `recipe.logits`")[1]
    assert all(f"`{flag}`" in below for flag in OF_A_TARGET)


def flags_of(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {flag for option in found for flag in option.opts if flag.startswith("--")} - {"--help"}


@pytest.mark.parametrize("name", OURS)
def test_flags_that_are_named_exist(name: str) -> None:
    known = {flag for command in ("build", "plan", "tune", "inspect", "verify", "keygen") for flag in flags_of(command)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page(name))) <= known


@pytest.mark.parametrize("name", OURS)
def test_files_that_are_named_exist(name: str) -> None:
    for path in re.findall(r"`((?:npucc|tests|formats|tools)/[\w./-]+)`", page(name)):
        assert (ROOT / path).exists(), path


def test_units_of_sizes() -> None:
    text = page("reference/recipe.md")
    for unit, factor in zip(["B", "kB", "MB", "GB", "TB"], [1000**n for n in range(5)], strict=True):
        assert re.search(rf"\b{unit}\b", text)
        assert parse_size(f"2 {unit}") == 2 * factor
    for unit, factor in zip(["KiB", "MiB", "GiB", "TiB"], [1024**n for n in range(1, 5)], strict=True):
        assert re.search(rf"\b{unit}\b", text)
        assert parse_size(f"2{unit}") == 2 * factor


def test_the_example_of_an_architecture_is_python_that_fits_the_interface() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", page("how-to/add-an-architecture.md"), flags=re.DOTALL)
    namespace: dict[str, object] = {}
    exec(compile(block, "example", "exec"), namespace)
    family = namespace["EXAMPLE"]
    assert isinstance(family, Architecture)
    tensors = {t.name: t.tensor for t in family.layer_tensors(model().config)}
    assert tensors["q_norm"] == "self_attn.q_norm.weight"
