"""What the compiler needs to know of a family of models. Each family is a file of its own beside this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from npubundle.model_config import ModelConfig


class Linear(Protocol):
    """A layer's linear modules, with their LoRA branches."""

    def __call__(self, target: str, x: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
        """The projection named `target` applied to x, in f32; its factors are rounded to the dtype of the weights.

        With `whole`, the input of the projection itself counts in full.
        """


@dataclass(frozen=True, slots=True)
class Tables:
    """What a layer needs to know of the tokens' layout and of the target.

    `cos` and `sin` are (S, head_dim); the first half of `sin` is negated, so that rotating by half a head is
    `x * cos + roll(x, head_dim / 2) * sin`. `mask` is (S, S), 0 where the row may look at the column, else a large
    negative number; above the diagonal it is always the latter, and attention need not look there. `query_rows` is the
    target's wish how many rows attention computes at a time. `swap` (head_dim, head_dim), where a target wants it,
    exchanges the halves of a head by a product: such targets shuffle elements slowly. Factors of products are rounded
    to `dtype`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor
    query_rows: int
    swap: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """A weight of a decoder layer.

    `name` is its short name (`q`), `tensor` its name in the checkpoint after the layer's prefix. `module` names the
    linear module (`self_attn.q_proj`) where the weight is a matrix that may carry a LoRA branch.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    module: str | None = None


#: `layer(config, x, weights, linear, tables)`: (S, hidden) -> (S, hidden). `weights` holds what is not a linear module.
Layer = Callable[[ModelConfig, torch.Tensor, Mapping[str, torch.Tensor], Linear, Tables], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of decoder models.

    `neutral` lists keys of `config.json` that change the mathematics unless they have one of the given values.
    """

    model_type: str
    causal_lm: str
    layer: Layer
    layer_tensors: Callable[[ModelConfig], tuple[LayerTensor, ...]]
    neutral: Mapping[str, tuple[object, ...]]
    layer_prefix: str = "model.layers.{}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
