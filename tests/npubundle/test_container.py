"""Opening and writing bundles: what comes back, what is refused, and in which order things are looked at."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npubundle.container import open_container, write
from npubundle.content import Content, NewLayer, build_container
from npubundle.digest import sha256_of
from npubundle.errors import Error, ExitCode, FileError, FormatError, IntegrityError, SignatureError
from npubundle.oci import BUNDLE_TYPE, SIGNATURE_TYPE, Descriptor, Index, Manifest
from npubundle.statement import NUMERICS
from npubundle.trust import Mode, TrustPolicy
from tests.npubundle.samples import CONFIG, NAME, PART, attested, blob_path, key, signed, trusting, unsigned

FORMS = pytest.mark.parametrize("form", ["b.npub", "b"])
POLICY = trusting("a")


def refused(path: Path, policy: TrustPolicy = POLICY, **options: Any) -> Error:
    with pytest.raises(Error) as caught:
        open_container(path, policy, **options).close()
    assert caught.value.where
    return caught.value


@FORMS
def test_what_was_written_is_read(tmp_path: Path, form: str) -> None:
    content = attested("a")
    write(tmp_path / form, content)
    with open_container(tmp_path / form, POLICY) as container:
        assert container.name == NAME
        assert container.manifest_digest == content.manifest_digest
        assert container.config_bytes == CONFIG
        assert [layer.annotations["dev.npucc.part"] for layer in container.layers] == ["part-0", "part-1"]
        assert [container.blobs[layer.digest].read() for layer in container.layers] == [b"part one", b"part two" * 100]
        assert container.verdict.signers == ("a",)
        (attestation,) = container.attestations
        assert (attestation.statement.predicate_type, attestation.signed_by) == (NUMERICS, ("a",))
        assert not container.rejected


LAYERS = st.lists(
    st.builds(
        NewLayer,
        st.sampled_from([PART, "application/octet-stream"]),
        st.binary(max_size=1500),
        st.dictionaries(st.text("ab./", min_size=1), st.text(st.characters(exclude_categories=["Cs"]))),
    ),
    min_size=1,
    max_size=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(LAYERS, st.binary(max_size=600), st.sets(st.sampled_from(["a", "b", "ecdsa"])))
def test_reading_and_writing_are_inverse(
    tmp_path: Path, layers: list[NewLayer], config: bytes, signers: set[str]
) -> None:
    content = signed(*sorted(signers), content=build_container("x", config, layers))
    write(tmp_path / "one.npub", content)
    with open_container(tmp_path / "one.npub", TrustPolicy.off()) as container:
        assert container.content == content
        assert container.config_bytes == config
        assert [container.blobs[layer.digest].read() for layer in container.layers] == [
            layer.source for layer in layers
        ]
        shutil.rmtree(tmp_path / "folder", ignore_errors=True)
        write(tmp_path / "folder", container.content)
    with open_container(tmp_path / "folder", TrustPolicy.off()) as container:
        write(tmp_path / "two.npub", container.content)
    assert (tmp_path / "one.npub").read_bytes() == (tmp_path / "two.npub").read_bytes()


def test_layers_may_be_files(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"x" * 3_000_000)
    content = build_container("x", CONFIG, [NewLayer(PART, tmp_path / "part")])
    assert content == build_container("x", CONFIG, [NewLayer(PART, b"x" * 3_000_000)])
    write(tmp_path / "b.npub", content)
    (tmp_path / "part").write_bytes(b"y" * 3_000_000)
    with pytest.raises(IntegrityError, match="damaged"):
        write(tmp_path / "c.npub", content)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.npub", "part"]


@pytest.mark.parametrize(
    ("name", "config", "layers"),
    [
        ("../x", CONFIG, [NewLayer(PART, b"")]),
        ("x", CONFIG, []),
        ("x", CONFIG, [NewLayer("part", b"")]),
        ("x", bytes(17 << 20), [NewLayer(PART, b"")]),
        ("x", CONFIG, [NewLayer(PART, b"", {"a": "\ud800"})]),
    ],
)
def test_what_cannot_be_read_is_not_built(name: str, config: bytes, layers: list[NewLayer]) -> None:
    with pytest.raises(FormatError):
        build_container(name, config, layers)


def test_statements_need_a_signer_and_must_fit() -> None:
    with pytest.raises(FormatError, match="must be signed"):
        build_container("x", CONFIG, [NewLayer(PART, b"")], attestations=[(NUMERICS, {})])
    for predicate in ({"x": "y" * (5 << 20)}, {"x": float("nan")}):
        with pytest.raises(FormatError):
            unsigned().with_attestation(key("a"), NUMERICS, predicate)
    with pytest.raises(FormatError):
        unsigned().with_attestation(key("a"), "https://npucc.dev/signature/v1", {})


@FORMS
def test_an_unsigned_bundle(tmp_path: Path, form: str) -> None:
    write(tmp_path / form, unsigned())
    error = refused(tmp_path / form)
    assert isinstance(error, SignatureError)
    assert error.exit_code is ExitCode.INTEGRITY
    with open_container(tmp_path / form, TrustPolicy.off()) as container:
        assert not container.verdict.trusted
    with open_container(tmp_path / form, trusting("a", mode=Mode.WARN)) as container:
        assert container.verdict.warnings == ("the bundle is not signed",)


@FORMS
def test_a_bundle_signed_by_someone_else(tmp_path: Path, form: str) -> None:
    write(tmp_path / form, signed("b"))
    assert [problem.where for problem in refused(tmp_path / form).problems] == ["unknown-key"]


@FORMS
def test_a_signature_moved_from_another_bundle(tmp_path: Path, form: str) -> None:
    """The manifest of the signature is adapted to the new subject; the signed statement cannot be."""
    other, victim = signed("a", content=unsigned("other")), unsigned()
    (stolen,) = other.attached
    referrer = replace(stolen.referrer, subject=victim.subject)
    write(tmp_path / form, victim.with_attached([replace(stolen, referrer=referrer, raw=referrer.encode())]))
    assert [problem.where for problem in refused(tmp_path / form).problems] == ["other-bundle"]
    write(tmp_path / "unchanged.npub", victim.with_attached(other.attached))
    assert "for another bundle" in refused(tmp_path / "unchanged.npub").what


@FORMS
def test_an_attestation_cannot_stand_in_for_a_signature(tmp_path: Path, form: str) -> None:
    content = unsigned().with_attestation(key("a"), NUMERICS, {})
    (attestation,) = content.attached
    referrer = replace(attestation.referrer, artifact_type=SIGNATURE_TYPE)
    write(tmp_path / form, unsigned().with_attached([replace(attestation, referrer=referrer, raw=referrer.encode())]))
    assert [problem.where for problem in refused(tmp_path / form).problems] == ["other-statement"]


@FORMS
def test_an_attestation_listed_under_another_predicate_type(tmp_path: Path, form: str) -> None:
    content = unsigned().with_attestation(key("a"), NUMERICS, {})
    (attestation,) = content.attached
    referrer = replace(attestation.referrer, predicate_type="https://slsa.dev/provenance/v1")
    forged = replace(attestation, referrer=referrer, raw=referrer.encode())
    write(tmp_path / form, signed("a").with_attached([forged]))
    assert "predicate type" in refused(tmp_path / form).what


def test_attestations_of_strangers_are_left_out_or_are_claims(tmp_path: Path) -> None:
    write(tmp_path / "b.npub", attested("a", "b"))
    with open_container(tmp_path / "b.npub", POLICY) as container:
        assert [attestation.signed_by for attestation in container.attestations] == [("a",)]
        assert [finding.reason.value for finding in container.rejected] == ["unknown-key"]
        assert len(container.content.attached) == 4
    with open_container(tmp_path / "b.npub", trusting("a", mode=Mode.WARN)) as container:
        assert sorted(attestation.signed_by for attestation in container.attestations) == [(), ("a",)]


@FORMS
def test_signatures_can_be_added_in_place(tmp_path: Path, form: str) -> None:
    path = tmp_path / form
    write(path, signed("a"))
    with open_container(path, POLICY) as container:
        write(path, container.content.with_signature(key("b")).with_signature(key("a")))
    with open_container(path, trusting("b")) as container:
        assert len(container.content.attached) == 2
        assert container.content == signed("b", "a")


@FORMS
def test_a_signed_name_that_is_not_the_bundles(tmp_path: Path, form: str) -> None:
    content = unsigned("dev/llama")
    lying = replace(content, manifest=replace(content.manifest, name="prod/llama")).with_signature(key("a"))
    write(tmp_path / form, content.with_attached(lying.attached))
    assert "signed as prod/llama" in refused(tmp_path / form).what


@FORMS
def test_a_pinned_digest(tmp_path: Path, form: str) -> None:
    content = signed("a")
    write(tmp_path / form, content)
    open_container(tmp_path / form, POLICY, digest=content.manifest_digest).close()
    other = sha256_of(b"other")
    assert f"{content.manifest_digest} and not {other}" in refused(tmp_path / form, digest=other).what


@pytest.mark.parametrize("policy", [POLICY, trusting("a", mode=Mode.WARN), TrustPolicy.off()])
def test_damaged_blobs_are_refused_in_every_mode(tmp_path: Path, policy: TrustPolicy) -> None:
    content = attested("a")
    for blob in content.blobs():
        write(tmp_path / "b", content)
        path = blob_path(tmp_path / "b", blob.digest)
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        assert isinstance(refused(tmp_path / "b", policy), IntegrityError)
        path.write_bytes(data + b"x")
        assert "bytes instead of" in refused(tmp_path / "b", policy).what
        path.unlink()
        assert "missing" in refused(tmp_path / "b", policy).what


def test_a_blob_that_changes_after_opening_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    content = signed("a")
    for form in ("b", "b.npub"):
        write(tmp_path / form, content)
        with open_container(tmp_path / form, POLICY) as container:
            digest = container.layers[0].digest
            path = tmp_path / form if form == "b.npub" else blob_path(tmp_path / "b", digest)
            data = path.read_bytes()
            path.write_bytes(data.replace(b"part one", b"part 0ne"))
            with pytest.raises(IntegrityError, match="damaged"):
                container.blobs[digest].read()


@FORMS
def test_layers_are_hashed_on_reading_where_opening_does_not(tmp_path: Path, form: str) -> None:
    write(tmp_path / form, signed("a"))
    path = tmp_path / form if form == "b.npub" else blob_path(tmp_path / form, sha256_of(b"part one"))
    path.write_bytes(path.read_bytes().replace(b"part one", b"part 0ne"))
    with open_container(tmp_path / form, POLICY, check_blobs=False) as container:
        one, two = (container.blobs[layer.digest] for layer in container.layers)
        assert two.read() == b"part two" * 100
        with pytest.raises(IntegrityError, match="damaged"):
            one.read()
        with pytest.raises(IntegrityError, match="damaged"):
            list(one.chunks(3))


def test_a_closed_container_gives_no_blobs(tmp_path: Path) -> None:
    write(tmp_path / "b.npub", signed("a"))
    container = open_container(tmp_path / "b.npub", POLICY)
    container.close()
    with pytest.raises(FileError, match="closed"):
        container.blobs[container.layers[0].digest].read()


def test_nothing_is_parsed_before_the_signature_holds(tmp_path: Path) -> None:
    """A manifest that is no JSON at all: without a trusted signature, no one finds that out."""
    content = unsigned()
    broken = replace(content, raw=b"\xff" * 100).with_signature(key("b"))
    write(tmp_path / "b", broken)
    assert isinstance(refused(tmp_path / "b"), SignatureError)
    assert "UTF-8" in refused(tmp_path / "b", trusting("b")).what


def test_signed_layers_that_are_not_there(tmp_path: Path) -> None:
    content = unsigned()
    layers = (*content.manifest.layers, Descriptor(PART, sha256_of(b"none"), 4))
    manifest = replace(content.manifest, layers=layers)
    write(tmp_path / "b.npub", replace(content, manifest=manifest, raw=manifest.encode()).with_signature(key("a")))
    assert "missing" in refused(tmp_path / "b.npub").what


def test_two_names_for_one_blob_and_equal_layers(tmp_path: Path) -> None:
    content = build_container("x", b"same", [NewLayer(PART, b"same", {"n": "1"}), NewLayer(PART, b"same", {"n": "2"})])
    write(tmp_path / "b.npub", content)
    with open_container(tmp_path / "b.npub", TrustPolicy.off()) as container:
        assert container.content == content
        assert len(container.layers) == 2
        assert list(container.blobs) == [sha256_of(b"same")]


def test_the_store_is_closed_when_opening_fails(tmp_path: Path) -> None:
    write(tmp_path / "b.npub", unsigned())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        refused(tmp_path / "b.npub")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_index_lists_signatures_in_order() -> None:
    content = attested("a", "b")
    kinds = [entry.artifact_type for entry in content.index().manifests]
    assert kinds[0] == BUNDLE_TYPE
    assert kinds[1:3] == [SIGNATURE_TYPE] * 2
    assert content == Content(content.manifest, content.raw, content.config, content.layers).with_attached(
        reversed(content.attached)
    )
    assert Index.decode(content.index().encode()) == content.index()
    assert Manifest.decode(content.raw) == content.manifest


def test_errors_of_the_system_are_ours(tmp_path: Path) -> None:
    link = tmp_path / "loop"
    link.symlink_to(link)
    assert os.strerror(errno.ELOOP) in refused(link).what
