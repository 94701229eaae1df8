"""The canonical `.npub` form: one encoding per content, and nothing else is read."""

from __future__ import annotations

import contextlib
import io
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npubundle.archive import BLOCK, header, scan
from npubundle.blob import open_file
from npubundle.container import open_container, write
from npubundle.errors import Error, FormatError, IntegrityError
from npubundle.trust import TrustPolicy
from tests.npubundle.samples import attested, signed, trusting, unsigned

POLICY = trusting("a")


def written(path: Path, content: object = None) -> bytes:
    write(path, content or signed("a", content=unsigned(layers=(b"part",))))  # type: ignore[arg-type]
    return path.read_bytes()


def refuses(path: Path, data: bytes, policy: TrustPolicy = POLICY) -> str:
    """Write the bytes, see that they are refused as a matter of integrity, and return the message."""
    path.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        open_container(path, policy).close()
    return caught.value.what


@pytest.mark.parametrize("policy", [POLICY, TrustPolicy.off()], ids=["signed", "unsigned"])
def test_every_flipped_byte_is_noticed(tmp_path: Path, policy: TrustPolicy) -> None:
    content = unsigned(layers=(b"part",))
    data = written(tmp_path / "good.npub", signed("a", content=content) if policy is POLICY else content)
    path = tmp_path / "bad.npub"
    path.write_bytes(data)
    accepted = []
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(data):
            file.seek(at)
            file.write(bytes([byte ^ 1 << at % 8]))
            with contextlib.suppress(IntegrityError):
                open_container(path, policy).close()
                accepted.append(at)
            file.seek(at)
            file.write(bytes([byte]))
    assert not accepted
    open_container(path, policy).close()


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "good.npub")
    path = tmp_path / "bad.npub"
    path.write_bytes(data)
    accepted = []
    with path.open("r+b", buffering=0) as file:
        for size in reversed(range(len(data))):
            file.truncate(size)
            with contextlib.suppress(IntegrityError):
                open_container(path, POLICY).close()
                accepted.append(size)
    assert not accepted


@pytest.mark.parametrize("tail", [b"\0", b"x", bytes(BLOCK), bytes(10240), header("oci-layout", 0)])
def test_trailing_bytes_are_refused(tmp_path: Path, tail: bytes) -> None:
    data = written(tmp_path / "good.npub")
    assert "follow the end" in refuses(tmp_path / "bad.npub", data + tail)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(st.data())
def test_spliced_files_are_refused(tmp_path: Path, data: st.DataObject) -> None:
    good = (
        (tmp_path / "good.npub").read_bytes() if (tmp_path / "good.npub").exists() else written(tmp_path / "good.npub")
    )
    blocks = [good[at : at + BLOCK] for at in range(0, len(good), BLOCK)]
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(blocks))] * 2)))
    inserted = data.draw(st.lists(st.sampled_from([*blocks, bytes(BLOCK)]), max_size=3))
    spliced = b"".join([*blocks[:start], *inserted, *blocks[end:]])
    if spliced != good:
        refuses(tmp_path / "bad.npub", spliced)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=3000))
def test_any_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    refuses(tmp_path / "bad.npub", data)


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    first = written(tmp_path / "one.npub", attested("a", "b"))
    assert first == written(tmp_path / "two.npub", attested("b", "a"))
    with open_container(tmp_path / "one.npub", POLICY) as container:
        assert written(tmp_path / "copy.npub", container.content) == first


def test_tar_programs_unpack_it(tmp_path: Path) -> None:
    content = attested("a")
    written(tmp_path / "good.npub", content)
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "good.npub", "-C", tmp_path / "out"], check=True)
    with open_container(tmp_path / "out", POLICY) as container:
        assert container.manifest_digest == content.manifest_digest
    with tarfile.open(tmp_path / "good.npub") as archive:
        assert {member.mode for member in archive} == {0o644}


