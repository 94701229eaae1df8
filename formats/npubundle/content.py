"""The content of a bundle, ready to be written: manifest, config, layers, and everything that refers to the manifest.

Two equal contents are written as the same bytes, wherever their blobs come from: memory, files, or another bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from npubundle.blob import Blob
from npubundle.digest import sha256_of
from npubundle.dsse import MEDIA_TYPE as ENVELOPE_MEDIA_TYPE
from npubundle.errors import FormatError
from npubundle.keys import Signer, sign_envelope
from npubundle.oci import (
    ATTESTATION_TYPE,
    BUNDLE_TYPE,
    CONFIG_MEDIA_TYPE,
    EMPTY_CONFIG,
    INDEX_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    MAX_REFERRERS,
    REF_NAME,
    REFERRER_TYPES,
    SIGNATURE_TYPE,
    Descriptor,
    Index,
    Manifest,
    Referrer,
)
from npubundle.statement import PAYLOAD_TYPE, SIGNATURE, BundleClaim, Statement
from npubundle.version import FORMAT_VERSION

MAX_CONFIG = 16 << 20
MAX_ENVELOPE = {SIGNATURE_TYPE: 64 << 10, ATTESTATION_TYPE: 6 << 20}


@dataclass(frozen=True, slots=True)
class NewLayer:
    """A layer to be added: its media type, its bytes or the file that holds them, and annotations."""

    media_type: str
    source: bytes | Path
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attached:
    """A signature or attestation: the manifest that refers to the bundle, and the envelope, as they are stored."""

    referrer: Referrer
    raw: bytes
    envelope: bytes

    @property
    def descriptor(self) -> Descriptor:
        """Describe the manifest, as the bundle's index lists it."""
        return Descriptor.of(MANIFEST_MEDIA_TYPE, self.raw, self.referrer.artifact_type)


@dataclass(frozen=True, slots=True)
class Content:
    """A bundle to write. `layers` holds each blob once, in the order of the manifest; `raw` is the encoded manifest."""

    manifest: Manifest
    raw: bytes
    config: Blob
    layers: tuple[Blob, ...]
    attached: tuple[Attached, ...] = ()

    @property
    def manifest_digest(self) -> str:
        """The digest that identifies the bundle, and that signatures cover."""
        return self.subject.digest

    @property
    def subject(self) -> Descriptor:
        """Describe the manifest, as signatures and attestations refer to it."""
        return Descriptor.of(MANIFEST_MEDIA_TYPE, self.raw)

    def with_signature(self, signer: Signer) -> Content:
        """Add a signature; what was signed before stays."""
        claim = BundleClaim(FORMAT_VERSION, BUNDLE_TYPE)
        return self._with(signer, SIGNATURE_TYPE, SIGNATURE, claim.to_dict())

    def with_attestation(self, signer: Signer, predicate_type: str, predicate: Mapping[str, Any]) -> Content:
        """Add a signed statement about the bundle, such as measured numerics."""
        if predicate_type == SIGNATURE:
            raise FormatError(f"a statement of type {SIGNATURE} is a signature and no attestation")
        return self._with(signer, ATTESTATION_TYPE, predicate_type, predicate)

    def index(self) -> Index:
        """Return the index that a tag names: the manifest, then what refers to it."""
        subject = replace(self.subject, artifact_type=BUNDLE_TYPE)
        return Index((subject, *(attached.descriptor for attached in self.attached)))

    def index_json(self) -> bytes:
        """Return the index.json of the image layout: a single entry, the bundle's index."""
        entry = Descriptor.of(INDEX_MEDIA_TYPE, self.index().encode())
        return Index((replace(entry, annotations={REF_NAME: self.manifest.name}),)).encode()

    def blobs(self) -> tuple[Blob, ...]:
        """Return every blob once, in the order of an `.npub` file."""
        documents = [self.index().encode()]
        for attached in self.attached:
            documents += [attached.raw, EMPTY_CONFIG, attached.envelope]
        documents.append(self.raw)
        return _distinct([*map(Blob.of_bytes, documents), self.config, *self.layers])

    def _with(self, signer: Signer, artifact_type: str, predicate_type: str, predicate: Mapping[str, Any]) -> Content:
        statement = Statement(self.manifest_digest, self.manifest.name, predicate_type, predicate)
        envelope = sign_envelope(signer, PAYLOAD_TYPE, statement.encode())
        Statement.decode(envelope)  # what we write, we can read
        raw = envelope.encode()
        if len(raw) > MAX_ENVELOPE[artifact_type]:
            raise FormatError(f"a statement of type {predicate_type} is too large: {len(raw)} bytes when signed")
        layer = Descriptor.of(ENVELOPE_MEDIA_TYPE, raw)
        referrer = Referrer(artifact_type, predicate_type, self.subject, layer)
        return self.with_attached([Attached(referrer, referrer.encode(), raw)])

    def with_attached(self, more: Iterable[Attached]) -> Content:
        """Add signatures and attestations that exist already, such as those of a copy of this bundle."""
        together = {attached.descriptor.digest: attached for attached in (*self.attached, *more)}
        if len(together) > MAX_REFERRERS:
            raise FormatError(f"a bundle can have at most {MAX_REFERRERS} signatures and attestations")
        return replace(self, attached=tuple(sorted(together.values(), key=attached_order)))


def build_container(
    name: str,
    config: bytes,
    layers: Sequence[NewLayer],
    *,
    signer: Signer | None = None,
    attestations: Iterable[tuple[str, Mapping[str, Any]]] = (),
) -> Content:
    """Make a bundle of `bundle.json` and layers; sign it and its attestations (predicate type and predicate).

    Files are hashed now and read again when the bundle is written. Without a signer the bundle is unsigned, and can
    have no attestations. Raises `FormatError` for what the format does not allow.
    """
    if len(config) > MAX_CONFIG:
        raise FormatError(f"bundle.json has {len(config)} bytes; at most {MAX_CONFIG} are allowed")
    blobs = [_blob(layer.source) for layer in layers]
    descriptors = tuple(
        Descriptor(layer.media_type, blob.digest, blob.size, annotations=dict(layer.annotations))
        for layer, blob in zip(layers, blobs, strict=True)
    )
    manifest = Manifest(name, Descriptor.of(CONFIG_MEDIA_TYPE, config), descriptors)
    raw = manifest.encode()
    Manifest.decode(raw)  # what we write, we can read
    content = Content(manifest, raw, Blob.of_bytes(config), _distinct(blobs))
    if signer is not None:
        content = content.with_signature(signer)
    for predicate_type, predicate in attestations:
        if signer is None:
            raise FormatError("attestations must be signed: give a key")
        content = content.with_attestation(signer, predicate_type, predicate)
    return content


def attached_order(attached: Attached) -> tuple[int, str]:
    """Sort key: signatures before attestations, each by the digest of its manifest."""
    return REFERRER_TYPES.index(attached.referrer.artifact_type), sha256_of(attached.raw)


def _blob(source: bytes | Path) -> Blob:
    return Blob.of_bytes(source) if isinstance(source, bytes) else Blob.of_file(source)


def _distinct(blobs: Iterable[Blob]) -> tuple[Blob, ...]:
    """Each blob once, where it comes first."""
    return tuple({blob.digest: blob for blob in blobs}.values())
