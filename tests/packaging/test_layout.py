"""Three distributions that can be told apart, and a repository that works anywhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {"npucc": ROOT, "npurt": ROOT / "runtime", "npubundle": ROOT / "formats"}


def settings(project: Path) -> dict[str, Any]:
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))


def python(code: str, cwd: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run code with this environment, from a folder where the repository is not on the import path."""
    return subprocess.run(
        [sys.executable, "-P", *options, "-c", code], cwd=cwd, check=False, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", PROJECTS)
def test_distributions_agree_on_licence_python_and_version(name: str) -> None:
    project = settings(PROJECTS[name])["project"]
    root = settings(ROOT)["project"]
    assert project["name"] == name
    assert project["license"] == "Apache-2.0"
    assert project["version"] == root["version"] == metadata.version(name)
    assert project["requires-python"] == root["requires-python"]
    assert (PROJECTS[name] / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", ["npucc", "npurt"])
def test_both_programs_need_the_format_of_their_own_version(name: str) -> None:
    project = settings(PROJECTS[name])["project"]
    assert f"npubundle=={project['version']}" in project["dependencies"]


def test_runtime_and_format_do_without_torch_and_transformers() -> None:
    for name in ("npurt", "npubundle"):
        # A device's kit may bring what it likes; it is an extra that only its hosts install.
        needed = [line for line in metadata.requires(name) or [] if "extra == 'rngd'" not in line]
        required = " ".join(needed).lower()
        assert not re.search(r"\b(torch|transformers|peft|rich|pydantic)\b", required)


def pins_of(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_direct_requirement_is_pinned() -> None:
    pins = pins_of("constraints.txt")
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins), "exact, and no local versions"
    pinned = {pin.split("==")[0] for pin in (*pins, *pins_of("constraints-rngd.txt"))}
    wanted = list(settings(ROOT)["dependency-groups"]["dev"])
    for project in PROJECTS.values():
        table = settings(project)["project"]
        wanted += table["dependencies"]
        wanted += [need for extra in table.get("optional-dependencies", {}).values() for need in extra]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[<>=~!\[; ]", need)[0]).lower() for need in wanted}
    assert names - set(PROJECTS) <= pinned


@pytest.mark.parametrize("folder", ["runtime", "formats", "tests", "tools", "benchmarks"])
def test_folders_of_the_repository_are_not_importable(folder: str, tmp_path: Path) -> None:
    assert "ModuleNotFoundError" in python(f"import {folder}", tmp_path).stderr


@pytest.mark.parametrize("package", PROJECTS)
def test_packages_are_importable_from_anywhere(package: str, tmp_path: Path) -> None:
    assert python(f"import {package}", tmp_path).returncode == 0


def test_importing_npurt_loads_nothing_heavy(tmp_path: Path) -> None:
    log = python("import npurt", tmp_path, "-X", "importtime").stderr
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in log.splitlines()}
    assert "npurt" in loaded
    assert not loaded & {"torch", "transformers", "onnxruntime", "onnx", "tokenizers", "jinja2"}


def test_help_of_both_programs_loads_nothing_heavy(tmp_path: Path) -> None:
    for package in ("npucc", "npurt"):
        done = python(
            f"import sys; sys.argv = ['{package}', '--help']; from {package}.cli import main; main()",
            tmp_path,
            "-X",
            "importtime",
        )
        assert done.returncode == 0
        assert "usage" in done.stdout.lower()
        loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
        assert not loaded & {"torch", "transformers", "onnxruntime", "onnx"}


def tracked_text() -> dict[str, str]:
    """Every text file under version control, by its path."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    texts = {}
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            raw = (ROOT / name).read_bytes()
            if b"\0" not in raw:
                texts[name] = raw.decode("utf-8")
    return texts


def test_repository_names_no_machine_and_no_registry() -> None:
    # Written in pieces, so that this file does not find itself.
    forbidden = [
        "/" + "root/",
        "/" + "home/",
        "/" + "work/",
        "/opt/" + "(pypi|wheels)",
        "pypi" + r"\.org",
        "python" + "hosted",
        "registry" + r"\.npmjs",
        "deb" + r"\.debian\.org",
        "download" + r"\.pytorch\.org",
        r"\.\./" + "shared",
    ]
    pattern = re.compile("|".join(forbidden))
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in tracked_text().items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_python_sources_stay_readable_in_one_sitting() -> None:
    long = {name: text.count("\n") for name, text in tracked_text().items() if name.endswith(".py")}
    assert {name: lines for name, lines in long.items() if lines > 500} == {}
