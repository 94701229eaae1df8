"""The pages of npurt in docs/ say what the code does."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import npubundle
import npucc
import npurt
from npubundle.errors import Error, ExitCode
from npurt import EvalReport, ModelReport, StepReport, TrainConfig, Trainer, merge
from npurt.cli import COMMANDS
from npurt.cli.options import Option, resolve
from npurt.cli.tables import TRAIN

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def first_cells(text: str) -> list[str]:
    """Everything in backquotes in the first cell of each row of a table."""
    rows = re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE)
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row)]


def options() -> Iterator[Option]:
    for command in COMMANDS.values():
        for group in command.options.values():
            yield from group


def test_help_is_the_real_one() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        reference = importlib.import_module("npurt_reference")
    finally:
        sys.path.pop(0)
    assert page("reference/npurt-cli.md") == reference.page(), (
        "python tools/npurt_reference.py > docs/reference/npurt-cli.md"
    )


def test_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page("reference/exit-codes.md"), flags=re.MULTILINE)
    assert {name: int(number) for number, name in rows} == {code.name: code.value for code in ExitCode}


def every_error(package: ModuleType) -> set[type[Error]]:
    modules = [package.__name__] + [
        module.name
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if not module.name.endswith("__main__")
    ]
    found = (member for name in modules for member in vars(importlib.import_module(name)).values())
    return {member for member in found if inspect.isclass(member) and issubclass(member, Error)}


def test_kinds_of_error() -> None:
    listed = re.findall(r"^\| `([\w-]+)` \| (\d+) \|$", page("reference/exit-codes.md"), flags=re.MULTILINE)
    classes = {error for package in (npubundle, npucc, npurt) for error in every_error(package)}
    assert {(error.code, str(int(error.exit_code))) for error in classes} == set(listed)


def test_environment_variables() -> None:
    text = page("reference/environment-variables.md")
    listed = {name for name in re.findall(r"`((?:NPUCC|NPURT)_\w+)`", text) if not name.endswith("_")}
    from_options = {option.variable for option in options() if not option.from_flag_only}
    sources = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("npucc", "runtime/npurt", "formats/npubundle", "tools")
        for path in (ROOT / folder).rglob("*.py")
    )
    others = set(re.findall(r'"((?:NPUCC|NPURT)_[A-Z_]+)"', sources)) | {"NPURT_DEBUG", "NPURT_CONFIG"}
    assert listed == from_options | others
    assert set(re.findall(r"^\| `(NPURT_\w+)` \| `--", text, flags=re.MULTILINE)) == from_options


def test_every_value_of_the_configuration_with_its_default() -> None:
    text = page("reference/python-api.md")
    table = text[text.index("## `TrainConfig`") : text.index("## `Trainer`")]
    found: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`.*?`) \| (.*?) \|", table, flags=re.MULTILINE):
        found |= zip(re.findall(r"`(\w+)`", names), (word.strip(' `"') for word in defaults.split(",")), strict=True)
    assert found == {field.name: str(field.default) for field in dataclasses.fields(TrainConfig)}


def test_methods_and_reports() -> None:
    text = page("reference/python-api.md")
    section = text[text.index("## `Trainer`") : text.index("## `StepReport`")]
    described = {name.partition("(")[0] for name in first_cells(section)}
    public = {name for name in vars(Trainer) if not name.startswith("_")} - {"on", "stopping"}
    assert described == public
    for call in first_cells(section):
        name, _, rest = call.partition("(")
        written = re.findall(r"(\w+)(?:=[^,)]+)?(?=[,)])", rest)
        assert written == list(inspect.signature(getattr(Trainer, name)).parameters)[1 : len(written) + 1], call
    reports = text[text.index("## `StepReport`") : text.index("## A loop")]
    assert set(first_cells(reports)) - {"StepReport"} == {field.name for field in dataclasses.fields(StepReport)}
    for field in ("loss", "accuracy", "tokens", "perplexity"):
        assert f"`{field}`" in reports
        assert hasattr(EvalReport(1.0, 0.5, 1), field)


def test_merge_and_its_report() -> None:
    text = page("reference/python-api.md")
    section = text[text.index("## `merge`") :]
    (call,) = re.findall(r"`(merge\(weights, [^`]*)`", section)
    assert re.findall(r"(\w+)(?:=[^,)]+)?(?=[,)])", call) == list(inspect.signature(merge).parameters)
    assert set(first_cells(section)) - {"ModelReport"} == {field.name for field in dataclasses.fields(ModelReport)}


def test_constructor_of_the_trainer() -> None:
    text = re.sub(r"\s+", " ", page("reference/python-api.md"))
    (call,) = re.findall(r"`(Trainer\(bundle, [^`]*)`", text)
    names = re.findall(r"(\w+)(?:=[^,)]+)?(?=[,)])", call)
    assert names == list(inspect.signature(Trainer).parameters)


def test_the_configuration_file_of_the_how_to(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", page("how-to/train.md"), flags=re.DOTALL)
    assert tomllib.loads(block)["steps"] == 400
    (tmp_path / "run.toml").write_text(block, encoding="utf-8")
    known = [option for group in TRAIN.values() for option in group]
    settings = resolve(known, {}, config=str(tmp_path / "run.toml"), environ={})
    assert settings["data"] == (str(tmp_path / "train.jsonl"), str(tmp_path / "general.jsonl"))
    assert settings["out"] == str(tmp_path / "adapter")


@pytest.mark.parametrize(
    "name", ["how-to/train.md", "how-to/export.md", "reference/checkpoint.md", "reference/python-api.md"]
)
def test_flags_that_are_named_exist(name: str) -> None:
    flags = {option.flag for option in options()} | {"--config", "--help", "--memory-budget"}
    flags |= {"--enable-lora", "--max-lora-rank", "--lora-modules"}  # of vLLM
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page(name))) <= flags
