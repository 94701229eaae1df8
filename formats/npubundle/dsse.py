"""DSSE envelopes: a payload, its type, and signatures over both.

Protocol: https://github.com/secure-systems-lab/dsse. What is signed is the pre-authentication encoding (`pae`) of
payload type and payload, so that no payload can be passed off as one of another type. This reader sees bytes that are
not trusted yet; it accepts the canonical JSON form only, and leaves the payload unparsed.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from npubundle import canonical, strictjson
from npubundle.digest import digest_field
from npubundle.fields import Fields, Kind, Place, list_of, read, record, text

MEDIA_TYPE = "application/vnd.dsse.envelope.v1+json"

MAX_SIGNATURES = 16
MAX_SIGNATURE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature, and the id of the key that is said to have made it (a hint: only `verify` proves it)."""

    key_id: str
    sig: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """A signed payload. Nothing in it may be believed before a signature has been verified over `signed_bytes()`."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...]

    def signed_bytes(self) -> bytes:
        """Return the bytes that each signature covers."""
        return pae(self.payload_type, self.payload)

    def encode(self) -> bytes:
        """Return the envelope as canonical JSON."""
        signatures = [{"keyid": s.key_id, "sig": base64.b64encode(s.sig).decode()} for s in self.signatures]
        payload = base64.b64encode(self.payload).decode()
        return canonical.encode({"payload": payload, "payloadType": self.payload_type, "signatures": signatures})

    @classmethod
    def decode(cls, raw: bytes, *, max_bytes: int, what: str = "signature envelope") -> Envelope:
        """Read an envelope; raise `FormatError` for anything but the canonical form."""
        document = strictjson.parse_canonical(raw, what=what, max_bytes=max_bytes, max_depth=4, max_values=100)
        return read(document, record(lambda fields: _envelope(fields, max_bytes)), what=what)


def pae(payload_type: str, payload: bytes) -> bytes:
    """Pre-authentication encoding, version 1: unambiguous, because both parts carry their lengths."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _envelope(fields: Fields, max_bytes: int) -> Envelope:
    return Envelope(
        payload_type=fields.need("payloadType", text(max_length=128)),
        payload=fields.need("payload", _base64(max_bytes)),
        signatures=fields.need("signatures", list_of(record(_signature), minimum=1, maximum=MAX_SIGNATURES)),
    )


def _signature(fields: Fields) -> Signature:
    return Signature(
        key_id=fields.need("keyid", digest_field()),
        sig=fields.need("sig", _base64(MAX_SIGNATURE_BYTES)),
    )


def _base64(max_length: int) -> Kind[bytes]:
    """Standard base64 with padding, in its only encoding: the unused bits of the last digit are zero."""
    inner = text(max_length=max_length)

    def read_base64(place: Place) -> bytes:
        encoded = inner.read(place)
        try:
            data = base64.b64decode(encoded.encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            place.wrong("is not base64")
            return b""
        if base64.b64encode(data).decode() != encoded:
            place.wrong("is not canonical base64")
        return data

    return Kind(read_base64, bytes)
