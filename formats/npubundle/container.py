"""Opening and writing bundles.

`open_container` is the one way in. It trusts nothing that it has not checked, in this order: sizes; tar headers,
index.json, index and signature manifests, all by strict readers; signatures over raw bytes; the digest that they sign
against the manifest's; then the manifest, `bundle.json` and the digest of every blob.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from npubundle.archive import Archive, write_archive
from npubundle.blob import Blob
from npubundle.content import MAX_CONFIG, MAX_ENVELOPE, Attached, Content, attached_order
from npubundle.dsse import Envelope
from npubundle.errors import Error, FileError, FormatError, IntegrityError
from npubundle.layout import Layout, write_layout
from npubundle.oci import (
    ATTESTATION_TYPE,
    BUNDLE_TYPE,
    EMPTY_CONFIG,
    INDEX_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    MAX_INDEX,
    MAX_MANIFEST,
    MAX_REFERRER,
    MAX_REFERRERS,
    REFERRER_TYPES,
    SIGNATURE_TYPE,
    Descriptor,
    Index,
    Manifest,
    Referrer,
    empty_config,
)
from npubundle.trust import TrustPolicy
from npubundle.verdict import Attestation, Finding, Verdict, attest, evaluate

SUFFIX = ".npub"


class Store(Protocol):
    """Where a bundle lies: an `.npub` file or an image layout folder."""

    canonical: bool
    path: Path

    def index_json(self) -> bytes:
        """Return index.json."""

    def blob(self, descriptor: Descriptor) -> Blob:
        """Return the blob that a descriptor refers to; raise `FormatError` if it is missing or has another size."""

    def check_order(self, digests: Sequence[str]) -> None:
        """Check that there is nothing but these blobs, in this order, if the form of the store prescribes one."""

    def close(self) -> None:
        """Release the store."""


@dataclass(frozen=True, slots=True)
class Container:
    """A bundle that has been opened under a trust policy. Close it, or use it as a context manager.

    `content` can be written elsewhere, or with more signatures, as long as the container is open. `verdict` says who
    signed; `attestations` are the statements about it (in mode `enforce` only signed ones), and `rejected` says which
    were left out or are mere claims, and why. `blobs` holds config and layers by digest.
    """

    content: Content
    manifest_digest: str
    verdict: Verdict
    config_bytes: bytes
    blobs: Mapping[str, Blob]
    attestations: tuple[Attestation, ...]
    rejected: tuple[Finding, ...]
    _store: Store

    @property
    def name(self) -> str:
        """The name of the bundle."""
        return self.content.manifest.name

    @property
    def layers(self) -> tuple[Descriptor, ...]:
        """The layers in the order of the manifest, with their media types and annotations."""
        return self.content.manifest.layers

    def close(self) -> None:
        """Release the file; blobs cannot be read any more."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_container(
    path: str | os.PathLike[str],
    policy: TrustPolicy,
    *,
    digest: str | None = None,
    place: str | None = None,
    now: datetime | None = None,
    check_blobs: bool = True,
) -> Container:
    """Open an `.npub` file or an image layout folder under a trust policy.

    `digest` pins the manifest, and picks one where a layout holds several. `place` is the registry path that the bundle
    came from, by which the policy's rule is then chosen. With `check_blobs=False` layers are hashed only when they are
    read. Raises `SignatureError` if the policy is not satisfied, `IntegrityError` (`FormatError`) if bytes are not what
    they should be, `FileError` if they cannot be read.
    """
    where = Path(path)
    try:
        store: Store = Layout(where) if where.is_dir() else Archive(where)
        try:
            return _Opening(store, policy, place, now or datetime.now(UTC)).run(digest, check_blobs=check_blobs)
        except BaseException:
            store.close()
            raise
    except Error as error:
        error.where = error.where or str(where)
        raise


def write(path: str | os.PathLike[str], content: Content) -> None:
    """Write a bundle: to an `.npub` file if `path` ends so, else to an image layout folder.

    What is there before stays whole until the new bundle is, whatever happens on the way.
    """
    target = Path(path)
    check_target(target)
    if target.suffix == SUFFIX:
        write_archive(target, content.index_json(), content.blobs())
    else:
        write_layout(target, content.index_json(), content.blobs())


def check_target(target: Path) -> None:
    """Raise `FileError` where `write` could not put a bundle, as far as can be told without writing one."""
    if target.suffix == SUFFIX and target.is_dir():
        raise FileError("there is a folder of this name", where=str(target), remedy="name another file")
    if target.suffix != SUFFIX and target.exists() and not target.is_dir():
        what = f"there is a file of this name, which does not end in {SUFFIX}"
        raise FileError(what, where=str(target), remedy=f"name a file that ends in {SUFFIX}, or a folder")
    if not os.access(target.parent, os.W_OK):
        what = "this folder cannot be written to" if target.parent.is_dir() else "there is no such folder"
        raise FileError(what, where=str(target.parent), remedy="make the folder, or name another")


