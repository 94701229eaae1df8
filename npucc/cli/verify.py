"""`npucc verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from npubundle.config import BundleConfig
from npubundle.container import open_container
from npucc.cli import options as o


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="An .npub file or an OCI layout folder.")],
    trust: o.TrustOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Check signatures against the trust policy, and every byte against its digest. Exit 5 if anything is amiss."""
    with open_container(bundle, o.policy(trust)) as opened:
        config = BundleConfig.of(opened)
        document = {"name": config.name, "digest": opened.manifest_digest, "verified": o.show_verdict(opened.verdict)}
        verdict, blobs = opened.verdict, len(opened.blobs)
    signers = (
        f"signed by {', '.join(verdict.signers)}"
        if verdict.trusted
        else "not trusted: " + "; ".join(f.what for f in verdict.findings)
    )
    typer.echo(json.dumps(document) if as_json else f"{document['digest']}  {signers}; {blobs} blobs intact")
