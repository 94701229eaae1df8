from __future__ import annotations

import json
from pathlib import Path

import pytest

from npubundle import container, keys
from npucc.build import Compiled
from tests.npucc.cli.conftest import Run


def test_a_good_bundle_passes(run: Run, bundle: Path, trust: Path, signed: Compiled) -> None:
    passed = run("verify", bundle, "--trust", trust)
    assert (passed.code, passed.err) == (0, "")
    assert passed.out.startswith(f"{signed.content.manifest_digest}  {signed.config.name}")
    told = run("verify", bundle, "--trust", trust, "--json").json
    assert told["digest"] == signed.content.manifest_digest
    assert told["trusted"] is True


def test_a_folder_is_verified_like_a_file(run: Run, tmp_path: Path, trust: Path, signed: Compiled) -> None:
    container.write(tmp_path / "layout", signed.content)
    assert run("verify", "layout", "--trust", trust).code == 0
    blob = max((tmp_path / "layout" / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    raw = bytearray(blob.read_bytes())
    raw[len(raw) // 2] ^= 1
    blob.write_bytes(raw)
    assert run("verify", "layout", "--trust", trust).code == 5


@pytest.mark.parametrize("place", [0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0])
def test_one_flipped_bit_is_refused(run: Run, tmp_path: Path, bundle: Path, trust: Path, place: float) -> None:
    raw = bytearray(bundle.read_bytes())
    raw[min(int(len(raw) * place), len(raw) - 1)] ^= 0x10
    (tmp_path / "bad.npub").write_bytes(raw)
    refused = run("verify", "bad.npub", "--trust", trust)
    assert refused.code == 5
    assert refused.err.startswith("error[")
    assert refused.out == ""


def test_a_truncated_file_is_refused(run: Run, tmp_path: Path, bundle: Path, trust: Path) -> None:
    (tmp_path / "bad.npub").write_bytes(bundle.read_bytes()[:-512])
    assert run("verify", "bad.npub", "--trust", trust).code == 5


def test_an_unsigned_bundle_is_refused(run: Run, tmp_path: Path, trust: Path, options: list[str]) -> None:
    assert run("build", *options, "-o", "unsigned.npub").code == 0
    refused = run("verify", "unsigned.npub", "--trust", trust)
    assert refused.code == 5
    assert refused.err.startswith("error[signature]:")


def test_a_signature_by_somebody_else_is_refused(run: Run, tmp_path: Path, bundle: Path) -> None:
    keys.save(keys.generate(), tmp_path / "other")
    refused = run("verify", bundle, "--trust", "other.pub", "--json")
    assert refused.code == 5
    told = json.loads(refused.err)
    assert (told["code"], told["exit_code"]) == ("signature", 5)
    assert told["problems"] or told["what"]


def test_without_a_policy_nobody_is_trusted(run: Run, bundle: Path) -> None:
    refused = run("verify", bundle)
    assert refused.code == 5
    assert "trust" in refused.err


def test_the_default_policy_can_be_a_file(
    run: Run, bundle: Path, trust: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy.toml").write_text(f'[[keys]]\nname = "dev"\npath = "{trust}"\n')
    monkeypatch.setenv("NPUCC_TRUST_POLICY", str(tmp_path / "policy.toml"))
    passed = run("verify", bundle)
    assert passed.code == 0
    assert "dev" in passed.out


def test_a_file_that_is_not_there_is_named(run: Run, trust: Path) -> None:
    refused = run("verify", "nowhere.npub", "--trust", trust)
    assert refused.code == 1
    assert "nowhere.npub" in refused.err
