"""Mistral 7B (Jiang et al. 2023): Llama's layer, its attention limited to a sliding window where the config says so."""

from __future__ import annotations

from npucc.models.architecture import Architecture
from npucc.models.llama import layer, layer_tensors

MISTRAL = Architecture(
    model_type="mistral",
    causal_lm="MistralForCausalLM",
    layer=layer,
    layer_tensors=layer_tensors,
    neutral={"attention_bias": (False,), "mlp_bias": (False,)},
)
