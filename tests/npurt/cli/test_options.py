from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from npurt import UsageError
from npurt.cli import COMMANDS, build_parser
from npurt.cli.options import FILE, NUMBER, SWITCH, TEXT, WHOLE, Option, resolve
from npurt.cli.tables import TRAIN
from npurt.cli.train import train_config

OPTIONS = (
    Option("lr", NUMBER, "rate", default=0.5),
    Option("steps", WHOLE, "steps"),
    Option("grad-clip", NUMBER, "clip", default=1.0),
    Option("pack", SWITCH, "pack", default=True),
    Option("schedule", TEXT, "schedule", default="cosine", choices=("cosine", "linear")),
    Option("data", FILE, "data", default=(), many=True, required=True, unless="dry_run"),
    Option("dry-run", SWITCH, "try", default=False, from_flag_only=True),
)


def resolved(
    given: dict[str, Any] | None = None, environ: dict[str, str] | None = None, config: Path | None = None
) -> dict[str, Any]:
    settings = resolve(
        OPTIONS, {"data": ["x"]} | (given or {}), config=str(config) if config else None, environ=environ or {}
    )
    return dict(settings.values)


def problems(
    given: dict[str, Any] | None = None, environ: dict[str, str] | None = None, config: Path | None = None
) -> dict[str, str]:
    with pytest.raises(UsageError) as caught:
        resolved(given, environ, config)
    return {problem.where: problem.what for problem in caught.value.problems}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('# a comment\nlr = 3\nsteps = 7\ngrad_clip = 0.25\npack = false\ndata = ["a", "b"]\n')
    return path


def test_defaults() -> None:
    assert resolved() == {
        "lr": 0.5,
        "steps": None,
        "grad_clip": 1.0,
        "pack": True,
        "schedule": "cosine",
        "data": ("x",),
        "dry_run": False,
    }


def test_flag_over_environment_over_file_over_default(config: Path) -> None:
    environ = {"NPURT_LR": "2", "NPURT_GRAD_CLIP": "9"}
    found = resolved({"grad_clip": "8"}, environ, config)
    assert (found["grad_clip"], found["lr"], found["steps"], found["schedule"]) == (8.0, 2.0, 7, "cosine")
    assert found["pack"] is False
    settings = resolve(OPTIONS, {"grad_clip": "8"}, config=str(config), environ=environ)
    assert settings.place("grad_clip") == "--grad-clip"
    assert settings.place("lr") == "NPURT_LR"
    assert settings.place("steps") == f"{config}: steps"
    assert settings.place("schedule") == "--schedule"


def test_file_can_be_named_by_the_environment(config: Path) -> None:
    assert resolved(environ={"NPURT_CONFIG": str(config)})["steps"] == 7


def test_several_values() -> None:
    assert resolved({"data": ["a", "b"]})["data"] == ("a", "b")
    settings = resolve(OPTIONS, {}, config=None, environ={"NPURT_DATA": "a:b"})
    assert settings["data"] == ("a", "b")


def test_a_single_value_stands_for_a_list_in_toml(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('data = "/one"\n')
    assert resolve(OPTIONS, {}, config=str(tmp_path / "run.toml"), environ={})["data"] == ("/one",)


def test_paths_in_a_file_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('data = ["a", "../b"]\n')
    settings = resolve(OPTIONS, {}, config=str(tmp_path / "run.toml"), environ={})
    assert settings["data"] == (f"{tmp_path}/a", f"{tmp_path}/../b")


@pytest.mark.parametrize(("word", "value"), [("1", True), ("Yes", True), ("off", False), ("false", False)])
def test_switches_in_the_environment(word: str, value: bool) -> None:
    assert resolved(environ={"NPURT_PACK": word})["pack"] is value


def test_every_problem_of_every_place_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('stpes = 3\nlr = "much"\nschedule = "square"\n')
    found = problems({"steps": "3.5", "data": []}, {"NPURT_GRAD_CLIP": "tight", "NPURT_PACK": "maybe"}, path)
    assert found == {
        f"{path}: stpes": "is not a known key; did you mean 'steps'?",
        f"{path}: lr": "must be a finite number, is text",
        "NPURT_GRAD_CLIP": "must be a number, is 'tight'",
        "NPURT_PACK": "must be true or false, is 'maybe'",
        "--steps": "must be a whole number, is '3.5'",
        "--data": "is needed",
    }


def test_choices() -> None:
    assert problems({"schedule": "square"}) == {"--schedule": "must be one of cosine, linear, is 'square'"}


def test_required_unless() -> None:
    assert "data" in problems({"data": []}).popitem()[0]
    assert resolved({"data": [], "dry_run": True})["data"] == ()


def test_flags_that_files_and_variables_cannot_give(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("dry_run = true\n")
    assert resolved(environ={"NPURT_DRY_RUN": "1"})["dry_run"] is False
    assert "not a known key" in problems(config=tmp_path / "run.toml")[f"{tmp_path / 'run.toml'}: dry_run"]


@pytest.mark.parametrize("content", [b"lr = ", b"\xff\xfe", b"lr = 1\nlr = 2\n"])
def test_file_that_is_no_toml(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(UsageError, match="not TOML"):
        resolved(config=tmp_path / "run.toml")


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the configuration"):
        resolved(config=tmp_path / "none.toml")


def test_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbflr = 3\n")
    assert resolved(config=tmp_path / "run.toml")["lr"] == 3.0


def test_every_command_describes_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = build_parser()
    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    assert commands.choices.keys() == COMMANDS.keys()
    for name, command in COMMANDS.items():
        text = commands.choices[name].format_help()
        for group in command.options.values():
            for option in group:
                assert option.flag in text
                assert option.help.endswith(".")


def test_configuration_errors_name_where_the_value_came_from(config: Path) -> None:
    options = [option for group in TRAIN.values() for option in group]
    given = {"bundle": "b", "weights": "w", "data": ["d"], "out": "o", "grad_clip": "-1"}
    with config.open("a") as file:
        file.write("accum = 0\n")
    settings = resolve(options, given, config=str(config), environ={"NPURT_BETA1": "2"})
    with pytest.raises(UsageError) as caught:
        train_config(settings)
    assert {problem.where for problem in caught.value.problems} == {"--grad-clip", "NPURT_BETA1", f"{config}: accum"}


def test_an_empty_name_of_a_configuration_is_an_error() -> None:
    with pytest.raises(UsageError) as caught:
        resolve(OPTIONS, {"data": ["x"]}, config="", environ={})
    assert {p.where: p.what for p in caught.value.problems} == {"--config": "must not be empty"}


def test_a_configuration_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        resolved(config=tmp_path / "pipe")


def test_a_path_with_nul_is_refused(config: Path) -> None:
    config.write_text('data = ["a\\u0000b"]')
    assert problems(config=config) == {f"{config}: data[0]": "must be a path, is 'a\\x00b'"}


def test_a_missing_bundle_names_the_help_that_there_is() -> None:
    with pytest.raises(UsageError) as caught:
        build_parser().parse_args(["verify"])
    assert caught.value.remedy == "npurt verify --help"
