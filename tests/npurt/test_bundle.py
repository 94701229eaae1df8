"""Opening bundles: verified before anything is read, and read again with a check."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from npubundle.errors import FormatError, IntegrityError, SignatureError
from npubundle.trust import TrustPolicy
from npurt.bundle import Bundle
from tests.npurt import toy_bundle as toy


def test_a_trusted_bundle_gives_programs_and_payloads(tmp_path: Path) -> None:
    path, key = toy.write_bundle(tmp_path)
    with Bundle.open(path, trust=key) as bundle:
        assert bundle.manifest_digest.startswith("sha256:")
        assert bundle.config.name == "toy"
        assert bundle.program() == toy.program()
        assert bundle.program("reference") is bundle.program("reference")
        assert bundle.payload("forward") == toy.payload(toy.GRAPHS["forward"])


def test_trust_is_a_key_a_policy_or_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, key = toy.write_bundle(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    _, stranger = toy.write_bundle(other)
    Bundle.open(path, trust=TrustPolicy.from_key_files([key])).close()
    Bundle.open(path, trust=TrustPolicy.off()).close()
    with pytest.raises(SignatureError):
        Bundle.open(path, trust=stranger)
    monkeypatch.setenv("NPUCC_TRUST_POLICY", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    with pytest.raises(SignatureError):
        Bundle.open(path)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path, key = toy.write_bundle(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(IntegrityError):
        Bundle.open(path, key)


def test_a_program_that_does_not_fit_its_parts_is_refused(tmp_path: Path) -> None:
    made, _ = toy.parts()
    swapped = dataclasses.replace(made["forward"], inputs=made["forward"].inputs[::-1])
    path, key = toy.write_bundle(tmp_path, changed={"forward": swapped})
    with Bundle.open(path, key) as bundle, pytest.raises(FormatError, match="program is not valid"):
        bundle.program()


def test_a_part_without_its_blob_is_refused(tmp_path: Path) -> None:
    made, _ = toy.parts()
    lost = dataclasses.replace(made["forward"], digest="sha256:" + "0" * 64)
    path, key = toy.write_bundle(tmp_path, changed={"forward": lost})
    with Bundle.open(path, key) as bundle, pytest.raises(FormatError, match="does not contain the blob"):
        bundle.payload("forward")
