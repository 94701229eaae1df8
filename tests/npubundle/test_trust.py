"""Trust policies: the file, the command line, the default."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from npubundle import keys, trust
from npubundle.errors import Error, FileError
from npubundle.keys import KeyFileError
from npubundle.trust import Mode, PolicyError, Rule, TrustPolicy
from tests.npubundle.samples import key, trusting


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with keys, on a host without a policy."""
    for name in ("a", "b"):
        keys.save(key(name), tmp_path / name)
    monkeypatch.delenv("NPUCC_TRUST_POLICY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "SYSTEM_POLICY", tmp_path / "etc" / "trust.toml")
    return tmp_path


def policy(folder: Path, source: str, name: str = "trust.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path


FULL = """
mode = "warn"

[[keys]]
name = "farm"
path = "a.pub"
valid_from = 2026-01-01T00:00:00Z
valid_until = 2027-01-01T00:00:00+02:00

[[keys]]
name = "old"
pem = '''
{pem}'''
revoked = true

[[rules]]
match = "prod/*"
keys = ["farm", "old"]
threshold = 2

[[rules]]
match = "*"
keys = ["farm"]
"""


def test_a_policy_file_is_read(folder: Path) -> None:
    read = TrustPolicy.load(policy(folder, FULL.format(pem=key("b").public.pem.decode())))
    farm, old = read.keys
    assert read.mode is Mode.WARN
    assert (farm.name, farm.public, farm.revoked) == ("farm", key("a").public, False)
    assert farm.valid_from == datetime(2026, 1, 1, tzinfo=UTC)
    assert farm.valid_until == datetime(2026, 12, 31, 22, tzinfo=UTC)
    assert (old.name, old.public, old.revoked) == ("old", key("b").public, True)
    assert read.rules == (Rule("prod/*", ("farm", "old"), 2), Rule("*", ("farm",), 1))


def test_the_first_matching_rule_counts(folder: Path) -> None:
    read = TrustPolicy.load(policy(folder, FULL.format(pem=key("b").public.pem.decode())))
    assert read.rule_for("prod/llama") == read.rules[0]
    assert read.rule_for("prod/team/llama") == read.rules[0]
    assert read.rule_for("production") == read.rules[1]
    assert trusting("a", rules=read.rules[:1]).rule_for("dev/llama") is None
    assert trusting("a", "b").rule_for("anything") == Rule("*", ("a", "b"), 1)


def test_the_mode_defaults_to_enforce(folder: Path) -> None:
    assert TrustPolicy.load(policy(folder, '[[keys]]\nname = "a"\npath = "a.pub"\n')).mode is Mode.ENFORCE
    assert TrustPolicy.load(policy(folder, 'mode = "off"\n')).keys == ()


def test_all_problems_of_a_policy_are_reported(folder: Path) -> None:
    source = """
mode = "strict"
extra = 1
[[keys]]
name = "one"
path = "none.pub"
[[keys]]
name = "two"
path = "a"
[[keys]]
name = "three"
[[keys]]
name = "four"
path = "a.pub"
pem = "x"
[[keys]]
name = "five"
path = "b.pub"
valid_from = 2027-01-01T00:00:00Z
valid_until = 2026-01-01T00:00:00Z
[[keys]]
name = "six"
path = "a.pub"
valid_from = 2027-01-01
[[rules]]
match = "*"
keys = ["five"]
threshold = 2
"""
    with pytest.raises(PolicyError) as caught:
        TrustPolicy.load(policy(folder, source))
    assert [problem.where for problem in caught.value.problems] == [
        "mode", "keys[0].path", "keys[1].path", "keys[2].path", "keys[3].path", "keys[4].valid_until",
        "keys[5].valid_from", "rules[0].threshold", "extra",
    ]  # fmt: skip
    assert "private key" in caught.value.problems[2].what


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("", "keys"),
        ('[[keys]]\nname = "a"\npath = "a.pub"\n[[keys]]\nname = "a"\npath = "b.pub"\n', "keys"),
        ('[[keys]]\nname = "a"\npath = "a.pub"\n[[keys]]\nname = "b"\npath = "a.pub"\n', "keys"),
        ('[[keys]]\nname = "a"\npath = "a.pub"\n[[rules]]\nmatch = "*"\nkeys = ["b"]\n', "rules[0].keys"),
        ('[[keys]]\nname = "a"\npath = "a.pub"\n[[rules]]\nmatch = "*"\nkeys = []\n', "rules[0].keys"),
    ],
)
def test_what_a_policy_must_not_say(folder: Path, source: str, where: str) -> None:
    with pytest.raises(PolicyError) as caught:
        TrustPolicy.load(policy(folder, source))
    assert [problem.where for problem in caught.value.problems] == [where]


@pytest.mark.parametrize("source", ["mode = ", "a = 1\na = 2", "x = " + "[" * 20000, "\x00"])
def test_what_is_no_toml(folder: Path, source: str) -> None:
    with pytest.raises(PolicyError, match="not valid TOML"):
        TrustPolicy.load(policy(folder, source))


def test_paths_of_keys_are_relative_to_the_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = policy(folder, '[[keys]]\nname = "a"\npath = "../a.pub"\n', "deep/trust.toml")
    monkeypatch.chdir("/")
    assert TrustPolicy.load(path).keys[0].public == key("a").public


def test_trust_takes_keys_or_a_policy(folder: Path) -> None:
    both = TrustPolicy.from_paths([folder / "a.pub", folder / "b.pub", folder / "a.pub"])
    assert [k.public for k in both.keys] == [key("a").public, key("b").public]
    assert both.mode is Mode.ENFORCE
    path = policy(folder, 'mode = "off"')
    assert TrustPolicy.from_paths([str(path)]).mode is Mode.OFF
    with pytest.raises(PolicyError, match="not both"):
        TrustPolicy.from_paths([folder / "a.pub", path])
    with pytest.raises(KeyFileError, match="private key"):
        TrustPolicy.from_paths([folder / "a"])
    with pytest.raises(FileError):
        TrustPolicy.from_paths([folder / "none"])


def test_the_default_policy_is_looked_for_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrustPolicy.from_paths([]) == TrustPolicy(Mode.ENFORCE, origin="default trust policy")
    for source, setting in (("etc/trust.toml", None), ("config/npucc/trust.toml", None), ("own.toml", "own.toml")):
        path = policy(folder, 'mode = "off"', source)
        if setting:
            monkeypatch.setenv("NPUCC_TRUST_POLICY", str(path))
        assert TrustPolicy.default().origin == str(path)


def test_a_policy_that_the_environment_names_must_exist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPUCC_TRUST_POLICY", str(folder / "none.toml"))
    with pytest.raises(Error):
        TrustPolicy.default()


def test_without_xdg_the_home_folder_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", "/srv/x")
    assert trust.default_places() == (Path("/srv/x/.config/npucc/trust.toml"), trust.SYSTEM_POLICY)
    monkeypatch.delenv("HOME")
    assert trust.default_places() == (trust.SYSTEM_POLICY,)
