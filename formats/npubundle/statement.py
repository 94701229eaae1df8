"""in-toto statements: what a signature says about a bundle.

A statement (https://in-toto.io/Statement/v1) binds a predicate to one subject, here always the digest of a bundle's
manifest. The bundle signature itself is a statement, and so are measured numerics and provenance; the predicate type
tells them apart, so that one can never stand in for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npubundle import canonical, strictjson
from npubundle.digest import hex_of
from npubundle.dsse import Envelope
from npubundle.errors import FormatError
from npubundle.fields import Fields, anything, dict_of, integer, list_of, literal, read, record, text

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"

SIGNATURE = "https://npucc.dev/signature/v1"
NUMERICS = "https://npucc.dev/numerics/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"

MAX_BYTES = 4 << 20
MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Statement:
    """A predicate about the bundle whose manifest has the digest `subject` and whose name is `name`."""

    subject: str
    name: str
    predicate_type: str
    predicate: Mapping[str, Any]

    def encode(self) -> bytes:
        """Return the statement as canonical JSON: the payload of an envelope."""
        return canonical.encode(
            {
                "_type": STATEMENT_TYPE,
                "predicate": dict(self.predicate),
                "predicateType": self.predicate_type,
                "subject": [{"digest": {"sha256": hex_of(self.subject)}, "name": self.name}],
            }
        )

    @classmethod
    def decode(cls, envelope: Envelope) -> Statement:
        """Read the payload of an envelope that has been verified; raise `FormatError` if it is no statement."""
        if envelope.payload_type != PAYLOAD_TYPE:
            raise FormatError(f"the signed payload has type {envelope.payload_type[:128]!r}, not {PAYLOAD_TYPE!r}")
        what = "signed statement"
        document = strictjson.parse_canonical(envelope.payload, what=what, max_bytes=MAX_BYTES, max_depth=MAX_DEPTH)
        return read(document, record(_statement), what=what)


@dataclass(frozen=True, slots=True)
class BundleClaim:
    """The predicate of a bundle signature: what kind of document the subject is, and in which version of the format.

    It repeats facts that the subject itself holds, so that they can be checked before the subject is parsed.
    """

    format_version: int
    artifact_type: str

    def to_dict(self) -> dict[str, Any]:
        """Return the predicate as JSON values."""
        return {"artifactType": self.artifact_type, "formatVersion": self.format_version}

    @classmethod
    def from_statement(cls, statement: Statement) -> BundleClaim:
        """Read the predicate of a statement of type `SIGNATURE`; raise `FormatError` if it is not one."""

        def build(fields: Fields) -> BundleClaim:
            return cls(
                format_version=fields.need("formatVersion", integer(minimum=1)),
                artifact_type=fields.need("artifactType", text(max_length=256)),
            )

        return read(dict(statement.predicate), record(build), what="bundle signature")


def _statement(fields: Fields) -> Statement:
    fields.need("_type", literal(STATEMENT_TYPE))
    subjects = fields.need("subject", list_of(record(_subject), minimum=1, maximum=1))
    digest, name = subjects[0] if subjects else ("", "")
    return Statement(
        subject=digest,
        name=name,
        predicate_type=fields.need("predicateType", text(max_length=256)),
        predicate=fields.need("predicate", dict_of(anything())),
    )


def _subject(fields: Fields) -> tuple[str, str]:
    digests = fields.need("digest", record(lambda inner: inner.need("sha256", text("[0-9a-f]{64}"))))
    return f"sha256:{digests}", fields.need("name", text(max_length=256))
