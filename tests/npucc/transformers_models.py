"""The tiny model in transformers, with random weights, to compare with."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from npucc.models.config_reader import Model, parse_model
from tests.npucc.tiny import config

FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}


def pair(model_type: str = "llama", **changes: Any) -> tuple[Model, Any]:
    """The model as npucc reads it, and transformers' own in f32, whose weights are random and norms not 1."""
    document = config(model_type=model_type, architectures=[FAMILIES[model_type]], **changes)
    theirs = transformers.AutoConfig.for_model(**document, attn_implementation="eager")
    torch.manual_seed(11)
    model = getattr(transformers, FAMILIES[model_type])(theirs).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.2) + (parameter.dim() == 1)
            )
            parameter.requires_grad_(requires_grad=False)
    return parse_model(document), model


def weights(ours: Model, theirs: Any, index: int) -> dict[str, torch.Tensor]:
    """The weights of a decoder layer by npucc's short names."""
    tensors = theirs.state_dict()
    prefix = ours.architecture.layer_prefix.format(index)
    return {t.name: tensors[prefix + t.tensor] for t in ours.architecture.layer_tensors(ours.config)}
