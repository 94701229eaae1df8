"""Reads a model's `config.json`, and refuses whatever would make the compiled graphs compute something else."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npubundle.blob import read_small
from npubundle.errors import FileError, FormatError, Problem
from npubundle.fields import Problems
from npubundle.model_config import ModelConfig
from npucc.errors import UnsupportedModelError, UsageError
from npucc.models import ARCHITECTURES, Architecture

#: Keys that `ModelConfig` reads.
_UNDERSTOOD = {
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "sliding_window", "rope_parameters", "rope_scaling", "rope_theta",
}  # fmt: skip
#: Keys that say nothing about what a trained step computes.
_INERT = {
    "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "prefix",
    "initializer_range", "max_position_embeddings", "transformers_version", "transformers.js_config", "use_cache",
    "name_or_path", "_name_or_path", "unsloth_version", "output_attentions", "output_hidden_states", "return_dict",
    "return_dict_in_generate", "problem_type", "id2label", "label2id", "task_specific_params", "tokenizer_class",
    "is_decoder", "torchscript", "use_bfloat16", "max_length", "_attn_implementation_autoset", "finetuning_task",
}  # fmt: skip
#: Keys of any family that must have one of these values, if they are there at all.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, 0.0, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "use_sliding_window": (False, None),
    "layer_types": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "chunk_size_feed_forward": (0,),
    "logits_scaling": (1, 1.0, None),
    "logit_scale": (1, 1.0, None),
    "embedding_multiplier": (1, 1.0, None),
    "residual_multiplier": (1, 1.0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """A model that npucc can compile: its family and its dimensions."""

    architecture: Architecture
    config: ModelConfig


def read_model(path: Path, *, ignore_keys: Iterable[str] = ()) -> Model:
    """Read `config.json` from a file or a model folder. Raises UsageError or UnsupportedModelError."""
    file = path / "config.json" if os.path.isdir(path) else path  # noqa: PTH112 -- false, not an error, for an overlong name
    try:
        raw = read_small(file, _MAX_BYTES, UsageError)
    except FileError as failure:
        missing = isinstance(failure.__cause__, FileNotFoundError)
        raise UsageError(
            "there is no model configuration here"
            if missing
            else f"cannot read the model configuration: {failure.what}",
            where=str(file),
            remedy="--model takes a model folder, a config.json, or a hub id such as meta-llama/Llama-3.2-1B",
        ) from failure
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as failure:
        raise UsageError(f"the model configuration is not JSON: {failure}", where=str(file)) from failure
    if not isinstance(document, dict):
        raise UsageError("the model configuration is not a JSON object", where=str(file))
    return parse_model(document, where=str(file), ignore_keys=ignore_keys)


def parse_model(document: Mapping[str, Any], *, where: str | None = None, ignore_keys: Iterable[str] = ()) -> Model:
    """Check a parsed `config.json`. Raises UnsupportedModelError with everything that is wrong with it."""
    ignored = set(ignore_keys)
    document = {key: value for key, value in document.items() if key not in ignored}
    problems = Problems()
    architecture = ARCHITECTURES.get(str(document.get("model_type")))
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        problems.add(
            "model_type", f"{document.get('model_type')!r} is not a supported architecture; supported are {known}"
        )
    else:
        _check_heads(document, architecture, problems)
    neutral = _NEUTRAL | dict(architecture.neutral if architecture else {})
    for key, value in document.items():
        if key in neutral:
            if not any(
                value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral[key]
            ):
                allowed_text = " or ".join(repr(a) for a in neutral[key])
                problems.add(key, f"changes the mathematics: {_short(value)} is not supported, only {allowed_text}")
        elif key not in _UNDERSTOOD and key not in _INERT:
            near = difflib.get_close_matches(key, _UNDERSTOOD | _INERT, n=1, cutoff=0.85)
            guess = f" (did you mean {near[0]!r}?)" if near else ""
            problems.add(key, f"is not known, and might change the mathematics{guess}")
    found = list(_raised(problems))
    config = None
    try:
        config = ModelConfig.from_dict(document, where=where)
    except FormatError as failure:
        named = {problem.where for problem in found}
        found += [problem for problem in failure.problems if problem.where not in named]
    if found or config is None or architecture is None:
        raise UnsupportedModelError(
            "this model cannot be compiled",
            where=where,
            problems=found,
            remedy="a key that is known to change nothing can be passed over with --ignore-config-key NAME",
        )
    return Model(architecture, config)


def _check_heads(document: Mapping[str, Any], architecture: Architecture, problems: Problems) -> None:
    names = document.get("architectures") or [architecture.causal_lm]
    if not isinstance(names, list) or architecture.causal_lm not in names:
        problems.add("architectures", f"{_short(names)} is not supported, only [{architecture.causal_lm!r}]")


def _raised(problems: Problems) -> tuple[Problem, ...]:
    try:
        problems.raise_any("", UnsupportedModelError)
    except UnsupportedModelError as collected:
        return collected.problems
    return ()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
