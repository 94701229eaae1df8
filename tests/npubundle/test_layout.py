"""Image layout folders, also as other tools write them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from npubundle.container import open_container, write
from npubundle.digest import sha256_of
from npubundle.errors import Error, ExitCode, FileError
from npubundle.oci import ATTESTATION_TYPE, INDEX_MEDIA_TYPE, Descriptor
from tests.npubundle.samples import attested, blob_path, signed, trusting, unsigned

POLICY = trusting("a")


def refused(path: Path, **options: Any) -> Error:
    with pytest.raises(Error) as caught:
        open_container(path, POLICY, **options).close()
    assert caught.value.where
    return caught.value


def rewrite_index(layout: Path, **members: Any) -> None:
    """Rewrite index.json as `skopeo copy --all` does, which copies the blobs as they are."""
    document = {"schemaVersion": 2, **json.loads((layout / "index.json").read_text()), **members}
    document.pop("mediaType", None)
    (layout / "index.json").write_text(json.dumps(document, indent=3) + "\n")
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def test_a_folder_written_by_another_tool(tmp_path: Path) -> None:
    content = attested("a")
    write(tmp_path / "b", content)
    (entry,) = json.loads((tmp_path / "b" / "index.json").read_text())["manifests"]
    for notes in ({}, {"org.opencontainers.image.ref.name": "v1", "tool": "x"}):
        rewrite_index(tmp_path / "b", manifests=[{**entry, "annotations": notes}], annotations={"more": "x"})
        (tmp_path / "b" / "blobs" / "sha256" / "stray").write_text("not ours")
        with open_container(tmp_path / "b", POLICY) as container:
            assert container.content == content
            write(tmp_path / "b.npub", container.content)
        open_container(tmp_path / "b.npub", POLICY).close()


def test_a_flat_index_and_entries_of_other_images(tmp_path: Path) -> None:
    content = signed("a")
    write(tmp_path / "b", content)
    flat = [entry.to_dict() for entry in content.index().manifests]
    image = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": sha256_of(b"image"), "size": 5}
    rewrite_index(tmp_path / "b", manifests=[image, *flat, *flat])
    with open_container(tmp_path / "b", POLICY) as container:
        assert container.content == content


def test_several_bundles_in_one_folder(tmp_path: Path) -> None:
    one, two = signed("a", content=unsigned("one")), signed("a", content=unsigned("two"))
    write(tmp_path / "b", one)
    write(tmp_path / "two", two)
    for blob in two.blobs():
        shutil.copy(blob_path(tmp_path / "two", blob.digest), tmp_path / "b" / "blobs" / "sha256")
    both = [Descriptor.of(INDEX_MEDIA_TYPE, content.index().encode()).to_dict() for content in (one, two)]
    rewrite_index(tmp_path / "b", manifests=both)
    assert "2 bundles" in refused(tmp_path / "b").what
    for content in (one, two):
        with open_container(tmp_path / "b", POLICY, digest=content.manifest_digest) as container:
            assert container.content == content
    with pytest.raises(FileError, match="several images"):
        write(tmp_path / "b", one)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"", "not valid JSON"),
        (b"[" * 5000, "nested deeper"),
        (b'{"schemaVersion":2,"schemaVersion":2,"manifests":[]}', "twice"),
        (b'{"schemaVersion":2,"manifests":[]}', "no bundle"),
        (b'{"schemaVersion":2,"manifests":' + b" " * (300 << 10) + b"[]}", "at most"),
        (b'{"schemaVersion":2,"manifests":[{"mediaType":"x/y","digest":"sha256:../../x","size":1}]}', "not valid"),
    ],
)
def test_folders_with_a_bad_index(tmp_path: Path, index: bytes, words: str) -> None:
    write(tmp_path / "b", signed("a"))
    (tmp_path / "b" / "index.json").write_bytes(index)
    error = refused(tmp_path / "b")
    assert words in str(error)
    assert error.exit_code is ExitCode.INTEGRITY


def test_an_index_that_declares_gigantic_documents(tmp_path: Path) -> None:
    content = signed("a")
    write(tmp_path / "b", content)
    for at, limit in ((0, "bundle manifest"), (1, "signature manifest")):
        entries = [entry.to_dict() for entry in content.index().manifests]
        entries[at]["size"] = 1 << 40
        rewrite_index(tmp_path / "b", manifests=entries)
        assert f"the {limit} has {1 << 40} bytes" in refused(tmp_path / "b").what


def test_folders_that_are_no_layouts(tmp_path: Path) -> None:
    assert "no OCI image layout" in refused(tmp_path).what
    (tmp_path / "oci-layout").write_text('{"imageLayoutVersion":"2.0.0"}')
    assert "oci-layout is not valid" in refused(tmp_path).what
    (tmp_path / "oci-layout").unlink()
    os.mkfifo(tmp_path / "oci-layout")
    assert "not a regular file" in refused(tmp_path).what


def test_a_signature_that_is_listed_as_something_else(tmp_path: Path) -> None:
    content = signed("a")
    write(tmp_path / "b", content)
    entries = [entry.to_dict() for entry in content.index().manifests]
    entries[1]["artifactType"] = ATTESTATION_TYPE
    rewrite_index(tmp_path / "b", manifests=entries)
    assert f"is listed as {ATTESTATION_TYPE}" in refused(tmp_path / "b").what
