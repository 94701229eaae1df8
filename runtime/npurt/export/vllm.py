"""What vLLM asks of a PEFT adapter beyond what PEFT itself does.

Its loader refuses what it cannot serve, or, for a name that it does not know, says so when a server starts: hours after
the training. So the rules are checked on what is about to be written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from npubundle.fields import Problems
from npurt.errors import MismatchError

#: Ranks that a server can be started with (`--max-lora-rank`).
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

#: Keys of `adapter_config.json` that it must find, and those that may have one value only.
_NEEDED = ("r", "lora_alpha", "target_modules", "peft_type")
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": (None,),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True,),
}
#: Keys that say nothing about how an adapter is applied.
_NEUTRAL = {"base_model_name_or_path", "inference_mode", "lora_dropout", "task_type", "use_rslora"}
_NAME = re.compile(r"base_model\.model\.((?:[^.]+\.)+)lora_([AB])\.weight")
_FOREIGN = ("base_layer", "modules_to_save")


def require_servable(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `MismatchError`, with every fault, unless vLLM can load an adapter of this configuration and these tensors.

    shapes -- of the tensors by name: `lora_A` is [rank, in], `lora_B` is [out, rank].
    """
    problems = Problems()
    _check_config(config, problems)
    _check_tensors(config, shapes, problems)
    remedy = "rebuild the bundle with this release of npucc: its tensors are not named as PEFT and vLLM name them"
    problems.raise_any("refused to export an adapter that vLLM would not load", MismatchError, remedy=remedy)


def rank_note(rank: int) -> str | None:
    """What to know about a rank that vLLM has no setting for."""
    if rank in VLLM_RANKS:
        return None
    above = next((allowed for allowed in VLLM_RANKS if allowed >= rank), None)
    if above is None:
        return f"rank {rank} is above {VLLM_RANKS[-1]}, the most that vLLM serves"
    return f"vLLM has no --max-lora-rank {rank}; serve this adapter with --max-lora-rank {above}"


def _check_config(config: Mapping[str, Any], problems: Problems) -> None:
    for key in _NEEDED:
        if key not in config:
            problems.add(key, "is missing")
    for key, value in config.items():
        if key in _FIXED and value not in _FIXED[key]:
            problems.add(key, f"is {value!r}, which vLLM does not serve")
        elif key not in _FIXED and key not in _NEEDED and key not in _NEUTRAL:
            problems.add(key, "is not among the keys that vLLM is known to accept")
    rank = config.get("r")
    if "r" in config and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
        problems.add("r", f"is {rank!r}, not a positive whole number")


def _check_tensors(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], problems: Problems) -> None:
    pairs: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        match = _NAME.fullmatch(name)
        if match is None or any(part in name.split(".") for part in _FOREIGN):
            problems.add(name, "is not of the form base_model.model.MODULE.lora_A.weight or lora_B.weight")
            continue
        module, matrix = match[1].rstrip("."), match[2]
        pairs.setdefault(module, set()).add(matrix)
        rank = shape[0 if matrix == "A" else -1] if len(shape) == 2 else None
        if rank != config.get("r"):
            problems.add(name, f"has shape {list(shape)}, which is not of rank {config.get('r')}")
        if module.rpartition(".")[2] not in config.get("target_modules", ()):
            problems.add(name, "belongs to a module that target_modules lacks")
    for module, found in pairs.items():
        if missing := {"A", "B"} - found:
            problems.add(module, f"has no lora_{missing.pop()}")
    if not shapes:
        problems.add("tensors", "there are none")
