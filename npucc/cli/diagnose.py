"""`npucc diagnose`."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npubundle.errors import ExitCode
from npucc.cli import options as o
from npucc.cli.request import Request, asks_for_a_step
from npucc.errors import UsageError

if TYPE_CHECKING:
    from npucc.build import Lowered
    from npucc.diagnose import Finding
    from npucc.parts import PartSpec

PartOption = Annotated[
    list[str] | None,
    typer.Option("--part", metavar="PATTERN", help="Only parts of this name (* is any text); may be given again."),
]


@asks_for_a_step
def diagnose(
    request: Request,
    part: PartOption = None,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="S", min=0, help="Time for the search in a part that does not compile."),
    ] = 600,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Examine all parts, also after one that is wrong.")
    ] = False,
    dump: Annotated[
        Path | None, typer.Option("--dump", metavar="DIR", help="Write the smallest graph that still goes wrong.")
    ] = None,
    cache_dir: o.CacheOption = None,
    progress: o.ProgressOption = o.Style.AUTO,
    as_json: o.JsonOption = False,
) -> None:
    """Find the first part that does not compile or computes wrong results, and its first node at fault.

    Exits with 3 if a part does not compile, with 1 if one is wrong, and with 0 otherwise.
    """
    from npucc import build as builder
    from npucc.diagnose import examine, examine_compiled
    from npucc.parts import samplers
    from npucc.progress import Progress

    show = Progress(progress.value)
    chosen = request.target()
    findings: list[Finding] = []
    try:
        lowered = builder.lower(request.model(), request.what.recipe, chosen)
        cache = o.cache(cache_dir)
        inputs = samplers(lowered.traced)
        for spec in chosen_parts(lowered, part):
            target = lowered.target_of(spec.name)
            known = cache.get(lowered.identities[spec.name])
            with show.step(spec.name.split(".")[0], spec.name):
                found = (
                    examine(spec.graph, target, inputs, seconds)
                    if known is None
                    else examine_compiled(spec.graph, known.part, target, inputs)
                )
            if found is not None:
                findings.append(found)
                if not keep_going:
                    break
    finally:
        chosen.close()
    if dump:
        _write(dump, findings)
    if as_json:
        typer.echo(json.dumps({"findings": [_plain(found) for found in findings]}, indent=2))
    else:
        typer.echo("\n".join(map(str, findings)) or "every part compiles and computes what its graph says")
    if findings:
        refused = any(found.kind == "refused" for found in findings)
        raise typer.Exit(int(ExitCode.UNSUPPORTED if refused else ExitCode.FIXABLE))


def chosen_parts(lowered: Lowered, patterns: list[str] | None) -> list[PartSpec]:
    """Parts in the order in which the programs first call them. Raises UsageError for a pattern that matches none."""
    order: dict[str, None] = {}
    for program in lowered.programs.values():
        for phase in program.phases:
            order.update(dict.fromkeys(call.part for call in program.calls(phase)))
    return [lowered.traced.parts[name] for name in matching(order, patterns)]


def matching(names: Collection[str], patterns: Sequence[str] | None) -> list[str]:
    """Names that match any of the patterns; all of them without one. Raises UsageError for one that matches none."""
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"no part is called {pattern}", remedy=f"parts are {', '.join(sorted(names))}")
    return [name for name in names if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]


def _plain(found: Finding) -> dict[str, Any]:
    node = found.node
    return {
        "part": found.part,
        "kind": found.kind,
        "text": found.text,
        "node": None
        if node is None
        else {"name": node.name, "op": node.op, "type": str(node.type), "source": node.source},
        "nodes": len(found.graph.nodes),
    }


def _write(folder: Path, findings: list[Finding]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for found in findings:
        (folder / f"{found.part}.txt").write_text(found.graph.as_text(), encoding="utf-8")
        (folder / f"{found.part}.json").write_bytes(found.graph.encode())
