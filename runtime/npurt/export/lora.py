"""Reading a LoRA adapter of any rank and targets to merge it, with everything that prevents it reported at once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npubundle.blob import open_file
from npubundle.errors import FileError
from npubundle.fields import Problems
from npurt.arrays import Array
from npurt.errors import MismatchError
from npurt.export.model import float_rows, tied_head
from npurt.export.peft import CONFIG_FILE, WEIGHTS_FILE
from npurt.export.peft_reader import PICKLED, read_config, unreadable, why_unknown
from npurt.shards import FLOATS, Stored, WeightsError, read_header
from npurt.weights import HEAD, Checkpoint

#: Settings that change what the matrices mean, and the values with which they do not.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}
#: How training starts says nothing about the result. Other ways (PiSSA, OLoRA, LoftQ, …) change the base weights too.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
#: Settings named like methods of their own that only steer how training starts or is run.
_HARMLESS = {"use_rslora", "eva_config", "loftq_config", "corda_config", "lora_ga_config"}
_HARMLESS |= {"megatron_config", "runtime_config"}

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
#: Of an adapter on a head or embedding, PEFT also saves the tensor that it adapts.
_COPY = re.compile(r"base_model\.model\.(.+?)(?:\.base_layer)?\.weight")
_KINDS = {
    "lora_magnitude_vector": "is the magnitude of DoRA, which npurt does not merge",
    "lora_embedding_": "belongs to LoRA on an embedding, which npurt does not merge",
    ".lora_B.bias": "is a bias of LoRA, which npurt does not merge",
}
_REMEDY = (
    "name the weights that the adapter was trained for; other methods are merged where PEFT is installed, "
    "by merge_and_unload"
)
#: Keys of `rank_pattern` and `alpha_pattern` that are names. A stranger's regular expression could take for ever.
_PLAIN_KEY = re.compile(r"\^?(?:[\w.-]|\\\.)+")


@dataclass(frozen=True, slots=True)
class Pair:
    """The two matrices of one adapted weight, which changes by `scaling` · B · A.

    a -- [rank, in]. b -- [out, rank].
    """

    a: Stored
    b: Stored
    scaling: float

    def load(self) -> tuple[Array, Array]:
        """A and B in f32."""
        return _whole(self.a), _whole(self.b)


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter that fits a checkpoint: its matrices by the name of the weight, and the base model that it names."""

    pairs: Mapping[str, Pair]
    base: str | None


def read_lora(folder: Path, base: Checkpoint) -> Lora:
    """The adapter in `folder`, for the weights of `base`.

    Supports rsLoRA, and `rank_pattern` and `alpha_pattern` with names for keys. Raises `MismatchError` (exit 7) with
    everything that cannot be merged: settings of other methods, names and shapes that the checkpoint does not have,
    ranks that differ from the configuration, values that are not finite.
    """
    problems = Problems()
    config = read_config(folder, problems)
    _check_config(config, problems)
    tied = tied_head(base) or base.config.get("tie_word_embeddings") is True
    pairs = {}
    for module, found in sorted(_by_module(_tensors(folder, problems), base, problems).items()):
        if fault := _misfit(f"{module}.weight", found, base, tied=tied):
            problems.add(module, fault)
            continue
        scaling = _scaling(config, module, found["A"].shape[0], problems)
        for matrix, stored in found.items():
            if not all(np.isfinite(rows).all() for rows in float_rows(stored)):
                problems.add(f"{module}.lora_{matrix}", "has values that are not finite")
        pairs[f"{module}.weight"] = Pair(found["A"], found["B"], scaling)
    headline = "the adapter cannot be merged into these weights"
    problems.raise_any(headline, MismatchError, where=str(folder), remedy=_REMEDY)
    named = config.get("base_model_name_or_path")
    return Lora(pairs, named if isinstance(named, str) and named else None)


def _check_config(config: Mapping[str, Any], problems: Problems) -> None:
    def refuse(key: str, what: str) -> None:
        problems.add(f"{CONFIG_FILE}: {key}", what)

    if "peft_type" not in config:
        refuse("peft_type", "is missing")
    for key, value in config.items():
        if fault := _foreign(key, value):
            refuse(key, fault)
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict):
            refuse(key, "must be an object")
        elif foreign := [name for name in pattern if not _PLAIN_KEY.fullmatch(name)]:
            refuse(key, f"has the regular expression {foreign[0]!r}; npurt reads names of modules only")