@dataclass(frozen=True, slots=True)
class _Opening:
    """The steps of opening a bundle, in the order in which they must happen."""

    store: Store
    policy: TrustPolicy
    place: str | None
    now: datetime

    def run(self, digest: str | None, *, check_blobs: bool) -> Container:
        listed = self._listed()
        subject = self._pick([entry for entry in listed if entry.artifact_type == BUNDLE_TYPE], digest)
        raw_manifest = self._document(subject, MAX_MANIFEST, "bundle manifest")
        attached = self._attached(listed, replace(subject, artifact_type=None))
        envelopes = [(a, Envelope.decode(a.envelope, max_bytes=len(a.envelope))) for a in attached]

        signatures = [envelope for a, envelope in envelopes if a.referrer.artifact_type == SIGNATURE_TYPE]
        verdict = evaluate(self.policy, subject.digest, signatures, place=self.place, now=self.now)
        verdict.require()

        manifest = Manifest.decode(raw_manifest)
        if verdict.name not in (None, manifest.name):
            raise IntegrityError(f"the bundle is named {manifest.name} but was signed as {verdict.name}")
        config = self._document(manifest.config, MAX_CONFIG, "bundle.json")
        layers = {layer.digest: self.store.blob(layer) for layer in manifest.layers}
        content = Content(manifest, raw_manifest, Blob.of_bytes(config), tuple(layers.values()), attached)
        if self.store.canonical:
            self._check_canonical(content)
        if check_blobs:
            for blob in layers.values():
                blob.check()
        blobs = {content.config.digest: content.config, **layers}
        attestations, rejected = self._attestations(envelopes, subject.digest)
        return Container(content, subject.digest, verdict, config, blobs, attestations, rejected, self.store)

    def _listed(self) -> list[Descriptor]:
        """The manifests that index.json and the indexes in it list, each once."""
        if self.store.canonical:
            top = Index.decode(self.store.index_json(), "index.json")
            if len(top.manifests) != 1:
                raise FormatError(f"index.json lists {len(top.manifests)} images; in an .npub file it lists one")
            return list(self._nested(top.manifests[0]))
        top = Index.decode_foreign(self.store.index_json(), "index.json")
        found: dict[str, Descriptor] = {}
        for entry in top.manifests:
            for manifest in self._nested(entry) if entry.media_type == INDEX_MEDIA_TYPE else [entry]:
                if manifest.media_type == MANIFEST_MEDIA_TYPE and manifest.artifact_type in (
                    BUNDLE_TYPE,
                    *REFERRER_TYPES,
                ):
                    found.setdefault(manifest.digest, manifest)
        return list(found.values())

    def _nested(self, entry: Descriptor) -> Sequence[Descriptor]:
        raw = self._document(entry, MAX_INDEX, "index")
        return (Index.decode if self.store.canonical else Index.decode_foreign)(raw).manifests

    def _pick(self, bundles: list[Descriptor], digest: str | None) -> Descriptor:
        """The one bundle that is there, or that was asked for."""
        chosen = [bundle for bundle in bundles if digest in (None, bundle.digest)]
        if len(chosen) == 1:
            return Descriptor(MANIFEST_MEDIA_TYPE, chosen[0].digest, chosen[0].size)
        if chosen:
            known = ", ".join(bundle.digest for bundle in chosen[:10])
            raise FormatError(f"there are {len(chosen)} bundles here; name one by its digest: {known}")
        if bundles:
            raise IntegrityError(f"the bundle is {bundles[0].digest} and not {digest}")
        raise FormatError("there is no bundle in here")

    def _attached(self, listed: Sequence[Descriptor], subject: Descriptor) -> tuple[Attached, ...]:
        """The signatures and attestations that refer to the bundle, read by the strict readers."""
        return tuple(sorted(self._referring(listed, subject), key=attached_order))

    def _referring(self, listed: Sequence[Descriptor], subject: Descriptor) -> Iterator[Attached]:
        entries = [entry for entry in listed if entry.artifact_type in REFERRER_TYPES]
        if len(entries) > MAX_REFERRERS:
            raise FormatError(f"there are {len(entries)} signatures and attestations; at most {MAX_REFERRERS} may be")
        for entry in entries:
            raw = self._document(entry, MAX_REFERRER, "signature manifest")
            referrer = Referrer.decode(raw)
            if referrer.artifact_type != entry.artifact_type:
                raise FormatError(f"{entry.digest} is listed as {entry.artifact_type}, but is {referrer.artifact_type}")
            self._document(empty_config(), len(EMPTY_CONFIG), "empty config")
            if referrer.subject == subject:
                limit = MAX_ENVELOPE[referrer.artifact_type]
                yield Attached(referrer, raw, self._document(referrer.envelope, limit, "signature envelope"))
            elif self.store.canonical:
                raise FormatError(f"the signature {entry.digest} is for another bundle, {referrer.subject.digest}")

    def _attestations(
        self, envelopes: Sequence[tuple[Attached, Envelope]], digest: str
    ) -> tuple[tuple[Attestation, ...], tuple[Finding, ...]]:
        """The statements about the bundle that count, and why others do not."""
        attestations: list[Attestation] = []
        rejected: list[Finding] = []
        for attached, envelope in envelopes:
            if attached.referrer.artifact_type != ATTESTATION_TYPE:
                continue
            attestation, findings = attest(self.policy, digest, envelope, place=self.place, now=self.now)
            rejected += findings
            if attestation is None:
                continue
            if attestation.statement.predicate_type != attached.referrer.predicate_type:
                raise FormatError("an attestation is listed under another predicate type than it was signed for")
            attestations.append(attestation)
        return tuple(attestations), tuple(rejected)

    def _document(self, descriptor: Descriptor, max_bytes: int, what: str) -> bytes:
        """The bytes of a small blob, checked against its digest."""
        if descriptor.size > max_bytes:
            raise FormatError(f"the {what} has {descriptor.size} bytes; at most {max_bytes} are allowed")
        return self.store.blob(descriptor).read()

    def _check_canonical(self, content: Content) -> None:
        """Check that the file is what would be written for its content."""
        if self.store.index_json() != content.index_json():
            raise FormatError("this .npub file is not canonical: its index is not that of its content")
        self.store.check_order([blob.digest for blob in content.blobs()])
