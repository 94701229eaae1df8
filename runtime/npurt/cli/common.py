"""What several commands do: show progress, print results, open the bundle, load data."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from npurt.background import Advance, Background
from npurt.cli.options import Settings
from npurt.config import TrainConfig
from npurt.errors import MismatchError
from npurt.progress import Progress
from npurt.signals import Signals

if TYPE_CHECKING:
    from npurt.bundle import Bundle
    from npurt.data import DataOptions, PackedDataset
    from npurt.trainer import Trainer


class Output:
    """Standard output: results for people, or with --json objects for programs.

    A reader that goes away (`| head`) does not end the work: what matters is in files.
    """

    def __init__(self, *, as_json: bool, progress: Progress) -> None:
        self._as_json = as_json
        self._progress = progress
        self._read = True

    def emit(self, event: Mapping[str, Any]) -> None:
        """Print an object, with --json only."""
        if self._as_json:
            self._print(json.dumps(event, ensure_ascii=False))

    def result(self, text: str, event: Mapping[str, Any]) -> None:
        """Print the outcome: a text, or with --json an object."""
        self._print(json.dumps(event, ensure_ascii=False) if self._as_json else text)

    def _print(self, line: str) -> None:
        if not self._read:
            return
        try:
            print(line, flush=True)
        except BrokenPipeError:
            self._read = False
            sys.stdout = open("/dev/null", "w")  # noqa: SIM115, PTH123 -- open until the process ends
            self._progress.warn("nobody reads standard output any more; going on without it")


def make_progress(settings: Settings, signals: Signals, *, log_every: int = 1) -> Progress:
    """The progress display; on a terminal that shows JSON already, none unless asked for."""
    style = settings["progress"]
    if style == "auto" and settings["json"] and sys.stdout.isatty():
        style = "quiet"
    return Progress(style, sys.stderr, log_every=log_every, check=signals.check)


def open_bundle(settings: Settings, progress: Progress) -> Bundle:
    """Verify and open the bundle, and say so if the CPU stands in for the device that it was built for."""
    from npubundle.trust import TrustPolicy
    from npurt.bundle import Bundle
    from npurt.devices import HOST

    with progress.phase("bundle", settings["bundle"]):
        bundle = Bundle.open(settings["bundle"], trust=TrustPolicy.from_paths(settings["trust"]))
    for warning in bundle.warnings:
        progress.warn(f"the bundle is not trusted: {warning}")
    if settings["device"] == HOST != (target := bundle.config.target.name):
        progress.note(f"the bundle was built for {target}; this CPU computes its parts, from their ONNX forms")
    return bundle


class TrainerOpening:
    """Binds the weights in a thread, so that data can be read meanwhile. Closes the trainer when the block ends."""

    def __init__(self, settings: Settings, bundle: Bundle, config: TrainConfig, **keywords: Any) -> None:
        self._settings = settings
        self._bundle = bundle
        self._config = config
        self._keywords = keywords
        self._work: Background[Trainer] | None = None

    def start(self, planned_micro_steps: int) -> None:
        """Begin, unless that has been done."""
        # Here and not in the thread: a signal that interrupts an import here must not find the thread waiting for it.
        import npurt.session
        import npurt.trainer  # noqa: F401

        if self._work is None:
            open_it = functools.partial(self._open, planned_micro_steps)
            self._work = Background(open_it, "open-trainer")

    def finish(self, progress: Progress) -> Trainer:
        """The trainer, as soon as it is there. Raises what opening it raised."""
        if self._work is None:
            raise RuntimeError("it was not started")
        with progress.phase("weights", self._settings["weights"]) as advance:
            return self._work.result(advance)

    def _open(self, planned_micro_steps: int, advance: Advance) -> Trainer:
        from npurt.trainer import Trainer

        return Trainer(
            self._bundle,
            self._settings["weights"],
            self._config,
            device=self._settings["device"],
            planned_micro_steps=planned_micro_steps,
            progress=advance,
            **self._keywords,
        )

    def __enter__(self) -> Self:
        """Nothing is started yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what is not finished, and close the trainer."""
        trainer = self._work.give_up() if self._work is not None else None
        if trainer is not None:
            trainer.close()


def load_data(
    paths: Sequence[str], settings: Settings, progress: Progress, bundle: Bundle, options: DataOptions
) -> PackedDataset:
    """Read, tokenize and pack rows, and check that the model has every token."""
    from npurt.data import load

    with progress.phase("data", ", ".join(paths)):
        dataset = load(paths, settings["weights"], bundle.config.recipe.seq_len, options)
    vocabulary = bundle.config.model.vocab_size
    if dataset.largest_token >= vocabulary:
        raise MismatchError(
            f"the tokenizer makes token {dataset.largest_token}, the model's vocabulary has {vocabulary}",
            where=str(Path(settings["weights"]) / "tokenizer.json"),
            remedy="take tokenizer and weights from the same release of the model",
        )
    return dataset
