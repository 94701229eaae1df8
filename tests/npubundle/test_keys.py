from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa

from npubundle import keys
from npubundle.errors import Error, FileError
from npubundle.keys import KINDS, KeyFileError, KeyKind, PrivateKey, PublicKey


def pem_of(key: object) -> bytes:
    private = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_a_saved_key_is_read_back(tmp_path: Path, kind: KeyKind, passphrase: bytes | None) -> None:
    key = keys.generate(kind)
    private, public = keys.save(key, tmp_path / "dev", passphrase)
    assert (private, public) == (tmp_path / "dev", tmp_path / "dev.pub")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert PrivateKey.load(private, lambda: passphrase) == key
    assert PublicKey.load(public) == key.public
    assert PublicKey.load(public).kind == kind


@pytest.mark.parametrize("kind", KINDS)
def test_signatures_hold_for_their_data_and_key_only(kind: KeyKind) -> None:
    key = keys.generate(kind)
    sig = key.sign(b"data")
    assert key.public.verify(sig, b"data")
    assert not key.public.verify(sig, b"Data")
    assert not key.public.verify(sig[:-1], b"data")
    assert not key.public.verify(b"", b"data")
    assert not keys.generate(kind).public.verify(sig, b"data")


def test_ed25519_signatures_are_deterministic() -> None:
    key = keys.generate()
    assert key.public.kind == "ed25519"
    assert key.sign(b"data") == key.sign(b"data")


def test_openssl_agrees_on_the_key_id(tmp_path: Path) -> None:
    key = keys.generate("ecdsa-p256")
    _, public = keys.save(key, tmp_path / "dev")
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", public, "-outform", "DER"], check=True, capture_output=True
    )
    digest = subprocess.run(["sha256sum"], input=der.stdout, check=True, capture_output=True).stdout.split()[0]
    assert key.key_id == "sha256:" + digest.decode()


@pytest.mark.parametrize("existing", ["dev", "dev.pub"])
def test_nothing_is_overwritten_and_no_half_pair_is_left(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(FileError, match="exists"):
        keys.save(keys.generate(), tmp_path / "dev")
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "precious"


def test_a_key_cannot_be_saved_in_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        keys.save(keys.generate(), tmp_path / "none" / "dev")


def test_the_passphrase_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, _ = keys.save(keys.generate(), tmp_path / "dev", b"secret")
    monkeypatch.setenv("NPUCC_KEY_PASSPHRASE", "secret")
    PrivateKey.load(private)
    monkeypatch.setenv("NPUCC_KEY_PASSPHRASE", "wrong")
    with pytest.raises(KeyFileError, match="wrong passphrase"):
        PrivateKey.load(private)
    monkeypatch.setenv("NPUCC_KEY_PASSPHRASE", "")
    with pytest.raises(KeyFileError, match="encrypted") as caught:
        PrivateKey.load(private)
    assert "NPUCC_KEY_PASSPHRASE" in str(caught.value.remedy)


def test_an_unencrypted_key_asks_for_no_passphrase(tmp_path: Path) -> None:
    private, _ = keys.save(keys.generate(), tmp_path / "dev")
    PrivateKey.load(private, lambda: pytest.fail("asked for a passphrase"))


def test_an_overlong_passphrase_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="longer than"):
        keys.save(keys.generate(), tmp_path / "dev", b"x" * 2000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pem_of(rsa.generate_private_key(65537, 2048)), "an RSA key"),
        (lambda: pem_of(ec.generate_private_key(ec.SECP384R1())), "secp384r1"),
        (lambda: pem_of(ed448.Ed448PrivateKey.generate()), "unsupported type"),
        (lambda: keys.generate().public.pem, "a public key where a private key belongs"),
        (lambda: b"hello", "not a private key"),
        (lambda: b"", "not a private key"),
        (lambda: keys.generate().pem()[:60] + b"\n-----END PRIVATE KEY-----\n", "cannot be read"),
        (lambda: b"x" * 70000, "at most 65536"),
    ],
)
def test_what_is_no_private_key(tmp_path: Path, make: Callable[[], bytes], words: str) -> None:
    (tmp_path / "key").write_bytes(make())
    with pytest.raises(KeyFileError, match=words) as caught:
        PrivateKey.load(tmp_path / "key")
    assert caught.value.where == str(tmp_path / "key")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: keys.generate().pem(), "a private key where a public key belongs"),
        (lambda: b"ssh-ed25519 AAAA", "not a public key in PEM form"),
        (lambda: b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "cannot be read"),
    ],
)
def test_what_is_no_public_key(tmp_path: Path, make: Callable[[], bytes], words: str) -> None:
    (tmp_path / "key.pub").write_bytes(make())
    with pytest.raises(KeyFileError, match=words):
        PublicKey.load(tmp_path / "key.pub")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        PublicKey.load(tmp_path / "none.pub")
    assert caught.value.where == str(tmp_path / "none.pub")


def test_exposure_of_a_private_key(tmp_path: Path) -> None:
    private, _ = keys.save(keys.generate(), tmp_path / "dev")
    assert keys.exposure(private) is None
    private.chmod(0o640)
    assert "0640" in str(keys.exposure(private))


def test_secrets_stay_out_of_messages() -> None:
    key = keys.generate()
    assert "BEGIN PRIVATE" not in repr(key)
    assert "_key" not in repr(key)


def test_a_fifo_instead_of_a_key_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key")
    with pytest.raises(Error):
        PrivateKey.load(tmp_path / "key")
