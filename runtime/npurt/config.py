"""What can be chosen about a training run without another bundle, and the checks on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from npubundle.fields import Problems
from npurt.errors import UsageError
from npurt.schedule import Schedule, ScheduleKind

if TYPE_CHECKING:
    from npurt.data import DataOptions

Prepack = Literal["on", "off", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The run-time values of a training run. None of them needs another bundle.

    lr -- peak learning rate of AdamW.
    steps, epochs -- how long: optimizer steps, or passes over the data (fractions allowed, rounded up to whole steps).
        One of them; without either, one epoch.
    accum -- packs (micro-batches) per optimizer step. The gradient is that of their mean loss per supervised token.
    warmup -- steps of linear warm-up; below 1 a share of all steps, rounded.
    schedule, min_lr_ratio -- `constant`, `linear` or `cosine`, falling to this share of `lr`.
    weight_decay, beta1, beta2, eps -- AdamW's, as in PyTorch.
    max_norm -- gradients are scaled down to this global L2 norm; 0 for no clipping.
    seed -- of the initial adapter and of the order of the data.
    eval_every -- optimizer steps between evaluations on held-out data; 0: after the last step only.
    save_every -- optimizer steps between checkpoints; 0: none but on SIGINT and SIGTERM.
    keep_checkpoints -- how many of the newest checkpoints stay.
    log_every -- in plain progress, optimizer steps per line.
    prepack -- keep the frozen weights in the processor's own layout: faster, more memory; `auto` decides by the length
        of the run.
    threads -- threads of the CPU device; None: one for each core this process may use.
    template, loss_on, overlong, pack, shuffle -- how rows become sequences, see `npurt.data.DataOptions`.

    Raises `UsageError` with all that is wrong at once.
    """

    lr: float = 2e-4
    steps: int | None = None
    epochs: float | None = None
    accum: int = 1
    warmup: float = 0.03
    schedule: ScheduleKind = "cosine"
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_norm: float = 1.0
    seed: int = 0
    eval_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 2
    log_every: int = 1
    prepack: Prepack = "auto"
    threads: int | None = None
    template: Literal["auto", "chat", "plain"] = "auto"
    loss_on: Literal["response", "all"] = "response"
    overlong: Literal["cut", "drop", "error"] = "cut"
    pack: bool = True
    shuffle: bool = True

    def __post_init__(self) -> None:
        """Refuse values that cannot be trained with, all of them at once."""
        problems = Problems()
        for name, what in _faults(self):
            problems.add(name, what)
        problems.raise_any("the training configuration is not valid", UsageError)

    def total_steps(self, packs_per_epoch: int) -> int:
        """Optimizer steps of the whole run, for data of so many packs."""
        if self.steps is not None:
            return self.steps
        epochs = 1.0 if self.epochs is None else self.epochs
        return max(1, math.ceil(epochs * packs_per_epoch / self.accum))

    def learning_rates(self, total: int) -> Schedule:
        """The learning rate of each of `total` optimizer steps."""
        warmup = round(self.warmup * total) if self.warmup < 1 else int(self.warmup)
        return Schedule(self.schedule, self.lr, min(warmup, total), total, self.min_lr_ratio)

    def data_options(self) -> DataOptions:
        """The part of the configuration that says how rows become sequences."""
        from npurt.data import DataOptions

        return DataOptions(
            template=self.template,
            loss_on=self.loss_on,
            overlong=self.overlong,
            pack=self.pack,
            shuffle=self.shuffle,
            seed=self.seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """Every value by its name, for logs and checkpoints; `TrainConfig(**d)` is the inverse."""
        return asdict(self)


#: What each numeric value may be: type, lowest, highest (both included), and whether the lowest is excluded.
_RANGES: Mapping[str, tuple[type, float, float, bool]] = {
    "lr": (float, 0, 1e3, True),
    "epochs": (float, 0, 1e6, True),
    "steps": (int, 1, 10**9, False),
    "accum": (int, 1, 10**6, False),
    "warmup": (float, 0, 10**9, False),
    "min_lr_ratio": (float, 0, 1, False),
    "weight_decay": (float, 0, 1e3, False),
    "beta1": (float, 0, 0.999999, False),
    "beta2": (float, 0, 0.999999, False),
    "eps": (float, 1e-30, 1, False),
    "max_norm": (float, 0, 1e30, False),
    "seed": (int, 0, 2**32 - 1, False),
    "eval_every": (int, 0, 10**9, False),
    "save_every": (int, 0, 10**9, False),
    "keep_checkpoints": (int, 1, 10**6, False),
    "log_every": (int, 1, 10**9, False),
    "threads": (int, 1, 4096, False),
}
_OPTIONAL = {"steps", "epochs", "threads"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "schedule": get_args(ScheduleKind),
    "prepack": get_args(Prepack),
    "template": ("auto", "chat", "plain"),
    "loss_on": ("response", "all"),
    "overlong": ("cut", "drop", "error"),
}


def _faults(config: TrainConfig) -> list[tuple[str, str]]:
    """What is wrong with the values of a configuration, as (name, fault)."""
    found = []
    for name, (kind, low, high, above) in _RANGES.items():
        value = getattr(config, name)
        if value is None and name in _OPTIONAL:
            continue
        if what := _number_fault(value, kind, low, high, above=above):
            found.append((name, what))
    for name, offered in _CHOICES.items():
        value = getattr(config, name)
        if value not in offered:
            found.append((name, f"must be one of {', '.join(offered)}, is {value!r}"))
    found += [
        (name, f"must be true or false, is {value!r}")
        for name in ("pack", "shuffle")
        if not isinstance(value := getattr(config, name), bool)
    ]
    if config.steps is not None and config.epochs is not None:
        found.append(("epochs", "cannot be given together with steps"))
    warmup = config.warmup
    if not any(name == "warmup" for name, _ in found):
        if warmup >= 1 and warmup != int(warmup):
            found.append(("warmup", f"must be a share below 1 or a whole number of steps, is {warmup}"))
        elif isinstance(config.steps, int) and warmup > config.steps:
            found.append(("warmup", f"is longer than the run: {warmup} of {config.steps} steps"))
    return found


def _number_fault(value: object, kind: type, low: float, high: float, *, above: bool) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return f"must be a {'whole ' if kind is int else ''}number, is {value!r}"
    if not math.isfinite(value):
        return f"must be a finite number, is {value}"
    if value < low or (above and value == low):
        return f"must be {'above' if above else 'at least'} {low:g}, is {value}"
    if value > high:
        return f"must be at most {high:g}, is {value}"
    return None
