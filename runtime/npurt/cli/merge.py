"""`npurt merge`."""

from __future__ import annotations

from npurt.cli import common
from npurt.cli.options import Settings
from npurt.signals import Signals


def run(settings: Settings, signals: Signals) -> int:
    """Merge an adapter into its base model; returns the exit code."""
    from npurt.export.merge import merge

    progress = common.make_progress(settings, signals)
    output = common.Output(as_json=settings["json"], progress=progress)
    with progress.phase("merge", f"{settings['adapter']} into {settings['weights']}") as advance:
        report = merge(
            settings["weights"],
            settings["adapter"],
            settings["out"],
            dtype=settings["dtype"],
            max_shard_size=settings["max_shard_size"],
            progress=advance,
        )
    for note in report.notes:
        progress.note(note)
    progress.note(str(report))
    output.result(str(report.folder), report.to_dict())
    return 0
