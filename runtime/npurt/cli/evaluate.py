"""`npurt eval`."""

from __future__ import annotations

from contextlib import ExitStack

from npurt.cli import common
from npurt.cli.options import Settings
from npurt.config import TrainConfig
from npurt.signals import Signals


def run(settings: Settings, signals: Signals) -> int:
    """Evaluate; returns the exit code."""
    config = TrainConfig(
        template=settings["template"],
        loss_on=settings["loss_on"],
        overlong=settings["overlong"],
        pack=settings["pack"],
        prepack=settings["prepack"],
        threads=settings["threads"],
    )
    progress = common.make_progress(settings, signals)
    output = common.Output(as_json=settings["json"], progress=progress)
    with ExitStack() as stack:
        bundle = stack.enter_context(common.open_bundle(settings, progress))
        dataset = common.load_data(settings["data"], settings, progress, bundle, config.data_options())
        progress.note(dataset.preview(color=progress.color))
        opening = stack.enter_context(
            common.TrainerOpening(settings, bundle, config, init_adapter=settings["adapter"], phases=["evaluate"])
        )
        opening.start(len(dataset))
        trainer = opening.finish(progress)
        with progress.phase("eval", f"{len(dataset):,} sequences"):
            report = trainer.evaluate(dataset)
    output.result(str(report), report.to_dict() | {"adapter": settings["adapter"], "data": dataset.counts.as_dict()})
    return 0
