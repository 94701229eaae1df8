"""`npurt train`."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npubundle.errors import Error, Problem
from npurt.cli import common
from npurt.cli.options import Option, Settings
from npurt.cli.tables import TRAIN
from npurt.config import TrainConfig
from npurt.errors import UsageError
from npurt.metrics import RunLog, versions
from npurt.progress import Progress
from npurt.signals import Signals

if TYPE_CHECKING:
    from npurt.bundle import Bundle
    from npurt.data import PackedDataset
    from npurt.output_folder import OutputFolder
    from npurt.reports import StepReport
    from npurt.trainer import Trainer


#: Where a whole model goes, in the folder of `--out`, beside checkpoints.
MODEL = "model"


@dataclass(frozen=True, slots=True)
class _Run:
    """What the parts of a run share."""

    config: TrainConfig
    progress: Progress
    output: common.Output
    log: RunLog
    signals: Signals


def run(settings: Settings, signals: Signals) -> int:
    """Train; returns the exit code."""
    config = train_config(settings)
    progress = common.make_progress(settings, signals, log_every=config.log_every)
    output = common.Output(as_json=settings["json"], progress=progress)
    with ExitStack() as stack:
        bundle = stack.enter_context(common.open_bundle(settings, progress))
        folder = None if settings["dry_run"] else stack.enter_context(_output_folder(settings, bundle))
        opening = stack.enter_context(
            common.TrainerOpening(settings, bundle, config, init_adapter=settings["init_adapter"])
        )
        if folder is not None and config.steps is not None:  # otherwise the length of the run depends on the data
            opening.start(config.steps * config.accum)
        dataset = common.load_data(settings["data"], settings, progress, bundle, config.data_options())
        held_out = None
        if settings["eval_data"]:
            held_out = common.load_data(settings["eval_data"], settings, progress, bundle, config.data_options())
        total = config.total_steps(len(dataset))
        _show_data(progress, bundle, dataset, held_out, config, total)
        if folder is None:
            output.emit({"event": "end", "status": "dry-run", "total_steps": total, "data": dataset.counts.as_dict()})
            return 0
        log = stack.enter_context(RunLog(settings.path("log_file")))
        stack.enter_context(_warnings_to(progress, log))
        if log.is_open:
            log.write("run", _header(settings, config, bundle, dataset, total))
        opening.start(total * config.accum)
        trainer = opening.finish(progress)
        folder.clear_earlier()
        shared = _Run(config, progress, output, log, signals)
        with signals.finishing_with(trainer.request_stop):
            return _train(shared, trainer, dataset, held_out, folder)


def train_config(settings: Settings) -> TrainConfig:
    """The configuration that the options give. Raises `UsageError` that names each value's flag, variable or key."""
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    options: dict[str, Option] = {o.field or o.key: o for group in TRAIN.values() for o in group}
    chosen = {name: option for name, option in options.items() if name in fields}
    try:
        return TrainConfig(**{name: settings[option.key] for name, option in chosen.items()})
    except UsageError as error:
        problems = [Problem(settings.place(chosen[p.where].key), p.what) for p in error.problems]
        raise UsageError(error.what, problems=problems, remedy="npurt train --help") from error


def _output_folder(settings: Settings, bundle: Bundle) -> OutputFolder:
    from npurt.output_folder import OutputFolder

    log_file = settings.path("log_file")
    return OutputFolder(
        Path(settings["out"]),
        overwrite=settings["overwrite"],
        keep=[log_file] if log_file else [],
        # Parameters, gradients and moments: more than a checkpoint holds.
        needed=bundle.config.memory.state,
        model=MODEL if bundle.config.recipe.full else None,
    )


