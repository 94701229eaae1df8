"""`npucc tune`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from npucc.cli import options as o
from npucc.cli.diagnose import PartOption, matching
from npucc.cli.request import Request, asks_for_a_step
from npucc.errors import UsageError

if TYPE_CHECKING:
    from npucc.targets.rngd import RngdTarget, Tactics
    from npucc.trials import Trial
    from npucc.tune import CutReport, PartReport, Report
    from npucc.tuning import Cost


@asks_for_a_step
def tune(
    request: Request,
    budget: Annotated[
        float, typer.Option("--budget", metavar="MINUTES", min=0, help="Time for the search; it ends in good order.")
    ] = 60,
    part: PartOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Tuning table to make or extend.")
    ] = Path("tuning-rngd.json"),
    jobs: o.JobsOption = 1,
    cache_dir: o.CacheOption = None,
    progress: o.ProgressOption = o.Style.AUTO,
    as_json: o.JsonOption = False,
) -> None:
    """Search the cut and the tactics that are estimated to be fastest, and record them in a tuning table.

    With --part, only tactics of these parts. What a table knows already is not searched again, but with --no-tuning it
    is. With --max-mm the cut stays as it says.
    """
    _check(request)
    tables = request.options.tables
    if tables is not None:  # the output may be of an earlier search that was ended, or be named before it is made
        tables = (*(table for table in tables if table != output), *([output] if output.exists() else ()))
    told = dataclasses.replace(request, options=dataclasses.replace(request.options, tables=tables))

    from npucc.progress import Progress
    from npucc.trials import Bench, Budget
    from npucc.tune import Search

    target = cast("RngdTarget", told.target(jobs))
    try:
        bench = Bench(target, o.cache(cache_dir), Progress(progress.value), Budget(60 * budget))
        search = Search(request.model(), request.what.recipe, bench, output)
        report = search.run(partial(matching, patterns=part) if part else None)
    finally:
        target.close()
    typer.echo(json.dumps(as_dict(report, output), indent=2) if as_json else as_text(report, output))


def _check(request: Request) -> None:
    """Before the long work."""
    if request.what.target != "rngd":
        raise UsageError(f"the target {request.what.target} has nothing to tune", remedy="add --target rngd")
    if request.options.tactic is not None or request.options.max_shapes is not None:
        raise UsageError("a search chooses tactics itself", remedy="leave --tactic and --max-shapes out")


def as_dict(report: Report, table: Path) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "table": str(table),
        "products_per_part": report.products,
        "cuts": [_cut_dict(cut) for cut in report.cuts],
        "cut_gain": report.cut_gain,
        "parts": [_part_dict(part) for part in report.parts],
        "cycles": report.cycles,
        "gain": report.gain,
    }


def _cut_dict(cut: CutReport) -> dict[str, Any]:
    return {
        "products_per_part": cut.products,
        "cycles": cut.cycles,
        "launches": cut.launches,
        "outcome": cut.outcome.value,
    }


def _part_dict(part: PartReport) -> dict[str, Any]:
    return {
        "name": part.name,
        "calls": part.calls,
        "known": part.known,
        "default": _cost_dict(part.default),
        "best": _cost_dict(part.best),
        "variant": None if part.tactics is None else _tactics_dict(part.tactics),
        "gain": part.gain,
        "trials": [_trial_dict(trial) for trial in part.trials],
    }


def _trial_dict(trial: Trial) -> dict[str, Any]:
    said = {"outcome": trial.outcome.value, "cost": _cost_dict(trial.cost), "text": trial.text}
    return _tactics_dict(trial.tactics) | said


def _tactics_dict(tactics: Tactics) -> dict[str, Any]:
    return {"tactic": tactics.hint, "max_shapes": tactics.max_shapes}


def _cost_dict(cost: Cost | None) -> dict[str, Any] | None:
    return None if cost is None else {"cycles": cost.cycles, "seconds": cost.seconds}


def as_text(report: Report, table: Path) -> str:
    """The report for people."""
    head = ("part", "calls", "cycles", "compile", "at best", "compile", "gain", "variant")
    rows = [head, *(_row(part) for part in report.parts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    if report.cuts:
        lines += ["", *map(_cut_line, report.cuts)]
    percent = 100 * report.gain / report.cycles if report.cycles else 0.0
    lines += [
        "",
        f"{report.gain:,} of {report.cycles:,} cycles per step less ({percent:.1f} %), by the vendor's estimate",
        f"layers in parts of at most {report.products} products{_saved(report)}",
        f"builds read it with --tuning {table}",
        *_unfinished(report),
    ]
    return "\n".join(lines)


def _saved(report: Report) -> str:
    return f", which takes {report.cut_gain:,} cycles per step less than the usual cut" if report.cut_gain else ""


def _row(part: PartReport) -> tuple[str, ...]:
    gain = "-"
    if part.default is not None and part.best is not None and part.default.cycles:
        gain = f"{100 * (1 - part.best.cycles / part.default.cycles):.1f} %"
    variant = "none compiles" if part.tactics is None else str(part.tactics)
    if part.known:
        variant += " (from a table)"
    return (part.name, str(part.calls), *_shown(part.default), *_shown(part.best), gain, variant)


def _shown(cost: Cost | None) -> tuple[str, str]:
    if cost is None:
        return "-", "-"
    return f"{cost.cycles:,}", "-" if cost.seconds is None else f"{cost.seconds:.1f}s"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Names to the left, numbers to the right."""
    last = len(row) - 1
    return [c.ljust(w) if i in {0, last} else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]


def _cut_line(cut: CutReport) -> str:
    cycles = cut.outcome.value if cut.cycles is None else f"{cut.cycles:,} cycles"
    return f"layers in parts of at most {cut.products} products: {cycles}, {cut.launches} launches per step"


def _unfinished(report: Report) -> list[str]:
    """What did not compile, took too long or was left, a line for each part."""
    lines = []
    for part in report.parts:
        for trial in part.trials:
            if trial.cost is None and trial.tactics not in part.untried:
                reason = trial.text.partition("\n")[0][:160]
                lines.append(f"{part.name}, {trial.tactics}: {trial.outcome.value}: {reason}")
        if part.untried:
            lines.append(f"{part.name}: not tried for want of time: {'; '.join(map(str, part.untried))}")
    return lines
