"""The OCI documents, their one form, and what a foreign index may look like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npubundle import canonical
from npubundle.digest import check_digest_text, hex_of, sha256_of
from npubundle.errors import FormatError
from npubundle.oci import (
    ATTESTATION_TYPE,
    BUNDLE_TYPE,
    CONFIG_MEDIA_TYPE,
    INDEX_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    SIGNATURE_TYPE,
    Descriptor,
    Index,
    Manifest,
    Referrer,
)
from tests.npubundle.samples import PART

LAYER = Descriptor(PART, sha256_of(b"layer"), 5, annotations={"a": "b", "empty": ""})
CONFIG = Descriptor(CONFIG_MEDIA_TYPE, sha256_of(b"{}"), 2)
MANIFEST = Manifest("org/llama-3.1_8b--lora", CONFIG, (LAYER, LAYER))
SUBJECT = Descriptor(MANIFEST_MEDIA_TYPE, sha256_of(b"manifest"), 8)
ENVELOPE = Descriptor("application/vnd.dsse.envelope.v1+json", sha256_of(b"envelope"), 8)
REFERRER = Referrer(SIGNATURE_TYPE, "https://npucc.dev/signature/v1", SUBJECT, ENVELOPE)
INDEX = Index((SUBJECT, Descriptor(MANIFEST_MEDIA_TYPE, sha256_of(b"x"), 1, ATTESTATION_TYPE)))


@pytest.mark.parametrize("document", [MANIFEST, REFERRER, INDEX, Index(())])
def test_a_document_is_read_back(document: Any) -> None:
    raw = document.encode()
    assert type(document).decode(raw) == document
    assert type(document).decode(raw).encode() == raw
    with pytest.raises(FormatError, match="not canonical"):
        type(document).decode(raw + b"\n")


@pytest.mark.parametrize(
    ("document", "path", "value"),
    [
        (MANIFEST, "schemaVersion", 1),
        (MANIFEST, "schemaVersion", True),
        (MANIFEST, "mediaType", INDEX_MEDIA_TYPE),
        (MANIFEST, "artifactType", SIGNATURE_TYPE),
        (MANIFEST, "artifactType", "application/vnd.npucc.bundle.v2"),
        (MANIFEST, "config.mediaType", "application/json"),
        (MANIFEST, "config.digest", "sha512:" + "0" * 128),
        (MANIFEST, "config.digest", "sha256:" + "A" * 64),
        (MANIFEST, "layers", []),
        (MANIFEST, "layers.0.size", -1),
        (MANIFEST, "layers.0.size", 1.5),
        (MANIFEST, "layers.0.mediaType", "no media type"),
        (MANIFEST, "layers.0.annotations", {}),
        (MANIFEST, "layers.0.annotations", {"a": 1}),
        (MANIFEST, "layers.0.urls", ["https://example.com"]),
        (MANIFEST, "annotations", {}),
        (MANIFEST, "annotations", {"org.opencontainers.image.title": "../evil"}),
        (MANIFEST, "annotations", {"org.opencontainers.image.title": "a" * 129}),
        (MANIFEST, "annotations", {"org.opencontainers.image.title": "a", "more": "b"}),
        (MANIFEST, "subject", SUBJECT.to_dict()),
        (REFERRER, "artifactType", BUNDLE_TYPE),
        (REFERRER, "subject.mediaType", INDEX_MEDIA_TYPE),
        (REFERRER, "layers.0.mediaType", "application/json"),
        (REFERRER, "config.size", 3),
        (REFERRER, "layers", [ENVELOPE.to_dict()] * 2),
        (REFERRER, "annotations", {"in-toto.io/predicate-type": ""}),
        (INDEX, "mediaType", MANIFEST_MEDIA_TYPE),
        (INDEX, "manifests", [SUBJECT.to_dict()] * 258),
        (INDEX, "manifests.0.platform", {}),
        (INDEX, "annotations", {"a": "b"}),
    ],
)
def test_any_other_document_is_refused(document: Any, path: str, value: object) -> None:
    members = json.loads(document.encode())
    *way, last = path.split(".")
    place = members
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    with pytest.raises(FormatError, match="is not valid"):
        type(document).decode(canonical.encode(members))


@pytest.mark.parametrize("name", ["a", "A1", "org/team/llama-3.1_8b", "a--b__c.d"])
def test_names(name: str) -> None:
    assert Manifest.decode(Manifest(name, CONFIG, (LAYER,)).encode()).name == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "a..b", "a//b", "a b", "a\n", "ä", "../a", "/a", "a___b"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(FormatError):
        Manifest.decode(Manifest(name, CONFIG, (LAYER,)).encode())


def test_a_foreign_index_may_have_members_that_we_do_not_know() -> None:
    raw = json.dumps(
        {
            "schemaVersion": 2,
            "manifests": [{**SUBJECT.to_dict(), "platform": {"os": "linux"}, "annotations": {}, "data": "AAAA"}],
            "annotations": {"tool": "other"},
        },
        indent=1,
    )
    assert Index.decode_foreign(raw.encode()) == Index((SUBJECT,))
    with pytest.raises(FormatError):
        Index.decode_foreign(raw.replace('"schemaVersion": 2', '"schemaVersion": 1').encode())
    with pytest.raises(FormatError):
        Index.decode(raw.encode())


def test_digests() -> None:
    assert sha256_of(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert check_digest_text(sha256_of(b"")) == sha256_of(b"")
    assert hex_of(sha256_of(b"")).startswith("e3b0c442")
    for bad in ("", "sha256:", "sha256:" + "0" * 63, "sha256:" + "0" * 65, "SHA256:" + "0" * 64, "0" * 64):
        with pytest.raises(FormatError):
            check_digest_text(bad)
