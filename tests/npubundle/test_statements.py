"""Envelopes and the statements in them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npubundle import canonical, dsse
from npubundle.digest import sha256_of
from npubundle.dsse import Envelope, Signature, pae
from npubundle.errors import FormatError
from npubundle.keys import sign_envelope
from npubundle.oci import BUNDLE_TYPE
from npubundle.statement import PAYLOAD_TYPE, SIGNATURE, BundleClaim, Statement
from tests.npubundle.samples import key

SUBJECT = sha256_of(b"manifest")
STATEMENT = Statement(SUBJECT, "llama", "https://example.com/predicate/v1", {"a": [1, 2.5, "x", None, True]})


def decode(raw: bytes) -> Envelope:
    return Envelope.decode(raw, max_bytes=10_000)


ENVELOPES = st.builds(
    Envelope,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=100),
    st.binary(min_size=1, max_size=500),
    st.lists(
        st.builds(Signature, st.binary().map(sha256_of), st.binary(min_size=1, max_size=80)), min_size=1, max_size=4
    ).map(tuple),
)


@given(ENVELOPES)
def test_an_envelope_is_read_back(envelope: Envelope) -> None:
    raw = envelope.encode()
    assert decode(raw) == envelope
    assert decode(raw).encode() == raw


@given(ENVELOPES, st.data())
def test_a_changed_envelope_is_refused_or_is_another_one(envelope: Envelope, data: st.DataObject) -> None:
    raw = bytearray(envelope.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(FormatError):
        assert decode(bytes(raw)) != envelope


def test_pre_authentication_encoding_of_the_specification() -> None:
    assert pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def document(**changes: Any) -> bytes:
    members: dict[str, Any] = {
        "payload": "AAAA",
        "payloadType": "text/plain",
        "signatures": [{"keyid": SUBJECT, "sig": "AAAA"}],
    }
    return canonical.encode({name: value for name, value in {**members, **changes}.items() if value is not ...})


@pytest.mark.parametrize(
    "raw",
    [
        document(payload=...),
        document(payloadType=...),
        document(signatures=...),
        document(signatures=[]),
        document(signatures=[{"keyid": SUBJECT, "sig": "AAAA"}] * 17),
        document(signatures=[{"sig": "AAAA"}]),
        document(signatures=[{"keyid": "", "sig": "AAAA"}]),
        document(signatures=[{"keyid": SUBJECT, "sig": ""}]),
        document(signatures=[{"keyid": SUBJECT, "sig": "A" * 4000}]),
        document(signatures=[{"keyid": SUBJECT, "sig": "AAAA", "cert": ""}]),
        document(payload="AAA"),
        document(payload="AAB="),  # the unused bits are not zero
        document(payload="AA AA"),
        document(payload="AA-_"),
        document(payload="ÄÄÄÄ"),
        document(payload=1),
        document(extra=1),
        document() + b"\n",
        b"[]",
        b"{}",
        b"null",
    ],
)
def test_what_is_no_envelope(raw: bytes) -> None:
    with pytest.raises(FormatError):
        decode(raw)


def test_the_sample_document_is_one() -> None:
    assert decode(document()).payload == b"\0\0\0"


def test_the_size_of_an_envelope_is_bounded() -> None:
    with pytest.raises(FormatError, match="at most 20 are allowed"):
        Envelope.decode(document(), max_bytes=20)


def test_a_statement_is_read_back_from_its_envelope() -> None:
    envelope = sign_envelope(key("a"), PAYLOAD_TYPE, STATEMENT.encode())
    assert Statement.decode(envelope) == STATEMENT
    assert key("a").public.verify(envelope.signatures[0].sig, envelope.signed_bytes())


def test_a_signature_covers_the_payload_type() -> None:
    envelope = sign_envelope(key("a"), PAYLOAD_TYPE, STATEMENT.encode())
    other = replace(envelope, payload_type="application/json")
    assert not key("a").public.verify(other.signatures[0].sig, other.signed_bytes())
    with pytest.raises(FormatError, match="application/json"):
        Statement.decode(other)


def statement(**changes: Any) -> Envelope:
    members: dict[str, Any] = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "llama", "digest": {"sha256": "0" * 64}}],
        "predicateType": SIGNATURE,
        "predicate": {},
    }
    return Envelope(PAYLOAD_TYPE, canonical.encode({**members, **changes}), ())


@pytest.mark.parametrize(
    "envelope",
    [
        statement(_type="https://in-toto.io/Statement/v0.1"),
        statement(subject=[]),
        statement(subject=[{"name": "llama", "digest": {"sha256": "0" * 64}}] * 2),
        statement(subject=[{"name": "llama", "digest": {"sha512": "0" * 128}}]),
        statement(subject=[{"name": "llama", "digest": {"sha256": "0" * 63 + "G"}}]),
        statement(subject=[{"digest": {"sha256": "0" * 64}}]),
        statement(predicate=None),
        statement(predicateType=""),
        statement(more=1),
        Envelope(PAYLOAD_TYPE, b"{ }", ()),
        Envelope(PAYLOAD_TYPE, b"\xff", ()),
    ],
)
def test_what_is_no_statement(envelope: Envelope) -> None:
    Statement.decode(statement())
    with pytest.raises(FormatError):
        Statement.decode(envelope)


def test_the_claim_of_a_bundle_signature() -> None:
    claim = BundleClaim(1, BUNDLE_TYPE)
    assert BundleClaim.from_statement(replace(STATEMENT, predicate=claim.to_dict())) == claim
    for predicate in ({}, {"formatVersion": 0, "artifactType": "a/b"}, {**claim.to_dict(), "x": 1}):
        with pytest.raises(FormatError):
            BundleClaim.from_statement(replace(STATEMENT, predicate=predicate))


def test_media_type() -> None:
    assert dsse.MEDIA_TYPE == "application/vnd.dsse.envelope.v1+json"
