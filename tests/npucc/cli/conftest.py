"""The command line, run in this process, and bundles for it to look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from npubundle import container
from npucc.build import Compiled
from npucc.cache import Cache
from npucc.cli import main
from tests.npucc import tiny


@dataclass(frozen=True)
class Result:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("plan", "--json")` runs the command in an empty folder, with nothing of the user's around it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (
        "NPUCC_CACHE",
        "NPUCC_TUNING",
        "NPUCC_TRUST_POLICY",
        "NPUCC_KEY_PASSPHRASE",
        "NPUCC_DEBUG",
        "XDG_CONFIG_HOME",
    ):
        monkeypatch.delenv(name, raising=False)

    def command(*words: object) -> Result:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return command


@pytest.fixture
def options(config_file: Path, warm_cache: Cache) -> list[str]:
    """Options of a build of the tiny model that finds everything in the cache."""
    words = ["--model", str(config_file), "--rank", "3", "--alpha", "6", "--seq-len", str(tiny.SEQ_LEN)]
    return [*words, "--cache-dir", str(warm_cache.root)]


@pytest.fixture(scope="session")
def bundle(signed: Compiled, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The signed bundle as a file."""
    path = tmp_path_factory.mktemp("bundle") / "tiny.npub"
    container.write(path, signed.content)
    return path


@pytest.fixture(scope="session")
def trust(key: Path) -> Path:
    """The public key of the signed bundle."""
    return Path(f"{key}.pub")
