"""The reference pages agree with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from npubundle import archive, canonical, content, keys, oci
from npubundle.dsse import Envelope
from npubundle.oci import Manifest, Referrer
from npubundle.statement import PAYLOAD_TYPE, BundleClaim, Statement
from npubundle.trust import TrustPolicy
from npubundle.verdict import Reason
from npubundle.version import FORMAT_VERSION
from tests.npubundle.samples import key

DOCS = Path(__file__).parents[2] / "docs" / "reference"
FORMAT = (DOCS / "bundle-format.md").read_text()
POLICY = (DOCS / "trust-policy.md").read_text()


def example(name: str) -> bytes:
    """The JSON example of this name, in canonical form."""
    found = re.search(rf"```{{\.json #example-{name}}}\n(.*?)```", FORMAT, re.DOTALL)
    assert found, name
    return canonical.encode(json.loads(found[1]))


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its head."""
    rows = re.search(rf"^#+ {heading}$.*?((?:^\|[^\n]*\n)+)", page, re.DOTALL | re.MULTILINE)
    assert rows, heading
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].splitlines()[2:]]


@pytest.mark.parametrize(("name", "document"), [("manifest", Manifest), ("signature", Referrer)])
def test_example_manifests(name: str, document: Any) -> None:
    assert document.decode(example(name)).encode() == example(name)


def test_example_statement() -> None:
    statement = Statement.decode(Envelope(PAYLOAD_TYPE, example("statement"), ()))
    assert BundleClaim.from_statement(statement) == BundleClaim(FORMAT_VERSION, oci.BUNDLE_TYPE)


def test_media_types() -> None:
    written = {row[0].strip("`"): row[1].strip("`") for row in table(FORMAT, "Media types")}
    constants = {name: value for name, value in vars(oci).items() if re.fullmatch(r"[A-Z]+(_MEDIA)?_TYPE", name)}
    constants.pop("PREDICATE_TYPE")
    assert written == constants


def test_limits() -> None:
    sizes = {row[0]: row[1] for row in table(FORMAT, "Limits")}
    assert sizes == {
        "index.json, index": f"{oci.MAX_INDEX >> 10} KiB",
        "signatures and attestations together": str(oci.MAX_REFERRERS),
        "signature or attestation manifest": f"{oci.MAX_REFERRER >> 10} KiB",
        "envelope of a signature": f"{content.MAX_ENVELOPE[oci.SIGNATURE_TYPE] >> 10} KiB",
        "envelope of an attestation": f"{content.MAX_ENVELOPE[oci.ATTESTATION_TYPE] >> 20} MiB",
        "bundle manifest": f"{oci.MAX_MANIFEST >> 20} MiB",
        "bundle.json": f"{content.MAX_CONFIG >> 20} MiB",
        "entries of an archive": f"{archive.MAX_ENTRIES:,}".replace(",", " "),
    }


def test_history_of_the_format() -> None:
    assert [int(row[0]) for row in table(FORMAT, "Versions")] == list(range(1, FORMAT_VERSION + 1))


def test_the_example_policy_is_read(tmp_path: Path) -> None:
    source = re.search(r"```toml\n(.*?)```", POLICY, re.DOTALL)
    assert source
    (tmp_path / "trust.toml").write_text(source[1])
    (tmp_path / "keys").mkdir()
    for name in ("build-farm", "release-2024"):
        keys.save(key(name), tmp_path / "keys" / name)
    policy = TrustPolicy.load(tmp_path / "trust.toml")
    assert [k.name for k in policy.keys] == ["build-farm", "release", "release-2024"]
    assert [rule.threshold for rule in policy.rules] == [2, 1]


def test_every_reason_is_explained() -> None:
    assert [row[0].strip("`") for row in table(POLICY, "What can be wrong")] == [reason.value for reason in Reason]
