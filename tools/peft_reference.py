"""The stack that results are compared with: transformers, with PEFT or alone, in f32, on the sequences npurt trains on.

Tests and benchmarks share it. It differs from a usual PEFT program in two points only, both so that equal batches can
be compared: it takes packed sequences (`npurt.data.Pack`) with a mask that keeps documents apart, and its gradients are
those of the *sum* of losses until `step` divides them by the supervised tokens of the whole optimizer step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from npurt.data import IGNORED, Pack

#: Module names of the LoRA targets as recipes abbreviate them.
MODULES = {target: f"{target}_proj" for target in ("q", "k", "v", "o", "gate", "up", "down")}


@dataclass(frozen=True, slots=True)
class Lora:
    """Rank, alpha and targets (`q`, `v`, …) of the adapter."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q", "v")


class Reference:
    """A model, with a LoRA adapter or trained itself. Tensors go by the names under which PEFT and npurt export them.

    Packed sequences need `attention="eager"` or `"sdpa"`; the former spells attention out, as papers do.
    """

    def __init__(self, model: Any) -> None:
        """Take over a model in float32, and train what requires gradients; `create`, `load` and `full` make one."""
        self.model = model
        self._trained = {
            name.replace(".default.", "."): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._optimizer: torch.optim.AdamW | None = None

    @classmethod
    def create(cls, folder: str | Path, lora: Lora, *, attention: str = "eager") -> Self:
        """The model of a Hugging Face folder with a fresh adapter: random A, zero B, as PEFT initializes it."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=[MODULES[target] for target in lora.targets],
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with _quiet():
            return cls(get_peft_model(_base(folder, attention), config))

    @classmethod
    def load(cls, folder: str | Path, adapter: str | Path, *, attention: str = "eager") -> Self:
        """The model of a Hugging Face folder with an exported adapter, loaded as its users do."""
        from peft import PeftModel

        with _quiet():
            return cls(PeftModel.from_pretrained(_base(folder, attention), str(adapter), is_trainable=True))

    @classmethod
    def full(cls, folder: str | Path, *, ends: Sequence[str] = (), attention: str = "eager") -> Self:
        """The model of a Hugging Face folder, all of its decoder layers trained, and tensors of the names `ends`."""
        model = _base(folder, attention)
        # transformers keeps the row of the padding token where it is. In chat models that token often ends every turn.
        model.get_input_embeddings().padding_idx = None
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".layers." in name or name in ends)
        return cls(model)

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """Copies of all trained tensors by exported name, sorted."""
        return {name: self._trained[name].detach().numpy().copy() for name in sorted(self._trained)}

    def set_parameters(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        """Replace all trained tensors, and forget AdamW's moments. Raises `ValueError` for other names or shapes."""
        if tensors.keys() != self._trained.keys():
            raise ValueError(f"names differ: {sorted(tensors.keys() ^ self._trained.keys())[:4]}")
        self._optimizer = None
        with torch.no_grad():
            for name, values in tensors.items():
                if self._trained[name].shape != values.shape:
                    raise ValueError(f"{name} has shape {list(self._trained[name].shape)}, not {list(values.shape)}")
                self._trained[name].copy_(torch.from_numpy(values))

    def logprobs(self, pack: Pack) -> NDArray[np.float32]:
        """The log-probability of every label of a pack, f32 (S,) in nats; NaN where the pack has no label."""
        with torch.no_grad():
            losses = self._losses([pack])
        scores = np.full(len(pack.tokens), np.nan, dtype=np.float32)
        scores[pack.labels != IGNORED] = -losses.numpy()
        return scores

    def gradients(
        self, packs: Sequence[Pack], *, one_batch: bool = False
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """Sum of losses over all supervised tokens of the packs, and its gradient by trained tensor.

        Packs go through the model one after the other or, with `one_batch`, as the rows of one batch.
        """
        total = self._backward([packs] if one_batch else [[pack] for pack in packs])
        found = {}
        for name in sorted(self._trained):
            gradient = self._trained[name].grad
            if gradient is None:
                raise ValueError(f"{name} has no gradient: it takes no part in the loss")
            found[name] = gradient.numpy().copy()
        return total, found

    def step(
        self, packs: Sequence[Pack], *, lr: float, max_norm: float = 1.0, weight_decay: float = 0.0
    ) -> tuple[float, float]:
        """One AdamW step over these packs; mean loss per supervised token and gradient norm, both before the update."""
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(self._groups(weight_decay), lr=lr)
        tokens = sum(pack.supervised for pack in packs)
        total = self._backward([[pack] for pack in packs])
        with torch.no_grad():
            for parameter in self._trained.values():
                if parameter.grad is not None:
                    parameter.grad /= tokens
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained.values(), max_norm))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return total / tokens, norm

    def _groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """LoRA matrices decay, and so do weights, but norms and biases do not, as in transformers' own trainer."""
        vectors = [parameter for parameter in self._trained.values() if parameter.dim() == 1]
        matrices = [parameter for parameter in self._trained.values() if parameter.dim() > 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}]
        return [*groups, {"params": vectors, "weight_decay": 0.0}] if vectors else groups

    def _backward(self, batches: Sequence[Sequence[Pack]]) -> float:
        """Leave the gradient of the sum of losses in the parameters; returns the sum."""
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            loss = self._losses(batch).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def _losses(self, batch: Sequence[Pack]) -> torch.Tensor:
        """Losses of the supervised positions, in order: f32 (supervised,)."""
        window = getattr(self.model.config, "sliding_window", None)
        logits = self.model(
            input_ids=_stacked([pack.tokens for pack in batch]),
            position_ids=_stacked([pack.positions for pack in batch]),
            attention_mask=torch.cat([attention_mask(pack, window) for pack in batch]),
            use_cache=False,
        ).logits
        labels = _stacked([pack.labels for pack in batch])
        supervised = labels != IGNORED
        return cross_entropy(logits[supervised], labels[supervised], reduction="none")


def _stacked(rows: Sequence[NDArray[np.int32]]) -> torch.Tensor:
    """Token ids or positions as i64 (batch, S)."""
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def attention_mask(pack: Pack, window: int | None = None) -> torch.Tensor:
    """Additive mask f32 (1, 1, S, S): 0 where row i may see column j, else the lowest float.

    A position sees itself and earlier ones of its own document; with a sliding window, only the last `window` of them.
    """
    segments, at = torch.from_numpy(pack.segments), torch.arange(len(pack.segments))
    distance = at[:, None] - at[None, :]
    seen = (segments[:, None] == segments[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PEFT's calls of what transformers has deprecated, which nobody here can change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        yield


def _base(folder: str | Path, attention: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation=attention)
