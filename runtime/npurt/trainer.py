"""Training from Python: one object that holds a bound bundle and runs steps, evaluations and saves."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np

from npubundle.errors import FileError, ResourceError
from npubundle.fields import Problems
from npubundle.program import Program
from npubundle.recipe import Recipe
from npurt import checkpoint, evaluation
from npurt.batches import Layout
from npurt.checkpoint import Checkpoint, RunState
from npurt.config import TrainConfig
from npurt.data import Pack, PackedDataset, load
from npurt.devices import OWN
from npurt.engine import Array, Engine, Float32, StateArrays, parameter_views, state_buffers
from npurt.errors import DivergedError, MismatchError, UsageError
from npurt.export import peft
from npurt.export.peft_reader import load_adapter
from npurt.optimizer_step import optimizer_step
from npurt.reports import EvalReport, StepReport
from npurt.stop import Stop, StoppedError

if TYPE_CHECKING:
    from npurt.bundle import Bundle
    from npurt.export.model import ModelReport

#: Rows of JSON Lines: one file, several, or loaded already.
Data: TypeAlias = str | Path | Sequence[str | Path] | PackedDataset

_log = logging.getLogger("npurt")


class Trainer:
    """Trains what a bundle trains, an adapter or the weights themselves, from the weights of a model folder.

        with Trainer(Bundle.open("llama.npub", trust="dev.pub"), weights="models/llama", config=config) as trainer:
            for report in trainer.fit("train.jsonl", eval_data="held.jsonl"):
                print(report)
            trainer.save_adapter("./adapter")

    A trainer stands between two optimizer steps whenever it is not inside a method, also after an exception: a step
    that fails leaves parameters and moments as they were. It is not for several threads at once, except `request_stop`.
    """

    def __init__(
        self,
        bundle: Bundle,
        weights: str | Path,
        config: TrainConfig | None = None,
        *,
        device: str = OWN,
        init_adapter: str | Path | None = None,
        planned_micro_steps: int | None = None,
        phases: Sequence[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Check the weights against the bundle, load them, and initialize the adapter.

        `device` is by default what the bundle was built for. `init_adapter` is the folder of a PEFT adapter to start
        from. `planned_micro_steps` is the length of the run, for `prepack="auto"`, where the configuration gives no
        number of steps. `phases` are loaded now, others when they first run; None: those of training. `progress` is
        called with (done, all) while loading.

        Raises `MismatchError` if weights or adapter do not fit the bundle, with all that does not fit; `DeviceError` if
        the device cannot take them. The bundle must stay open as long as the trainer.
        """
        from npurt.session import Session

        config = config or TrainConfig()
        if init_adapter is not None:
            _require_lora(bundle.config.recipe, "start from an adapter")
        if config.steps is not None:
            planned_micro_steps = config.steps * config.accum
        # Before the weights are loaded, which takes longer.
        start = None if init_adapter is None else _adapter(init_adapter, bundle.program(), bundle.config.recipe)
        session = Session.open(
            bundle,
            weights,
            device=device,
            prepack=config.prepack,
            threads=config.threads,
            expected_micro_steps=planned_micro_steps,
            phases=phases,
            progress=progress,
        )
        try:
            self._attach(session, weights, config, start)
        except BaseException:
            session.close()
            raise

    @classmethod
    def on(
        cls,
        engine: Engine,
        weights: str | Path,
        config: TrainConfig | None = None,
        *,
        init_adapter: str | Path | None = None,
    ) -> Trainer:
        """A trainer on an engine that is open already; `close` closes it. `weights` is the folder of the tokenizer.

        Raises `MismatchError` if the adapter does not fit; the engine is then left open.
        """
        if init_adapter is not None:
            _require_lora(engine.config.recipe, "start from an adapter")
        start = None if init_adapter is None else _adapter(init_adapter, engine.program, engine.config.recipe)
        trainer = cls.__new__(cls)
        trainer._attach(engine, weights, config or TrainConfig(), start)  # noqa: SLF001 -- of this very class
        return trainer

    def _attach(
        self, engine: Engine, weights: str | Path, config: TrainConfig, start: Mapping[str, Array] | None
    ) -> None:
        self._engine = engine
        self.weights = Path(weights)
        self.config = config
        self.layout = Layout.of(engine.program, engine.config.model.vocab_size)
        self.step = self.tokens = self.supervised_tokens = 0
        self.total_steps = config.steps
        self._views = parameter_views(engine.program)
        self._position: Mapping[str, str | int] | None = None
        self._series: dict[Path, checkpoint.Series] = {}
        self._stop = Stop()
        engine.init_parameters(config.seed)
        if start is not None:
            self.set_parameters(start)

    def __enter__(self) -> Self:
        """The trainer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Release memory and device."""
        self._engine.close()

    def request_stop(self) -> None:
        """Make `fit` end after the micro-step at hand; may be called from a signal handler or another thread.

        The optimizer step that it belongs to is given up, so that a checkpoint saved afterwards stands between two
        steps.
        """
        self._stop.request()

    @property
    def stopping(self) -> bool:
        """Whether `request_stop` was called."""
        return self._stop.requested

    # -- data ---------------------------------------------------------------------------------------------------------

    def load_data(self, data: Data) -> PackedDataset:
        """Load JSON Lines with the weights' tokenizer, the bundle's sequence length and the configuration's options."""
        if isinstance(data, PackedDataset):
            return data
        return load(data, self.weights, self.layout.seq_len, self.config.data_options())

    # -- training -----------------------------------------------------------------------------------------------------

    def train_step(self, packs: Sequence[Pack], *, lr: float | None = None) -> StepReport:
        """One optimizer step over these packs, for loops of one's own. `lr` takes the place of the schedule's rate.

        Raises `DivergedError` (nothing has changed then) and `DataError` if nothing is supervised.
        """
        return self._step(packs, lr, Stop())

    def fit(
        self, data: Data, *, eval_data: Data | None = None, save_to: str | Path | None = None
    ) -> Iterator[StepReport]:
        """Train to the end of the configured run, one report after each optimizer step.

        `eval_data` is evaluated every `eval_every` steps and after the last. `save_to` is the folder for checkpoints:
        every `save_every` steps, and one of the last good state should the run diverge. A checkpoint that cannot be
        written is reported (logger `npurt`) and does not end the run.

        Ends early, after the step at hand is given up, when `request_stop` is called. Raises `DivergedError`.
        """
        dataset = self.load_data(data)
        held_out = None if eval_data is None else self.load_data(eval_data)
        self.total_steps = total = self.config.total_steps(len(dataset))
        if self._position is not None:
            dataset.restore(self._position)
        self._position = dataset.state()
        while self.step < total and not self._stop.requested:
            packs = (dataset.next_pack() for _ in range(self.config.accum))
            try:
                report = self._step(packs, None, self._stop)
            except StoppedError:
                dataset.restore(self._position)
                return
            except DivergedError as error:
                dataset.restore(self._position)
                self._save_last_good(save_to, error)
                raise
            self._position = dataset.state()
            if held_out is not None and self._is_due(self.config.eval_every):
                with suppress(StoppedError):  # the step itself is done and reported
                    scores = evaluation.evaluate(self._engine, held_out, self.layout, self._stop)
                    report = dataclasses.replace(report, evaluation=scores)
            if save_to is not None and self.config.save_every and self.step % self.config.save_every == 0:
                self._save_periodic(save_to)
            yield report

    def _step(self, packs: Iterable[Pack], lr: float | None, stop: Stop) -> StepReport:
        rate = self._rate() if lr is None else lr
        report = optimizer_step(self._engine, self.layout, packs, self.config, step=self.step + 1, rate=rate, stop=stop)
        self.step = report.step
        self.tokens += report.tokens
        self.supervised_tokens += report.supervised_tokens
        return report

    def _rate(self) -> float:
        if self.total_steps is None:
            if self.config.schedule != "constant" or 0 < self.config.warmup < 1:
                raise UsageError(
                    "the learning rate depends on the number of steps, which is not known",
                    remedy="give TrainConfig(steps=...), or train_step(packs, lr=...)",
                )
            return self.config.learning_rates(self.step + 1).rate(self.step + 1)
        return self.config.learning_rates(self.total_steps).rate(self.step + 1)

    def _is_due(self, every: int) -> bool:
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, data: Data) -> EvalReport:
        """Mean loss, perplexity and accuracy over all supervised tokens of the data."""
        return evaluation.evaluate(self._engine, self.load_data(data), self.layout, Stop())

    def logprobs(self, pack: Pack) -> Float32:
        """The log-probability of every label of a pack, f32 (S,) in nats; NaN where the pack has no label."""
        return evaluation.token_logprobs(self._engine, pack, self.layout)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Float32]:
        """Copies of all trained tensors by the names under which they are exported."""
        return {name: self._engine.read(view) for name, view in self._views.items()}

    def set_parameters(self, tensors: Mapping[str, Array]) -> None:
        """Replace trained tensors, all or some; AdamW's moments stay.

        Raises `MismatchError` for unknown names, other shapes and values that are not finite; nothing is replaced then.
        """
        problems = Problems()
        for name, values in tensors.items():
            if name not in self._views:
                problems.add(name, "is not a trained tensor of the bundle")
            elif values.shape != (shape := self._engine.program.buffers[self._views[name]].type.shape):
                problems.add(name, f"has shape {list(values.shape)}, the bundle needs {list(shape)}")
            elif not np.isfinite(values).all():
                problems.add(name, "has values that are not finite")
        problems.raise_any("the parameters do not fit the bundle", MismatchError)
        self._series.clear()  # what was saved of this step is no longer its state
        for name, values in tensors.items():
            self._engine.write(self._views[name], np.ascontiguousarray(values, dtype=np.float32))
        self._parameters_written()

    def _parameters_written(self) -> None:
        """Where a device has copies of parameters, they are made anew."""
        if "upload" in self._engine.program.phases:
            self._engine.run("upload")

    # -- saving -------------------------------------------------------------------------------------------------------

    def save_adapter(self, folder: str | Path, *, keep: Iterable[Path] = ()) -> Path:
        """Write a PEFT adapter into `folder` and return it.

        An earlier adapter there is replaced. Raises `FileError` for a folder with other files (but those of `keep`),
        `DivergedError` if a value is not finite, and `ResourceError` when the disk is full. `UsageError` where the
        bundle trains the weights themselves: `save_model` is for those.
        """
        _require_lora(self._engine.config.recipe, "save an adapter")
        return peft.save_adapter(Path(folder), self.parameters(), self._card(), keep=keep)

    def save_model(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        max_shard_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> ModelReport:
        """Write the trained model into the new `folder`: the base model's with the trained weights in place of its own.

        Each tensor has its dtype and its file, but for `dtype` and `max_shard_size`, see
        `npurt.export.model.save_model`. `progress` is called with (done, all), in tensors. Raises `UsageError` where
        the bundle trains an adapter, and what `save_model` there raises.
        """
        from npurt.export.model import save_model
        from npurt.weights import Checkpoint as Weights

        if not self._engine.config.recipe.full:
            raise UsageError(
                "the bundle trains an adapter, not the weights",
                remedy="use save_adapter, and npurt.merge to make a model of it",
            )
        trained = {name: functools.partial(self._values, view) for name, view in self._views.items()}
        base = Weights.open(self.weights)
        return save_model(folder, base, trained, dtype=dtype, max_shard_size=max_shard_size, progress=progress)

    def _values(self, view: str) -> Iterator[Float32]:
        yield self._engine.read(view)

    def save_checkpoint(self, folder: str | Path) -> Path:
        """Write `folder/checkpoint-STEP`, from which `restore` continues bit for bit, and return it.

        Of the checkpoints that this trainer wrote there, the newest `keep_checkpoints` stay. A step that is saved
        already is not saved again. Raises as `save_adapter` does; earlier checkpoints are untouched then.
        """
        series = checkpoint.Series(Path(folder), self.config.keep_checkpoints)
        series = self._series.setdefault(series.folder.absolute(), series)
        return series.save(self._snapshot(), self._adapter_files())

    def restore(self, path: str | Path) -> None:
        """Take over a checkpoint: parameters, moments, step and counts; the next `fit` continues at its data position.

        Raises `MismatchError` if it belongs to another bundle, and `IntegrityError` if it was altered.
        """
        saved = checkpoint.load(Path(path))
        problems = Problems()
        if saved.state.manifest_digest != self._engine.manifest_digest:
            problems.add("bundle", f"is {saved.state.manifest_digest}, this is {self._engine.manifest_digest}")
        for name in state_buffers(self._engine.program):
            shape = self._engine.program.buffers[name].type.shape
            if name not in saved.arrays or saved.arrays[name].shape != shape:
                problems.add(name, f"is missing or not of shape {list(shape)}")
        problems.raise_any("the checkpoint does not belong to this bundle", MismatchError, where=str(path))
        for name in state_buffers(self._engine.program):
            self._engine.write(name, saved.arrays[name])
        self._parameters_written()
        self.step, self.total_steps = saved.state.step, saved.state.total_steps
        self.tokens, self.supervised_tokens = saved.state.tokens, saved.state.supervised_tokens
        self._position = saved.state.data

    def _snapshot(self) -> Checkpoint:
        state = RunState(
            step=self.step,
            total_steps=self.total_steps or 0,
            supervised_tokens=self.supervised_tokens,
            tokens=self.tokens,
            manifest_digest=self._engine.manifest_digest,
            config=self.config,
            data=self._position,
        )
        return Checkpoint(state, StateArrays(self._engine))

    def _card(self) -> peft.AdapterCard:
        recipe = self._engine.config.recipe
        return peft.AdapterCard.of(self._views, rank=recipe.rank, alpha=recipe.alpha, base=str(self.weights))

    def _adapter_files(self) -> dict[str, bytes]:
        """What a checkpoint has for other tools; weights are exported at the end, or by hand."""
        if self._engine.config.recipe.full:
            return {}
        return peft.adapter_files(self.parameters(), self._card())

    def _save_periodic(self, folder: str | Path) -> None:
        try:
            self.save_checkpoint(folder)
        except (FileError, ResourceError) as error:
            _log.warning("step %d is not saved: %s", self.step, error)

    def _save_last_good(self, folder: str | Path | None, reason: DivergedError) -> None:
        """Keep what was trained before the step that diverged, if it is any good."""
        if folder is None or self.step == 0:
            return
        try:
            path = self.save_checkpoint(folder)
        except (DivergedError, FileError, ResourceError) as error:
            _log.warning("the state before step %d is not saved: %s", self.step + 1, error)
            return
        reason.remedy = f"{reason.remedy}; the state before step {self.step + 1} is in {path}"


def _require_lora(recipe: Recipe, doing: str) -> None:
    if recipe.full:
        raise UsageError(
            f"cannot {doing}: the bundle trains the weights themselves",
            remedy="use a bundle built with --mode lora, or Trainer.save_model",
        )


def _adapter(folder: str | Path, program: Program, recipe: Recipe) -> dict[str, Float32]:
    """The matrices of a PEFT adapter that fits the program."""
    shapes = {name: program.buffers[view].type.shape for name, view in parameter_views(program).items()}
    return load_adapter(Path(folder), recipe, shapes)
