"""What a device node gets from `pip install npurt[cpu]`: built wheels in an environment that holds nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIZE_LIMIT = 260_000_000  # bytes; pip and setuptools are not counted because they are not installed


@dataclass(frozen=True, slots=True)
class Node:
    """An environment with `npurt[cpu]` only, and the wheels it was installed from."""

    home: Path
    wheels: tuple[Path, ...]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one of its programs, without this process' variables for Python and from a folder of its own."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [self.home / "bin" / command[0], *command[1:]],
            cwd=self.home,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """Wheels of npubundle and npurt, installed as a user would, at the pinned versions."""
    home = tmp_path_factory.mktemp("node")
    dist = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist)]
    subprocess.run([*build, ROOT / "formats", ROOT / "runtime"], check=True, timeout=120)
    npubundle, npurt = sorted(dist.glob("*.whl"))
    venv.create(home, with_pip=False, symlinks=True)
    install = [*pip, "--python", str(home / "bin" / "python"), "install", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, npubundle, f"{npurt}[cpu]"], check=True, timeout=600)
    return Node(home, (npubundle, npurt))


def test_wheels_hold_their_package_and_nothing_else(node: Node) -> None:
    for wheel in node.wheels:
        package = wheel.name.split("-")[0]
        names = zipfile.ZipFile(wheel).namelist()
        assert {name.split("/")[0] for name in names} == {package, f"{package}-0.1.0.dist-info"}
        assert f"{package}/py.typed" in names
        assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_size_is_small(node: Node) -> None:
    files = [path for path in (node.home / "lib").rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < SIZE_LIMIT


def test_no_torch_and_no_transformers(node: Node) -> None:
    for module in ("torch", "transformers", "onnx", "npucc", "rich", "pydantic"):
        assert "ModuleNotFoundError" in node.run("python", "-c", f"import {module}").stderr


def test_every_module_imports(node: Node) -> None:
    code = (
        "import importlib, pkgutil, npubundle, npurt\n"
        "for package in (npubundle, npurt):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if not module.name.endswith('__main__'):\n"
        "            importlib.import_module(module.name)\n"
    )
    done = node.run("python", "-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr


def test_program_is_on_the_path(node: Node) -> None:
    done = node.run("npurt", "--help")
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_golden_bundle_trains_two_steps(node: Node, tmp_path: Path) -> None:
    golden = max((ROOT / "tests" / "golden").glob("v*"))
    done = node.run(
        "npurt", "train", "--bundle", str(golden / "golden.npub"), "--trust", str(golden / "golden.pub"),
        "--weights", str(golden / "model"), "--data", str(golden / "train.jsonl"), "--steps", "2", "--lr", "1e-2",
        "--schedule", "constant", "--seed", "7", "--json", "--out", str(tmp_path / "adapter"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [record for record in map(json.loads, done.stdout.splitlines()) if "grad_norm" in record]
    expected = json.loads((golden / "expected.json").read_text())
    assert [step["loss"] for step in steps] == pytest.approx(expected["losses"], rel=1e-4)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
