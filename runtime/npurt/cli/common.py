"""What several commands do: show progress, print results, open the bundle, load data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npurt.cli.options import Settings
from npurt.config import TrainConfig
from npurt.errors import MismatchError
from npurt.progress import Progress

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


def make_progress(settings: Settings, *, log_every: int = 1) -> Progress:
    """The progress display; on a terminal that shows JSON already, none unless asked for."""
    style = settings["progress"]
    if style == "auto" and settings["json"] and sys.stdout.isatty():
        style = "quiet"
    return Progress(style, sys.stderr, log_every=log_every)


def open_bundle(settings: Settings, progress: Progress) -> Bundle:
    """Verify and open the bundle."""
    from npubundle.trust import TrustPolicy
    from npurt.bundle import Bundle

    with progress.phase("bundle", settings["bundle"]):
        bundle = Bundle.open(settings["bundle"], trust=TrustPolicy.from_paths(settings["trust"]))
    for warning in bundle.warnings:
        progress.warn(f"the bundle is not trusted: {warning}")
    return bundle


@contextmanager
def open_trainer(
    settings: Settings, progress: Progress, bundle: Bundle, config: TrainConfig, **keywords: Any
) -> Iterator[Trainer]:
    """Bind the weights."""
    from npurt.trainer import Trainer

    with progress.phase("weights", settings["weights"]) as advance:
        trainer = Trainer(bundle, settings["weights"], config, device=settings["device"], progress=advance, **keywords)
    with trainer:
        yield trainer


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