def entries(data: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            yield member, file.read()


def repacked(data: bytes, change: Callable[[tarfile.TarInfo], None], format_: int = tarfile.USTAR_FORMAT) -> bytes:
    """The same files in a tar that another program wrote, with each member changed."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format_) as archive:
        for member, content in entries(data):
            change(member)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({}, "bytes follow the end"),  # Python pads the archive to 10240 bytes
        ({"mode": 0o755}, "not in canonical form"),
        ({"mtime": 1}, "not in canonical form"),
        ({"uid": 1}, "not in canonical form"),
        ({"uname": "root"}, "not in canonical form"),
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "a symbolic link"),
        ({"type": tarfile.LNKTYPE, "linkname": "index.json"}, "a hard link"),
        ({"type": tarfile.DIRTYPE}, "a folder"),
        ({"type": tarfile.CHRTYPE}, "a character device"),
        ({"type": tarfile.FIFOTYPE}, "a pipe"),
        ({"type": tarfile.CONTTYPE}, "not in canonical form"),
        ({"type": tarfile.AREGTYPE}, "not in canonical form"),
        ({"name": "../evil"}, "an entry named '../evil'"),
        ({"name": "/etc/cron.d/evil"}, "an entry named '/etc/cron.d/evil'"),
        ({"name": "./oci-layout"}, "an entry named './oci-layout'"),
        ({"name": "blobs/sha256/" + "A" * 64}, "an entry named"),
        ({"name": "a\x1b[31mb"}, r"an entry named 'a\x1b"),
    ],
)
def test_other_tars_are_refused(tmp_path: Path, attributes: dict[str, object], words: str) -> None:
    def change(member: tarfile.TarInfo) -> None:
        for name, value in attributes.items():
            setattr(member, name, value)

    data = repacked(written(tmp_path / "good.npub"), change)
    assert words in refuses(tmp_path / "bad.npub", data)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K", b"S"])
def test_extended_headers_are_refused(tmp_path: Path, kind: bytes) -> None:
    body = b"30 path=blobs/sha256/../../evil\n".ljust(BLOCK, b"\0")
    head = bytearray(header("oci-layout", 32))
    head[156:157] = kind
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    message = refuses(tmp_path / "bad.npub", bytes(head) + body + written(tmp_path / "good.npub"))
    assert "only plain files" in message


def parts(data: bytes) -> list[tuple[str, bytes]]:
    return [(member.name, content) for member, content in entries(data)]


def packed(files: list[tuple[str, bytes]]) -> bytes:
    """A tar in which every header is canonical."""
    blocks = [header(name, len(data)) + data + bytes(-len(data) % BLOCK) for name, data in files]
    return b"".join(blocks) + bytes(2 * BLOCK)


def test_duplicate_missing_stray_and_misplaced_entries(tmp_path: Path) -> None:
    data = written(tmp_path / "good.npub")
    files = parts(data)
    assert packed(files) == data
    bad = tmp_path / "bad.npub"
    assert "occurs twice" in refuses(bad, packed([*files, files[-1]]))
    assert "occurs twice" in refuses(bad, packed([*files, ("index.json", b"{}")]))
    assert "belongs to nothing" in refuses(bad, packed([*files, ("blobs/sha256/" + "0" * 64, b"stray")]))
    assert "not in the order" in refuses(bad, packed([*files[:-2], files[-1], files[-2]]))
    assert "not in the order" in refuses(bad, packed([files[1], files[0], *files[2:]]))
    for at in range(len(files)):
        assert "missing" in refuses(bad, packed([*files[:at], *files[at + 1 :]]))
    assert "oci-layout is missing" in refuses(bad, bytes(2 * BLOCK))


def test_swapped_blobs_are_noticed(tmp_path: Path) -> None:
    files = parts(written(tmp_path / "good.npub", signed("a", content=unsigned(layers=(b"one!", b"two!")))))
    (one, first), (two, second) = files[-2:]
    assert "damaged" in refuses(tmp_path / "bad.npub", packed([*files[:-2], (one, second), (two, first)]))


@pytest.mark.parametrize("size", [2**33 - 1, 2**33, 2**62, 2**88 - 1])
def test_a_gigantic_declared_size_is_refused_at_once(tmp_path: Path, size: int) -> None:
    files = parts(written(tmp_path / "good.npub"))
    data = packed(files[:2]) + bytes(BLOCK)
    at = data.index(b"index.json")
    lying = data[:at] + header("index.json", size) + data[at + BLOCK :]
    assert "more than the file" in refuses(tmp_path / "bad.npub", lying)


def test_sizes_beyond_octal_have_one_form(tmp_path: Path) -> None:
    """A blob of 9 GiB (a hole in the file) is found; its size in octal, or a small one in binary, is not canonical."""
    name, size = "blobs/sha256/" + "0" * 64, 9 << 30
    path = tmp_path / "large.npub"
    with path.open("wb") as file:
        file.write(header(name, size))
        file.truncate(BLOCK + size + 2 * BLOCK)
    with open_file(path) as (file_size, read_at):
        (entry,) = scan(read_at, file_size, path)
        assert (entry.name, entry.offset, entry.size) == (name, BLOCK, size)
    small = bytearray(header("oci-layout", 30))
    small[124:136] = b"\x80" + (30).to_bytes(11, "big")
    small[148:156] = b" " * 8
    small[148:156] = b"%06o\0 " % sum(small)
    assert "not in canonical form" in refuses(tmp_path / "bad.npub", bytes(small) + bytes(BLOCK * 3))
    assert header(name, 2**33 - 1)[124:136] == b"77777777777\0"


def test_what_is_no_bundle_at_all(tmp_path: Path) -> None:
    with pytest.raises(Error, match="No such file"):
        open_container(tmp_path / "none.npub", POLICY)
    with pytest.raises(Error, match="not a regular file"):
        open_container("/dev/null", POLICY)
    for data in (b"", b"hello", b"PK\x03\x04" + bytes(2000), bytes(100_000)):
        refuses(tmp_path / "bad.npub", data)


def test_a_header_is_what_tar_makes() -> None:
    info = tarfile.TarInfo("oci-layout")
    info.size = 30
    expected = info.tobuf(tarfile.USTAR_FORMAT)
    assert header("oci-layout", 30) == expected


def test_scan_reports_a_cut_in_the_padding(tmp_path: Path) -> None:
    path = tmp_path / "cut.npub"
    path.write_bytes(header("oci-layout", 30) + bytes(100))
    with open_file(path) as (size, read_at), pytest.raises(FormatError):
        list(scan(read_at, size, path))
