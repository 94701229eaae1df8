"""`npucc verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from npubundle import verification
from npucc.cli import options as o


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="An .npub file or an OCI layout folder.")],
    trust: o.TrustOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Check signatures against the trust policy, and every byte against its digest. Exit 5 if anything is amiss."""
    verified = verification.verify(bundle, o.policy(trust))
    typer.echo(json.dumps(verified.to_dict()) if as_json else str(verified))
