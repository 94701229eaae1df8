from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from npubundle.atomic import sibling
from npubundle.part import Estimate
from npucc.build import Lowered, build, compile_all, lower
from npucc.cache import Cache, Entry, Identity
from npucc.numerics import NUMERICS_VERSION, Measured
from npucc.progress import Progress
from npucc.targets import CompiledPart, cpu
from tests.npucc.faulty_targets import FaultyTarget

MEASURED = (Measured("y", 1.5e-7, 0.25, 0.999999), Measured("n", 0.0, 0.0, 1.0))
ENTRY = Entry(CompiledPart(b"payload\nwith a line break\x00"), MEASURED)
#: As a device's compiler makes it.
FULL = Entry(CompiledPart(b"payload\n", b"the imported graph\n\x00", Estimate(7, 91.25, None)), MEASURED)
IDENTITY = Identity("layer", "sha256:1", "cpu", {"level": "3"}, {"onnx": "1.0", "passes": "1"})


def other(**changes: object) -> Identity:
    return Identity(**{name: getattr(IDENTITY, name) for name in IDENTITY.__slots__} | changes)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def temporary_files(cache: Cache) -> list[Path]:
    return [path for path in cache.root.rglob("*") if path.is_file() and path.suffix != ".part"]


@pytest.mark.parametrize("entry", [ENTRY, FULL], ids=["payload", "payload-graph-estimate"])
def test_an_entry_is_found_by_its_identity(cache: Cache, entry: Entry) -> None:
    assert cache.get(IDENTITY) is None
    cache.put(IDENTITY, entry)
    assert cache.get(IDENTITY) == entry
    assert temporary_files(cache) == []


def test_the_name_of_a_part_is_no_part_of_its_key(cache: Cache) -> None:
    cache.put(IDENTITY, ENTRY)
    assert cache.get(other(part="another name")) == ENTRY


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"graph": "sha256:2"}, "the graph is another (model, recipe or passes)"),
        ({"toolchain": {"onnx": "1.1", "passes": "1"}}, "toolchain onnx was 1.0, is 1.1"),
        ({"toolchain": {"onnx": "1.0"}}, "toolchain passes was 1, is None"),
        ({"options": {"level": "2"}}, "option level was 3, is 2"),
        ({"graph": "x", "options": {}}, "the graph is another (model, recipe or passes); option level was 3, is None"),
        ({"target": "rngd"}, "never compiled on this cache"),
        ({"part": "head", "graph": "sha256:2"}, "never compiled on this cache"),
    ],
)
def test_whatever_can_change_the_bytes_changes_the_key(cache: Cache, changes: dict[str, object], why: str) -> None:
    cache.put(IDENTITY, ENTRY)
    changed = other(**changes)
    assert changed.key != IDENTITY.key
    assert cache.get(changed) is None
    assert cache.why_missing(changed) == why


def test_the_nearest_entry_explains_a_miss(cache: Cache) -> None:
    cache.put(other(graph="sha256:2", toolchain={"onnx": "0.9", "passes": "1"}), ENTRY)
    cache.put(other(toolchain={"onnx": "0.9", "passes": "1"}), ENTRY)
    assert cache.why_missing(IDENTITY) == "toolchain onnx was 0.9, is 1.0"


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"x",
        lambda raw: raw.replace(b"payload\n", b"Payload\n"),
        lambda raw: raw[raw.index(b"\n") :],
        lambda raw: raw.replace(f'"numerics":{NUMERICS_VERSION}'.encode(), b'"numerics":0'),
        lambda raw: raw.replace(b'"measured":[[', b'"measured":[[1,'),
        lambda raw: raw.replace(b'"estimate":[', b'"estimate":[1,'),
        lambda raw: raw.replace(b'"size":', b'"length":'),
        lambda _: b"",
        lambda _: b"[]\npayload",
        lambda _: b"[" * 100_000,
        lambda _: b"\xff\xfe\x00",
    ],
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(cache: Cache, damage: object) -> None:
    cache.put(IDENTITY, FULL)
    path = cache.path(IDENTITY.key)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert cache.get(IDENTITY) is None
    assert "damaged" in cache.why_missing(IDENTITY)
    assert list(cache.identities()) == [IDENTITY.to_dict()] or list(cache.identities()) == []
    cache.put(IDENTITY, FULL)
    assert cache.get(IDENTITY) == FULL


def test_strange_things_in_the_folder_are_passed_over(cache: Cache) -> None:
    cache.put(IDENTITY, ENTRY)
    folder = cache.root / "parts" / "zz"
    folder.mkdir()
    (folder / "x.part").mkdir()
    (folder / "y.part").write_bytes(b"\x00" * 100)
    assert cache.why_missing(other(graph="sha256:2")).startswith("the graph is another")


