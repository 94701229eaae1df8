"""Reading a PEFT adapter to start from, with everything that does not fit the bundle reported at once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npubundle.blob import read_small
from npubundle.errors import FileError
from npubundle.fields import Problems
from npubundle.recipe import Recipe
from npurt.engine import Float32
from npurt.errors import MismatchError
from npurt.export.peft import CONFIG_FILE, WEIGHTS_FILE, module_names

#: Settings that change what the matrices mean, and the values with which they do not.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "use_dora": (False,),
    "use_rslora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "layers_to_transform": (None, []),
    "exclude_modules": (None, []),
}
#: How PEFT saved weights before safetensors.
PICKLED = "adapter_model.bin"
#: Far above any adapter; whatever is longer is no adapter.
_MAX_CONFIG, _MAX_WEIGHTS = 1 << 20, 16 << 30
_DTYPES = {"F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a safetensors file: its dtype as the file names it, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def load_adapter(folder: Path, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Float32]:
    """The matrices of a PEFT adapter in f32, by name.

    `shapes` names every trained tensor of the bundle with its shape. Raises `MismatchError` (exit 7) with everything
    that does not fit: rank, alpha, targets, settings of other methods, names, shapes, dtypes, values that are not
    finite.
    """
    problems = Problems()
    _check_config(read_config(folder, problems), recipe, shapes, problems)
    found = _read_tensors(folder, problems)
    tensors = {}
    for name in sorted(shapes.keys() | found.keys()):
        if name not in found:
            problems.add(name, "is missing")
        elif name not in shapes:
            problems.add(name, f"is not known to the bundle{why_unknown(name)}")
        elif found[name].shape != shapes[name]:
            problems.add(name, f"has shape {list(found[name].shape)}, the bundle needs {list(shapes[name])}")
        elif (values := _as_f32(found[name])) is None:
            problems.add(name, f"has dtype {found[name].dtype}; F32, F16 and BF16 can be read")
        elif not np.isfinite(values).all():
            problems.add(name, "has values that are not finite")
        else:
            tensors[name] = values
    problems.raise_any("the adapter does not fit the bundle", MismatchError, where=str(folder))
    return tensors


def read_config(folder: Path, problems: Problems) -> dict[str, Any]:
    """What `adapter_config.json` says. Raises `MismatchError` if it cannot be read."""
    path = folder / CONFIG_FILE
    try:
        document = json.loads(read_small(path, _MAX_CONFIG))
    except FileError as error:
        raise unreadable(path, error.what) from error
    except (ValueError, RecursionError) as error:
        raise unreadable(path, f"not JSON: {error}") from error
    if not isinstance(document, dict):
        problems.add(CONFIG_FILE, "must be a JSON object")
        return {}
    return document


def _check_config(
    config: Mapping[str, Any], recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], problems: Problems
) -> None:
    for key, mine, what in (("r", recipe.rank, "rank"), ("lora_alpha", recipe.alpha, "alpha")):
        if config.get(key) != mine or isinstance(config.get(key), bool):
            problems.add(f"{CONFIG_FILE}: {key}", f"is {config.get(key)!r}; the bundle was built with {what} {mine:g}")
    targets = config.get("target_modules")
    wanted = module_names(shapes)
    # Other forms (a pattern, "all-linear") name no modules by themselves; the tensors then say what there is.
    if isinstance(targets, list) and {str(t).rpartition(".")[2] for t in targets} != set(wanted):
        problems.add(
            f"{CONFIG_FILE}: target_modules",
            f"is {', '.join(sorted(map(str, targets)))}; the bundle trains {', '.join(wanted)}",
        )
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            problems.add(f"{CONFIG_FILE}: {key}", f"is {config[key]!r}, which the bundle does not compute")


def _read_tensors(folder: Path, problems: Problems) -> dict[str, _Tensor]:
    from safetensors import SafetensorError, deserialize

    path = folder / WEIGHTS_FILE
    if not path.exists() and (folder / PICKLED).exists():
        problems.add(PICKLED, "is a pickle, which can run code and is not read; save it as safetensors")
        return {}
    try:
        entries = deserialize(read_small(path, _MAX_WEIGHTS))  # type: ignore[no-untyped-call]
    except FileError as error:
        raise unreadable(path, error.what) from error
    except SafetensorError as error:
        raise unreadable(path, f"not a safetensors file: {error}") from error
    return {name: _Tensor(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in entries}


def _as_f32(tensor: _Tensor) -> Float32 | None:
    if tensor.dtype == "BF16":
        # The upper half of an f32.
        halves = np.frombuffer(tensor.data, dtype="<u2").astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(tensor.shape)
    if tensor.dtype not in _DTYPES:
        return None
    return np.frombuffer(tensor.data, dtype=_DTYPES[tensor.dtype]).astype(np.float32).reshape(tensor.shape)


def why_unknown(name: str) -> str:
    """What is wrong with the name of a tensor that has no place, if its form says so."""
    if re.search(r"\.lora_[AB]\.[^.]+\.weight$", name):
        return " (it has an adapter's name in it: save with PEFT's save_pretrained)"
    if not name.startswith("base_model.model."):
        return " (PEFT's names begin with base_model.model.)"
    return ""


def unreadable(path: Path, why: str) -> MismatchError:
    """The error for a file of an adapter that is missing or damaged."""
    return MismatchError(
        f"the adapter cannot be read: {why}",
        where=str(path),
        remedy=f"name a folder that has {CONFIG_FILE} and {WEIGHTS_FILE}",
    )
