"""What tests of the compiler share: the tiny model, traced and built once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npubundle import keys
from npucc.build import Compiled, Lowered, build, lower
from npucc.cache import Cache
from npucc.parts import Traced, trace
from npucc.progress import Progress
from npucc.targets import cpu
from tests.npucc import tiny


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than they bring where tensors have a few dozen elements."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def traced() -> Traced:
    """The tiny model with slices of the vocabulary and blocks of rows that do not divide evenly, and logits."""
    return trace(tiny.model(), tiny.recipe(targets=("q", "v", "down"), logits=True), tiny.CUT)


@pytest.fixture(scope="session")
def lowered() -> Lowered:
    """What `npucc build` makes of the tiny model before it compiles anything."""
    return lower(tiny.model(), tiny.recipe(), cpu)


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory, lowered: Lowered) -> Cache:
    """A cache in which every part of `lowered` is compiled. Tests read it and add to it, and damage a copy."""
    cache = Cache(tmp_path_factory.mktemp("warm") / "cache")
    build(lowered.traced.model, lowered.traced.recipe, cpu, cache, Progress("quiet"))
    return cache


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Ed25519 key file; the public one is beside it."""
    path = tmp_path_factory.mktemp("keys") / "dev"
    keys.save(keys.generate(), path)
    return path


@pytest.fixture(scope="session")
def signed(lowered: Lowered, warm_cache: Cache, key: Path) -> Compiled:
    """The signed bundle of `lowered`."""
    signer = keys.PrivateKey.load(key)
    return build(lowered.traced.model, lowered.traced.recipe, cpu, warm_cache, Progress("quiet"), signer=signer)


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's `config.json`."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(tiny.config()), encoding="utf-8")
    return path
