"""`npucc build`."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from npubundle import container
from npubundle.keys import PrivateKey, exposure
from npucc import signals
from npucc.cli import options as o
from npucc.cli.request import Request, asks_for_a_step


@asks_for_a_step
def build(
    request: Request,
    key: Annotated[Path | None, typer.Option("--key", metavar="KEY", help="Private key to sign with.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT", help="An .npub file, or an OCI layout folder.  [default: NAME.npub]"
        ),
    ] = None,
    dump: Annotated[
        Path | None, typer.Option("--dump", metavar="DIR", help="Write every stage as text and ONNX.")
    ] = None,
    jobs: o.JobsOption = 1,
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="rngd: keep the graphs that rngd-sim and checks run.")
    ] = True,
    cache_dir: o.CacheOption = None,
    progress: o.ProgressOption = o.Style.AUTO,
    as_json: o.JsonOption = False,
) -> None:
    """Compile a training step into a bundle, check every part, and sign it."""
    started = time.monotonic()
    # Before the long work: a wrong passphrase or a missing folder should not cost an hour.
    signer = PrivateKey.load(key) if key else None
    if output:
        container.check_target(output)

    from npucc import build as builder
    from npucc.dump import write_dump
    from npucc.progress import Progress

    show = Progress(progress.value)
    if key and (warning := exposure(key)):
        show.note(f"warning: {warning}")
    if signer is None:
        show.note(
            "warning: without --key the bundle is unsigned, and a device host refuses it under the default policy"
        )
    chosen = request.target(jobs)
    try:
        result = builder.build(
            request.model(),
            request.what.recipe,
            chosen,
            o.cache(cache_dir),
            show,
            name=request.what.name,
            signer=signer,
            graphs=graphs,
            on_lowered=partial(write_dump, dump) if dump else None,
        )
    finally:
        chosen.close()
    path = output or Path(f"{result.config.name}.npub")
    signals.check()  # after this the bundle may be in place, and stays
    container.write(path, result.content)
    total = result.compiled + result.cached
    seconds = time.monotonic() - started
    show.note(f"{total}/{total} parts, {100 * result.cached // total} % cached, {seconds:.1f}s")
    digest = result.content.manifest_digest
    found = result.estimate.to_dict() if result.estimate else None
    for line in o.estimate_lines(found):
        show.note(line)
    if as_json:
        document = {
            "bundle": str(path), "digest": digest, "name": result.config.name, "signed": signer is not None,
            "parts": total, "compiled": result.compiled, "cached": result.cached,
            "memory_peak": result.config.memory.peak, "seconds": round(seconds, 3),
            "estimate": found,
        }  # fmt: skip
        typer.echo(json.dumps(document))
    else:
        typer.echo(f"{digest}  {path}")
