"""The OCI documents that a bundle consists of: descriptors, image manifests, referrers and indexes.

Specification: https://github.com/opencontainers/image-spec, version 1.1. Each type is written in one way only, as
canonical JSON; `decode` accepts nothing else. The exception is `Index.decode_foreign`, for an index that another tool
has rewritten while it copied the blobs unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from npubundle import canonical, strictjson
from npubundle.digest import digest_field, sha256_of
from npubundle.dsse import MEDIA_TYPE as ENVELOPE_MEDIA_TYPE
from npubundle.fields import Fields, Kind, dict_of, integer, list_of, literal, read, record, text

T = TypeVar("T")

SCHEMA_VERSION = 2

INDEX_MEDIA_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_MEDIA_TYPE = "application/vnd.oci.image.manifest.v1+json"
EMPTY_MEDIA_TYPE = "application/vnd.oci.empty.v1+json"

BUNDLE_TYPE = "application/vnd.npucc.bundle.v1"
CONFIG_MEDIA_TYPE = "application/vnd.npucc.bundle.config.v1+json"
SIGNATURE_TYPE = "application/vnd.npucc.signature.v1"
ATTESTATION_TYPE = "application/vnd.npucc.attestation.v1"
REFERRER_TYPES = (SIGNATURE_TYPE, ATTESTATION_TYPE)

REF_NAME = "org.opencontainers.image.ref.name"
PREDICATE_TYPE = "in-toto.io/predicate-type"
TITLE = "org.opencontainers.image.title"

EMPTY_CONFIG = b"{}"
LAYOUT_VERSION = "1.0.0"
LAYOUT_FILE = b'{"imageLayoutVersion":"1.0.0"}'

MAX_INDEX = 256 << 10
MAX_MANIFEST = 4 << 20
MAX_REFERRER = 64 << 10
MAX_REFERRERS = 256
MAX_NAME = 128

NAME_FORM = r"[A-Za-z0-9]+(?:(?:[./]|_{1,2}|-+)[A-Za-z0-9]+)*"
_MEDIA_TYPE_FORM = r"[A-Za-z0-9][\w!#$&^.+-]{0,126}/[A-Za-z0-9][\w!#$&^.+-]{0,126}"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A reference to a blob: what it is, its digest and its size in bytes."""

    media_type: str
    digest: str
    size: int
    artifact_type: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, media_type: str, data: bytes, artifact_type: str | None = None) -> Descriptor:
        """Describe a blob that is at hand."""
        return cls(media_type, sha256_of(data), len(data), artifact_type)

    def to_dict(self) -> dict[str, Any]:
        """Return the descriptor as JSON values; what is empty is left out."""
        document: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.artifact_type is not None:
            document["artifactType"] = self.artifact_type
        if self.annotations:
            document["annotations"] = dict(self.annotations)
        return document


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a bundle: its name, its config (`bundle.json`) and its layers. Its digest is what is signed."""

    name: str
    config: Descriptor
    layers: tuple[Descriptor, ...]

    def encode(self) -> bytes:
        """Return the manifest as canonical JSON."""
        return canonical.encode(
            {
                "schemaVersion": SCHEMA_VERSION,
                "mediaType": MANIFEST_MEDIA_TYPE,
                "artifactType": BUNDLE_TYPE,
                "config": self.config.to_dict(),
                "layers": [layer.to_dict() for layer in self.layers],
                "annotations": {TITLE: self.name},
            }
        )

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Read a bundle's manifest; raise `FormatError` for anything but the canonical form."""
        return _decode(raw, record(cls._build), "bundle manifest", MAX_MANIFEST)

    @classmethod
    def _build(cls, fields: Fields) -> Manifest:
        fields.need("schemaVersion", literal(SCHEMA_VERSION))
        fields.need("mediaType", literal(MANIFEST_MEDIA_TYPE))
        fields.need("artifactType", literal(BUNDLE_TYPE))
        return cls(
            name=fields.need("annotations", record(lambda inner: inner.need(TITLE, name_field()))),
            config=fields.need("config", _descriptor(CONFIG_MEDIA_TYPE)),
            layers=fields.need("layers", list_of(_descriptor(), minimum=1)),
        )


