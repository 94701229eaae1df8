"""The toolchain's environment: its pins come first, and npurt is installed again only when something has changed."""

from __future__ import annotations

from pathlib import Path

import environment
import pytest
import rngd_environment as tool


def test_the_toolchain_decides_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain, development = tmp_path / "toolchain.txt", tmp_path / "development.txt"
    toolchain.write_text("# comment\ntorch==2.10.0\ntyping_extensions==4.1\n")
    development.write_text("torch==2.13.0\ntyping-extensions==4.2\ntokenizers==0.21\n")
    monkeypatch.setattr(tool, "CONSTRAINTS", toolchain)
    monkeypatch.setattr(environment, "CONSTRAINTS", development)
    assert tool.runtime_constraints() == "# comment\ntorch==2.10.0\ntyping_extensions==4.1\ntokenizers==0.21\n"


def test_another_checkout_installs_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tool._has_runtime(tmp_path)
    (tmp_path / "runtime.sha256").write_text(tool.runtime_stamp())
    assert tool._has_runtime(tmp_path)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert not tool._has_runtime(tmp_path)


def test_the_environment_is_that_of_its_pins_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tool.folder()
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tool.folder() == before
