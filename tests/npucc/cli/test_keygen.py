from __future__ import annotations

import stat
from pathlib import Path

import pytest

from npubundle import keys
from tests.npucc.cli.conftest import Run


def test_a_key_pair_is_written(run: Run, tmp_path: Path) -> None:
    made = run("keygen", "--out", "dev")
    assert (made.code, made.out, made.err) == (0, "dev\ndev.pub\n", "")
    assert stat.S_IMODE((tmp_path / "dev").stat().st_mode) == 0o600
    assert keys.PrivateKey.load(tmp_path / "dev").public == keys.PublicKey.load(tmp_path / "dev.pub")


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa-p256"])
def test_the_kind_can_be_chosen(run: Run, tmp_path: Path, kind: str) -> None:
    assert run("keygen", "--out", "dev", "--kind", kind).code == 0
    assert keys.PublicKey.load(tmp_path / "dev.pub").kind == kind


@pytest.mark.parametrize("existing", ["dev", "dev.pub"])
def test_nothing_is_overwritten(run: Run, tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("mine")
    refused = run("keygen", "--out", "dev")
    assert refused.code == 1
    assert refused.err.startswith("error[file]: the key file exists; nothing was written")
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "mine"


def test_a_key_can_be_encrypted(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = run("keygen", "--out", "dev", "--encrypt")
    assert without.code == 2
    assert "set NPUCC_KEY_PASSPHRASE" in without.err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("NPUCC_KEY_PASSPHRASE", "a secret")
    assert run("keygen", "--out", "dev", "--encrypt").code == 0
    assert b"ENCRYPTED" in (tmp_path / "dev").read_bytes()
    assert keys.PrivateKey.load(tmp_path / "dev").public == keys.PublicKey.load(tmp_path / "dev.pub")
    monkeypatch.setenv("NPUCC_KEY_PASSPHRASE", "another")
    with pytest.raises(keys.KeyFileError):
        keys.PrivateKey.load(tmp_path / "dev")


def test_a_folder_that_is_not_there_is_not_made(run: Run, tmp_path: Path) -> None:
    assert run("keygen", "--out", "keys/dev").code == 1
    assert list(tmp_path.iterdir()) == []
