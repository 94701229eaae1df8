"""`npucc keygen`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from npubundle import keys
from npucc.errors import UsageError


class Kind(Enum):
    """Kinds of keys."""

    ED25519 = "ed25519"
    ECDSA_P256 = "ecdsa-p256"


def keygen(
    out: Annotated[
        Path, typer.Option("--out", metavar="KEY", help="Private key to write; the public one goes to KEY.pub.")
    ],
    kind: Annotated[Kind, typer.Option("--kind", help="Ed25519 signs equal bundles to equal files.")] = Kind.ED25519,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Encrypt the private key with the passphrase in NPUCC_KEY_PASSPHRASE.")
    ] = False,
) -> None:
    """Make a key pair. Existing files are never overwritten."""
    passphrase = keys.passphrase_from_environment() if encrypt else None
    if encrypt and not passphrase:
        raise UsageError("--encrypt needs a passphrase", remedy="set NPUCC_KEY_PASSPHRASE; npucc never asks for one")
    private, public = keys.save(keys.generate(kind.value), out, passphrase)
    typer.echo(f"{private}\n{public}")