def _foreign(key: str, value: Any) -> str | None:
    """Why a setting cannot be merged."""
    if key in _PLAIN:
        return None if value in _PLAIN[key] else f"is {value!r}, which npurt does not merge"
    if key == "init_lora_weights":
        why = f"is {value!r}, which may change the base weights too; convert the adapter to plain LoRA with PEFT"
        return None if value in _STARTS else why
    if value and key not in _HARMLESS and (key.startswith("use_") or key.endswith("_config")):
        return "belongs to a method that npurt does not merge"
    return None


def _tensors(folder: Path, problems: Problems) -> dict[str, Stored]:
    path = folder / WEIGHTS_FILE
    if not path.exists() and (folder / PICKLED).exists():
        problems.add(PICKLED, "is a pickle, which can run code and is not read; save it as safetensors")
        return {}
    try:
        with open_file(path):  # a regular file, or none at all
            tensors = read_header(path)
    except (FileError, WeightsError) as error:
        raise unreadable(path, error.what) from error
    if not tensors:
        problems.add(WEIGHTS_FILE, "has no tensors")
    return tensors


def _by_module(tensors: Mapping[str, Stored], base: Checkpoint, problems: Problems) -> dict[str, dict[str, Stored]]:
    """A and B of each adapted module; what is neither, nor a copy of a base tensor, is a problem."""
    found: dict[str, dict[str, Stored]] = {}
    for name, stored in sorted(tensors.items()):
        if match := _NAME.fullmatch(name):
            found.setdefault(match[1], {})[match[2]] = stored
        elif (copy := _COPY.fullmatch(name)) and (original := base.tensors.get(f"{copy[1]}.weight")):
            if not _equal(stored, original):
                problems.add(name, "is a whole tensor that differs from that of the weights; npurt does not merge it")
        else:
            reasons = [reason for part, reason in _KINDS.items() if part in name]
            other = f"is not a matrix of LoRA{why_unknown(name)}; npurt does not merge it"
            problems.add(name, reasons[0] if reasons else other)
    return found


def _equal(one: Stored, other: Stored) -> bool:
    """Whether two tensors have the same values, perhaps in different dtypes."""
    if one.shape != other.shape or not {one.dtype, other.dtype} <= FLOATS.keys():
        return False
    first = 0
    for rows in float_rows(one):
        theirs = _whole(other, (first, first + len(rows)))
        if not np.array_equal(rows, theirs):
            return False
        first += len(rows)
    return True


def _misfit(weight: str, found: Mapping[str, Stored], base: Checkpoint, *, tied: bool) -> str | None:
    """Why these matrices do not fit the weight of that name."""
    if missing := {"A", "B"} - found.keys():
        return f"lora_{missing.pop()} is missing"
    if weight == HEAD and tied:
        return "is tied to the embedding: a merge would change both, or untie them"
    if weight not in base.tensors:
        return f"the weights have no tensor {weight}"
    stored, a, b = base.tensors[weight], found["A"], found["B"]
    if strange := next((s.dtype for s in (stored, a, b) if s.dtype not in FLOATS), None):
        return f"has dtype {strange}; npurt merges {', '.join(FLOATS)}"
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] and (b.shape[0], a.shape[1]) == stored.shape
    if not fits:
        return f"A is {list(a.shape)} and B {list(b.shape)}; {weight} is {list(stored.shape)}"
    return None


def _scaling(config: Mapping[str, Any], module: str, rank: int, problems: Problems) -> float:
    """By what B · A is multiplied: alpha / r, or alpha / √r with rsLoRA; 0 if there is a problem."""
    said = _of_module(config, "rank_pattern", module, "r")
    alpha = _of_module(config, "alpha_pattern", module, "lora_alpha")
    if said != rank or isinstance(said, bool) or rank < 1:
        problems.add(module, f"has matrices of rank {rank}; {CONFIG_FILE} says {said!r}")
    elif not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        problems.add(module, f"has the alpha {alpha!r} in {CONFIG_FILE}, which is no number")
    else:
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return 0.0


def _of_module(config: Mapping[str, Any], pattern: str, module: str, default: str) -> Any:
    """A setting of one module: of the first key that is, or ends, its name, as PEFT decides it."""
    table = config.get(pattern)
    for key, value in (table if isinstance(table, dict) else {}).items():
        if _PLAIN_KEY.fullmatch(key) and re.match(rf"(.*\.)?({key})$", module):
            return value
    return config.get(default)


def _whole(stored: Stored, span: tuple[int, int] | None = None) -> Array:
    parts = list(float_rows(stored, span))
    return np.concatenate(parts) if parts else np.empty(stored.shape, np.float32)
