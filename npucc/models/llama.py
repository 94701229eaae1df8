"""Llama 2, 3, 3.1, 3.2 and everything of that shape, such as SmolLM2: pre-norm, grouped-query attention, SwiGLU.

Same mathematics as `transformers.models.llama.modeling_llama` (Touvron et al. 2023). One sequence at a time: S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from npubundle.model_config import ModelConfig
from npucc.models.architecture import Architecture, LayerTensor, Linear, Tables
from npucc.models.layers import causal_attention, gated, rms_norm, rotate, rotate_rows


def layer_tensors(config: ModelConfig) -> tuple[LayerTensor, ...]:
    """The nine weights of a layer; matrices are (out, in) as in the checkpoint."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    matrices = {
        "q": ("self_attn.q_proj", (q_width, hidden)),
        "k": ("self_attn.k_proj", (kv_width, hidden)),
        "v": ("self_attn.v_proj", (kv_width, hidden)),
        "o": ("self_attn.o_proj", (hidden, q_width)),
        "gate": ("mlp.gate_proj", (inner, hidden)),
        "up": ("mlp.up_proj", (inner, hidden)),
        "down": ("mlp.down_proj", (hidden, inner)),
    }
    return (
        LayerTensor("input_norm", "input_layernorm.weight", (hidden,)),
        *(LayerTensor(name, f"{module}.weight", shape, module) for name, (module, shape) in matrices.items()),
        LayerTensor("post_norm", "post_attention_layernorm.weight", (hidden,)),
    )


def layer(
    config: ModelConfig, x: torch.Tensor, weights: Mapping[str, torch.Tensor], linear: Linear, tables: Tables
) -> torch.Tensor:
    """One decoder layer: (S, hidden) -> (S, hidden)."""
    h = rms_norm(x, weights["input_norm"], config.rms_norm_eps)
    x = x + linear("o", attention(config, h, linear, tables))
    h = rms_norm(x, weights["post_norm"], config.rms_norm_eps)
    return x + linear("down", gated(linear("gate", h), linear("up", h), tables.dtype))


def attention(config: ModelConfig, h: torch.Tensor, linear: Linear, tables: Tables) -> torch.Tensor:
    """Causal grouped-query attention: (S, hidden) -> (S, heads * D)."""
    S = h.shape[0]
    D, shared = config.head_dim, config.num_key_value_heads
    group = config.num_attention_heads // shared
    q = linear("q", h).view(S, shared, group, D)
    # Errors of keys move whole columns of scores: of all roundings that of their input costs gradients most.
    k = linear("k", h, whole=True).view(S, shared, D)
    v = linear("v", h).to(tables.dtype).view(S, shared, D).permute(1, 0, 2)  # (shared, S, D)
    # Scaling the queries costs S·D products per head, scaling the scores S·S.
    if tables.swap is None:
        q = rotate(q.permute(1, 2, 0, 3), tables, D**-0.5)  # (shared, group, S, D)
        k = rotate(k.permute(1, 0, 2), tables)  # (shared, S, D)
    else:
        q = rotate_rows(q, tables, D**-0.5).to(tables.dtype).permute(1, 2, 0, 3)
        k = rotate_rows(k, tables).permute(1, 0, 2)
    mixed = causal_attention(q, k, v, tables)
    return mixed.permute(2, 0, 1, 3).reshape(S, shared * group * D)


LLAMA = Architecture(
    model_type="llama",
    causal_lm="LlamaForCausalLM",
    layer=layer,
    layer_tensors=layer_tensors,
    neutral={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        # transformers splits products over `pretraining_tp` slices, which changes nothing but rounding; the key is
        # obsolete
        "pretraining_tp": (1, None),
        "rope_interleaved": (False,),
        "is_llama_config": (True,),
    },
)