@dataclass(frozen=True, slots=True)
class Referrer:
    """The manifest of a signature or an attestation: it refers to a bundle's manifest and holds one envelope.

    `predicate_type` repeats what the envelope's statement is about, so that it can be picked without being fetched.
    """

    artifact_type: str
    predicate_type: str
    subject: Descriptor
    envelope: Descriptor

    def encode(self) -> bytes:
        """Return the manifest as canonical JSON."""
        return canonical.encode(
            {
                "schemaVersion": SCHEMA_VERSION,
                "mediaType": MANIFEST_MEDIA_TYPE,
                "artifactType": self.artifact_type,
                "config": empty_config().to_dict(),
                "layers": [self.envelope.to_dict()],
                "subject": self.subject.to_dict(),
                "annotations": {PREDICATE_TYPE: self.predicate_type},
            }
        )

    @classmethod
    def decode(cls, raw: bytes) -> Referrer:
        """Read a signature or attestation manifest; raise `FormatError` for anything but the canonical form."""
        return _decode(raw, record(cls._build), "signature manifest", MAX_REFERRER)

    @classmethod
    def _build(cls, fields: Fields) -> Referrer:
        fields.need("schemaVersion", literal(SCHEMA_VERSION))
        fields.need("mediaType", literal(MANIFEST_MEDIA_TYPE))
        if fields.need("config", _descriptor(EMPTY_MEDIA_TYPE)) != empty_config():
            fields.wrong("config", "must be the empty config of OCI")
        envelope = _descriptor(ENVELOPE_MEDIA_TYPE)
        layers = fields.need("layers", list_of(envelope, minimum=1, maximum=1))
        return cls(
            artifact_type=fields.need("artifactType", literal(*REFERRER_TYPES)),
            predicate_type=fields.need("annotations", record(lambda inner: inner.need(PREDICATE_TYPE, _uri()))),
            subject=fields.need("subject", _descriptor(MANIFEST_MEDIA_TYPE)),
            envelope=layers[0] if layers else envelope.blank(),
        )


@dataclass(frozen=True, slots=True)
class Index:
    """A list of manifests. A bundle's index lists its manifest, then its signatures, then its attestations."""

    manifests: tuple[Descriptor, ...]

    def encode(self) -> bytes:
        """Return the index as canonical JSON."""
        manifests = [manifest.to_dict() for manifest in self.manifests]
        return canonical.encode(
            {"schemaVersion": SCHEMA_VERSION, "mediaType": INDEX_MEDIA_TYPE, "manifests": manifests}
        )

    @classmethod
    def decode(cls, raw: bytes, what: str = "index") -> Index:
        """Read an index that npubundle wrote; raise `FormatError` for anything but the canonical form."""
        return _decode(raw, record(cls._build), what, MAX_INDEX)

    @classmethod
    def decode_foreign(cls, raw: bytes, what: str = "index") -> Index:
        """Read an index that another tool may have written: not canonical, with members that we do not know."""
        document = strictjson.parse(raw, what=what, max_bytes=MAX_INDEX)
        return read(document, record(cls._build_foreign), what=what)

    @classmethod
    def _build(cls, fields: Fields) -> Index:
        fields.need("schemaVersion", literal(SCHEMA_VERSION))
        fields.need("mediaType", literal(INDEX_MEDIA_TYPE))
        return cls(fields.need("manifests", list_of(_descriptor(), maximum=MAX_REFERRERS + 1)))

    @classmethod
    def _build_foreign(cls, fields: Fields) -> Index:
        fields.allow_unknown()
        fields.need("schemaVersion", literal(SCHEMA_VERSION))
        return cls(fields.need("manifests", list_of(record(_foreign_descriptor), maximum=MAX_REFERRERS + 1)))


def empty_config() -> Descriptor:
    """Describe the config that OCI prescribes for artifacts that need none: an empty object."""
    return Descriptor.of(EMPTY_MEDIA_TYPE, EMPTY_CONFIG)


def name_field() -> Kind[str]:
    """How a document's reader reads the name of a bundle: letters and digits, single separators between them."""
    return text(
        NAME_FORM, called="a name (letters and digits, with single . / _ or - between them)", max_length=MAX_NAME
    )


def media_type_field() -> Kind[str]:
    """How a document's reader reads a media type."""
    return text(_MEDIA_TYPE_FORM, called="a media type")


def _uri() -> Kind[str]:
    return text(max_length=256)


def _descriptor(media_type: str | None = None) -> Kind[Descriptor]:
    """A descriptor, of one media type or of any."""
    kind = literal(media_type) if media_type else media_type_field()

    def build(fields: Fields) -> Descriptor:
        return Descriptor(
            media_type=fields.need("mediaType", kind),
            digest=fields.need("digest", digest_field()),
            size=fields.need("size", integer(0, canonical.MAX_INTEGER)),
            artifact_type=fields.take("artifactType", media_type_field(), None),
            annotations=_annotations(fields),
        )

    return record(build)


def _annotations(fields: Fields) -> dict[str, str]:
    """The annotations of a descriptor. None at all has one encoding: the absence of the member."""
    annotations = fields.take("annotations", dict_of(text(empty=True)), None)
    if annotations is not None and not annotations:
        fields.wrong("annotations", "must be left out when there are none")
    return annotations or {}


def _foreign_descriptor(fields: Fields) -> Descriptor:
    fields.allow_unknown()
    return Descriptor(
        media_type=fields.need("mediaType", media_type_field()),
        digest=fields.need("digest", digest_field()),
        size=fields.need("size", integer(0, canonical.MAX_INTEGER)),
        artifact_type=fields.take("artifactType", media_type_field(), None),
    )


def _decode(raw: bytes, kind: Kind[T], what: str, max_bytes: int) -> T:
    """Read a canonical document."""
    return read(strictjson.parse_canonical(raw, what=what, max_bytes=max_bytes, max_depth=8), kind, what=what)