def _show_data(
    progress: Progress,
    bundle: Bundle,
    dataset: PackedDataset,
    held_out: PackedDataset | None,
    config: TrainConfig,
    total: int,
) -> None:
    from npurt.export.vllm import rank_note

    progress.note(dataset.preview(color=progress.color))
    for note in dataset.notes:
        progress.note(f"  dropped {note}")
    if held_out is not None:
        progress.note(f"held out: {held_out.counts}")
    epochs = total * config.accum / len(dataset)
    sequences = f"{config.accum:,} sequence{'s' if config.accum > 1 else ''}"
    steps = f"{total:,} step{'s' if total > 1 else ''}"
    progress.note(f"{steps} of {sequences}, {epochs:.2f} passes over the data")
    if not bundle.config.recipe.full and (advice := rank_note(bundle.config.recipe.rank)):
        progress.warn(advice)


def _header(
    settings: Settings, config: TrainConfig, bundle: Bundle, dataset: PackedDataset, total: int
) -> dict[str, Any]:
    from npurt.devices import device_for

    return {
        "bundle": {
            "path": settings["bundle"],
            "name": bundle.config.name,
            "digest": bundle.manifest_digest,
            "target": bundle.config.target.name,
            "recipe": bundle.config.recipe.to_dict(),
        },
        "weights": settings["weights"],
        "init_adapter": settings["init_adapter"],
        "data": {"files": list(settings["data"]), "digest": dataset.digest} | dataset.counts.as_dict(),
        "eval_data": list(settings["eval_data"]),
        "config": config.to_dict(),
        "total_steps": total,
        "device": device_for(bundle.config.target.name, settings["device"]),
        "versions": versions(),
    }


def _train(
    run: _Run, trainer: Trainer, dataset: PackedDataset, held_out: PackedDataset | None, folder: OutputFolder
) -> int:
    started = time.monotonic()
    total = run.config.total_steps(len(dataset))
    last: StepReport | None = None
    try:
        with run.progress.training(total):
            for last in trainer.fit(dataset, eval_data=held_out, save_to=folder.path):
                _tell(run, last)
        stopped = trainer.step < total
        if folder.model is None:
            # The adapter first: it is the smaller of the two, and what most people came for.
            trainer.save_adapter(folder.path, keep=folder.keep)
        checkpoint = trainer.save_checkpoint(folder.path) if stopped or run.config.save_every else None
        if folder.model is not None:
            with run.progress.phase("export", str(folder.model)) as advance:
                trainer.save_model(folder.model, progress=advance)
    except Error as error:
        run.log.write("end", {"status": error.code, "steps": trainer.step, "error": error.as_dict()})
        raise
    end = {
        "status": "stopped" if stopped else "finished",
        "steps": trainer.step,
        "total_steps": total,
        "loss": last.loss if last else None,
        "evaluation": last.evaluation.to_dict() if last and last.evaluation else None,
        "tokens": trainer.tokens,
        "supervised_tokens": trainer.supervised_tokens,
        "seconds": round(time.monotonic() - started, 3),
        **({"model": str(folder.model)} if folder.model else {"adapter": str(folder.path)}),
        "checkpoint": str(checkpoint) if checkpoint else None,
    }
    run.log.write("end", end)
    run.progress.note(_closing_line(run, trainer, last, checkpoint))
    run.output.result(str(folder.model or folder.path), {"event": "end"} | end)
    return int(run.signals.exit_code) if stopped else 0


def _closing_line(run: _Run, trainer: Trainer, last: StepReport | None, checkpoint: Path | None) -> str:
    reached = f"{trainer.step:,} of {trainer.total_steps or 0:,} steps" + (f", loss {last.loss:.4f}" if last else "")
    kept = f"; state in {checkpoint}" if checkpoint else ""
    ended = f"stopped by {run.signals.received.name}" if run.signals.received else "finished"
    return f"{ended}: {reached}{kept}"


def _tell(run: _Run, report: StepReport) -> None:
    run.progress.step(report)
    run.output.emit({"event": "step"} | report.to_dict())
    run.log.step(report)


@contextmanager
def _warnings_to(progress: Progress, log: RunLog) -> Iterator[None]:
    """Show and log what the library warns about while training."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            progress.warn(record.getMessage())
            log.write("warning", {"text": record.getMessage()})

    logger, handler = logging.getLogger("npurt"), Handler(logging.WARNING)
    log.on_fault = progress.warn
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