def test_what_killed_builds_left_is_removed_after_a_day(cache: Cache) -> None:
    cache.put(IDENTITY, ENTRY)
    folder = cache.path(IDENTITY.key).parent
    old, new = sibling(folder / "x"), sibling(folder / "x")
    for file in (old, new):
        file.write_bytes(b"half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    os.utime(cache.path(IDENTITY.key), (two_days_ago, two_days_ago))
    cache.remove_abandoned()
    assert not old.exists()
    assert new.exists()
    assert cache.get(IDENTITY) is not None


def test_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NPUCC_CACHE", str(tmp_path / "a"))
    assert Cache.default().root == tmp_path / "a"
    monkeypatch.delenv("NPUCC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert Cache.default().root == tmp_path / "b" / "npucc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert Cache.default().root == tmp_path / "c" / ".cache" / "npucc"


# -- builds on a cache ------------------------------------------------------------------------------------------------


class FullDisk(Cache):
    """A cache on a disk without room: nothing can be written, and nothing half-written is left."""

    def put(self, identity: Identity, entry: Entry) -> None:
        del entry
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path(identity.key)))


def test_a_full_disk_costs_the_cache_and_not_the_build(
    lowered: Lowered, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = FullDisk(tmp_path / "full")
    made = build(lowered.traced.model, lowered.traced.recipe, cpu, full, Progress("plain"))
    assert (made.compiled, made.cached) == (len({i.key for i in lowered.identities.values()}), 0)
    said = capsys.readouterr().err
    assert f"warning: clip is not cached: No space left on device ({full.root})" in said
    assert not full.root.exists()


def test_a_place_that_cannot_be_a_folder_costs_the_cache_and_not_the_build(lowered: Lowered, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    entries, compiled = compile_all(lowered, Cache(tmp_path / "file"), Progress("quiet"))
    assert compiled == len({identity.key for identity in lowered.identities.values()})
    assert set(entries) == set(lowered.identities)


def test_a_damaged_entry_is_compiled_again(lowered: Lowered, warm_cache: Cache, tmp_path: Path) -> None:
    copy = Cache(tmp_path / "copy")
    entries, _ = compile_all(lowered, warm_cache, Progress("quiet"))
    for name, entry in entries.items():
        copy.put(lowered.identities[name], entry)
    path = copy.path(lowered.identities["clip"].key)
    path.write_bytes(path.read_bytes()[:-3])
    again, compiled = compile_all(lowered, copy, Progress("quiet"))
    assert compiled == 1
    assert again == entries
    assert compile_all(lowered, copy, Progress("quiet"))[1] == 0


def test_another_toolchain_compiles_everything_again(lowered: Lowered, warm_cache: Cache) -> None:
    newer = FaultyTarget(versions={"onnx": "99.0"})
    missing = lower(lowered.traced.model, lowered.traced.recipe, newer).identities["clip"]
    assert warm_cache.get(missing) is None
    assert warm_cache.why_missing(missing) == f"toolchain onnx was {cpu.toolchain()['onnx']}, is 99.0"


BUILD = """
import sys
from pathlib import Path
from npubundle.recipe import Recipe
from npucc.build import build
from npucc.cache import Cache
from npucc.progress import Progress
from npucc.targets import CompiledPart, cpu
from tests.npucc import tiny
made = build(tiny.model(), tiny.recipe(), cpu, Cache(Path(sys.argv[1])), Progress("json"))
print(made.content.manifest_digest)
"""


def start_build(root: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(root)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_two_builds_at_once_share_a_cache(lowered: Lowered, cache: Cache) -> None:
    both = [start_build(cache.root), start_build(cache.root)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][0] == outputs[1][0]
    assert temporary_files(cache) == []
    assert compile_all(lowered, cache, Progress("quiet"))[1] == 0


def test_a_build_that_is_killed_leaves_a_cache_that_can_be_used(lowered: Lowered, cache: Cache) -> None:
    process = start_build(cache.root)
    assert process.stderr is not None
    for line in process.stderr:
        if "layer.backward" in line:  # some parts are done, and this one has just begun
            break
    process.kill()
    process.wait(timeout=60)
    process.communicate()
    done = {file.stem for file in cache.root.rglob("*.part")}
    assert done
    _, compiled = compile_all(lowered, cache, Progress("quiet"))
    keys = {identity.key.removeprefix("sha256:") for identity in lowered.identities.values()}
    assert compiled == len(keys - done)
    assert compile_all(lowered, cache, Progress("quiet"))[1] == 0
