"""The training configuration that shapes the graphs. What is chosen at run time (learning rate, steps) is not here."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from npubundle.fields import Fields, Kind, choice, flag, integer, list_of, nullable, number, record, text


class Mode(enum.Enum):
    """What is trained: low-rank adapters, or the weights themselves."""

    LORA = "lora"
    FULL = "full"


class Activations(enum.Enum):
    """What the forward pass keeps for the backward pass.

    `recompute` keeps the input of each layer, `save` all that backward needs, `auto` saves as many layers as the memory
    budget allows.
    """

    RECOMPUTE = "recompute"
    SAVE = "save"
    AUTO = "auto"


#: Options that only one mode has.
LORA_OPTIONS = ("rank", "alpha", "targets")
FULL_FLAGS = ("train_norm", "train_embeddings", "train_head")

#: Linear layers of a decoder block that can carry a LoRA branch, in the order of the block.
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Mode, LoRA rank, alpha and targets, sequence length in tokens, activation policy, memory budget in bytes.

    `targets` is in the order of `LORA_TARGETS`. `memory_budget` is None for the target's own. `logits` adds a phase
    that returns the logits of chosen rows.

    Mode `full` trains all weights of the decoder layers. It has no rank, alpha (both keep their defaults and mean
    nothing) and no targets. `train_norm`, `train_embeddings` and `train_head` add what stands outside the layers.
    """

    mode: Mode = Mode.LORA
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q", "v")
    seq_len: int = 512
    activations: Activations = Activations.AUTO
    memory_budget: int | None = None
    logits: bool = False
    train_norm: bool = False
    train_embeddings: bool = False
    train_head: bool = False

    @property
    def full(self) -> bool:
        """Whether the weights themselves are trained."""
        return self.mode is Mode.FULL

    @property
    def scaling(self) -> float:
        """Factor of the LoRA branch, alpha / rank (Hu et al. 2021)."""
        return self.alpha / self.rank

    def to_dict(self) -> dict[str, Any]:
        """As it stands in `bundle.json`: with the keys of its mode."""
        own: dict[str, Any] = {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)}
        if self.full:
            own = {name: getattr(self, name) for name in FULL_FLAGS}
        return {
            "mode": self.mode.value,
            **own,
            "seq_len": self.seq_len,
            "activations": self.activations.value,
            "memory_budget": self.memory_budget,
            "logits": self.logits,
        }


def _recipe(fields: Fields) -> Recipe:
    mode = fields.take("mode", choice(Mode), Mode.LORA)
    default = Recipe(mode, targets=() if mode is Mode.FULL else Recipe().targets)
    for name in LORA_OPTIONS if default.full else FULL_FLAGS:
        if name in fields:
            fields.wrong(name, f"has no meaning in mode {mode.value}")
    targets = fields.take("targets", list_of(text(), minimum=1), default.targets)
    for target in targets:
        if target not in LORA_TARGETS:
            fields.wrong("targets", f"{target!r} is not a LoRA target; targets are {', '.join(LORA_TARGETS)}")
    if len(set(targets)) != len(targets):
        fields.wrong("targets", "names a target twice")
    return Recipe(
        mode=mode,
        rank=fields.take("rank", integer(1, 4096), default.rank),
        alpha=fields.take("alpha", number(1e-6, 1e6), default.alpha),
        targets=tuple(t for t in LORA_TARGETS if t in targets),
        seq_len=fields.take("seq_len", integer(2, 1 << 20), default.seq_len),
        activations=fields.take("activations", choice(Activations), default.activations),
        memory_budget=fields.take("memory_budget", nullable(integer(1)), None),
        logits=fields.take("logits", flag(), default.logits),
        **{name: fields.take(name, flag(), getattr(default, name)) for name in FULL_FLAGS},
    )


#: Reads a recipe from `bundle.json` or from the `[recipe]` table of a TOML file; absent keys take their defaults.
RECIPE: Kind[Recipe] = record(_recipe)
