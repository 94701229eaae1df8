"""Turn a GGUF file of a small Llama model into the folder layout of the Hugging Face hub.

Quantized tensors are expanded to bfloat16 with the `gguf` package's own arithmetic, so the result depends on the file
alone. Three things differ between the two layouts and are undone here:

* names (`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`);
* the rows of the query and key projections: GGUF interleaves the two halves of each head, for a rotary embedding
  that turns neighbouring pairs, while transformers turns element `i` with element `i + head_dim / 2`;
* the tokenizer, which GGUF keeps as tables plus the name of a splitting rule. Only the rule `smollm` is known here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = NDArray[Any]

# GGUF name of a tensor -> its name in a transformers checkpoint; {} is the layer.
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # `tokenizer.ggml.token_type` of tokens that never come out of ordinary text


def convert(source: Path, folder: Path) -> None:
    """Write `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer's files into `folder`.

    Raises `KeyError` when the header lacks a field, `ValueError` when the file is not of a kind handled here.
    """
    reader = gguf.GGUFReader(source)
    header = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if header["general.architecture"] != "llama":
        msg = f"{source.name} holds a {header['general.architecture']} model, not a llama"
        raise ValueError(msg)
    config = _config(header, tied="output.weight" not in tensors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {_hf_name(name): _dense(tensor, name, heads) for name, tensor in tensors.items()}

    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special)
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library creates it for its owner only
    _tokenizer(header).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(header, config))


def unpermute(rows: Array, heads: int) -> Array:
    """Undo GGUF's interleaving: row pairs (i, i + half) of each head, stored side by side, go back to their halves.

    `rows` is (heads * head_dim, columns); the result has the same shape.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)  # (heads, 2, half, columns)


def _dense(tensor: gguf.ReaderTensor, name: str, heads: dict[str, int]) -> Array:
    """The tensor in bfloat16, in transformers' row order."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    for kind, count in heads.items():
        if f".{kind}." in name:
            values = unpermute(values, count)
    return np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{match[1]}.{_PER_LAYER[match[2]]}.weight"
    return f"{_WHOLE[name.removesuffix('.weight')]}.weight"


def _config(header: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The header's dimensions in the spelling of a published `config.json`, plus what every Llama has."""
    hidden, heads = header["llama.embedding_length"], header["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": header["tokenizer.ggml.bos_token_id"],
        "eos_token_id": header["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": header["llama.feed_forward_length"],
        "max_position_embeddings": header["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": header["llama.block_count"],
        "num_key_value_heads": header["llama.attention.head_count_kv"],
        "pad_token_id": header["tokenizer.ggml.padding_token_id"],
        # The header has the nearest float32 (9.99999974737875e-06); the published number is its short decimal.
        "rms_norm_eps": float(str(np.float32(header["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": header["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": header["llama.vocab_size"],
    }


def _tokenizer(header: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE whose text is first split so that every digit stands alone."""
    if (kind := (header["tokenizer.ggml.model"], header["tokenizer.ggml.pre"])) != ("gpt2", "smollm"):
        msg = f"tokenizer {kind} is not byte-level BPE with the splitting rule of smollm"
        raise ValueError(msg)
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in header["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = header["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tokenizer_config(header: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Names of the special tokens and the chat template, as transformers reads them."""
    tokens = header["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "bos_token": tokens[config["bos_token_id"]],
        "chat_template": header["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[config["eos_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        "pad_token": tokens[config["pad_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[header["tokenizer.ggml.unknown_token_id"]],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """UTF-8 JSON that a person can read and a diff can follow."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
