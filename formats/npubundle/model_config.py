"""The dimensions and variants of a decoder model, read from a Hugging Face `config.json`.

The compiler builds graphs from them; the runtime compares those a bundle was built for with those of the weights it is
given. One reader for both, so that two spellings of the same model (`rope_scaling` and `rope_parameters`, a default
left out or written down) are never taken for two models. Keys that do not change the mathematics are ignored here; the
compiler is the one that refuses keys that it does not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from npubundle.errors import Error, FormatError
from npubundle.fields import Fields, Kind, anything, flag, integer, nullable, number, read, record, text

#: What transformers assumes when a `config.json` of this family leaves a key out, where it differs from `_COMMON`.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
}
#: Families whose attention looks at `sliding_window`; elsewhere transformers ignores the key.
_SLIDING = {"mistral"}

#: Parameters of each RoPE variant beside the base `rope_theta`.
ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

#: Bounds far above any model: a program grows with both, and a mistyped figure should not take hours to be noticed.
_MAX_LAYERS = 10_000
_MAX_VOCABULARY = 1 << 24


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary position embedding: its variant (`rope_type`), base, and the variant's own parameters."""

    type: str
    theta: float
    parameters: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """In the spelling of transformers 5, `rope_parameters`."""
        return {"rope_type": self.type, "rope_theta": self.theta, **self.parameters}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What decides a model's mathematics. Names are those of `config.json`; sizes are numbers of elements."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    sliding_window: int | None
    rope_parameters: Rope

    def to_dict(self) -> dict[str, Any]:
        """Every field, defaults written out; `ModelConfig.from_dict` reads it back."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"rope_parameters": self.rope_parameters.to_dict()}

    @classmethod
    def from_dict(
        cls,
        document: Mapping[str, Any],
        *,
        what: str = "config.json",
        where: str | None = None,
        error: type[Error] = FormatError,
    ) -> ModelConfig:
        """Read a parsed `config.json` (any spelling) or the output of `to_dict`. Raises `error` with all problems."""
        return read(dict(document), MODEL_CONFIG, what=what, where=where, error=error)

    def differences(self, other: ModelConfig) -> list[tuple[str, Any, Any]]:
        """`(key, mine, other's)` for every key that differs."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [(key, mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]]


def _rope(fields: Fields) -> Rope:
    old = fields.take("rope_scaling", nullable(anything()), None)
    new = fields.take("rope_parameters", nullable(anything()), None)
    base = fields.take("rope_theta", nullable(number(1.0)), None)
    key = "rope_parameters" if new is not None else "rope_scaling"
    given = new if new is not None else old
    if old and new and old != new:
        fields.wrong("rope_scaling", "contradicts rope_parameters, which is another spelling of the same thing")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        fields.wrong(key, "must be an object or null")
        given = {}
    for name, other in (("rope_theta", base), ("rope_type", given.get("type"))):
        if other is not None and given.get(name, other) != other:
            fields.wrong(f"{key}.{name}", f"contradicts {other!r}, which another key has for the same thing")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_PARAMETERS:
        known = ", ".join(ROPE_PARAMETERS)
        fields.wrong(f"{key}.rope_type", f"{kind!r} is not a supported RoPE kind; supported are {known}")
        return Rope("default", 10000.0, {})
    theta = given.get("rope_theta", base if base is not None else 10000.0)
    if not _is_positive(theta):
        fields.wrong(f"{key}.rope_theta", f"must be a positive number, is {theta!r}")
        theta = 10000.0
    return Rope(kind, float(theta), _rope_parameters(fields, key, kind, given))


def _rope_parameters(fields: Fields, key: str, kind: str, given: Mapping[str, Any]) -> dict[str, float]:
    parameters: dict[str, float] = {}
    for name in ROPE_PARAMETERS[kind]:
        value = given.get(name)
        if _is_positive(value):
            parameters[name] = value
        else:
            fields.wrong(f"{key}.{name}", f"RoPE kind {kind!r} needs a positive number here, has {value!r}")
    inert = {"rope_type", "type", "rope_theta", *ROPE_PARAMETERS[kind]}
    for name in given:
        # transformers writes the factor of partial rotation here as well; only the whole head dimension is supported.
        if name not in inert and not (name == "partial_rotary_factor" and given[name] in (None, 1, 1.0)):
            fields.wrong(f"{key}.{name}", f"is not known for RoPE kind {kind!r}")
    return parameters


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300  # not NaN either


def _model_config(fields: Fields) -> ModelConfig:
    fields.allow_unknown()
    size = integer(1, 2**31)
    model_type = fields.need("model_type", text())
    family = _FAMILY_DEFAULTS.get(model_type, {})
    heads = fields.need("num_attention_heads", size)
    hidden = fields.need("hidden_size", size)
    kv_heads = fields.take("num_key_value_heads", nullable(size), family.get("num_key_value_heads")) or heads
    given_head_dim = fields.take("head_dim", nullable(size), None)
    head_dim = given_head_dim or max(1, hidden // max(1, heads))
    if given_head_dim is None and hidden % max(1, heads):
        fields.wrong(
            "hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given"
        )
    elif head_dim % 2:
        fields.wrong("head_dim", f"must be even for rotary embeddings, is {head_dim}")
    if heads % kv_heads:
        fields.wrong("num_key_value_heads", f"must divide num_attention_heads {heads}, is {kv_heads}")
    window = fields.take("sliding_window", nullable(integer(1)), family.get("sliding_window"))
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=fields.need("intermediate_size", size),
        num_hidden_layers=fields.need("num_hidden_layers", integer(1, _MAX_LAYERS)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.need("vocab_size", integer(1, _MAX_VOCABULARY)),
        rms_norm_eps=fields.take("rms_norm_eps", number(0.0, 1.0), 1e-6),
        hidden_act=fields.take("hidden_act", text(), "silu"),
        attention_bias=fields.take("attention_bias", flag(), default=False),
        mlp_bias=fields.take("mlp_bias", flag(), default=False),
        tie_word_embeddings=fields.take("tie_word_embeddings", flag(), default=False),
        sliding_window=window if model_type in _SLIDING else None,
        rope_parameters=_rope(fields),
    )


#: Reads a parsed `config.json`, or what `ModelConfig.to_dict` wrote.
MODEL_CONFIG: Kind[ModelConfig] = record(_model_config)
