"""PEFT adapters: the two files that PEFT, transformers and vLLM load.

Only what these loaders need is written: the LoRA matrices under PEFT's names, in f32, sorted, and a configuration
without the keys that some of them refuse.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npubundle.errors import FileError, Problem, os_failure
from npurt.engine import Array
from npurt.errors import DivergedError
from npurt.export.vllm import require_servable
from npurt.storage import PARTIAL, place_files

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """What `adapter_config.json` says: rank, alpha, names of the adapted modules, base model as the user named it."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    base: str

    @classmethod
    def of(cls, tensors: Iterable[str], *, rank: int, alpha: float, base: str) -> AdapterCard:
        """The card of an adapter with these tensors."""
        return cls(rank, alpha, module_names(tensors), base)

    def to_dict(self) -> dict[str, Any]:
        """The keys that PEFT 0.18 to 0.21 and vLLM read; what is left out has its default."""
        return {
            "base_model_name_or_path": self.base,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            # PEFT declares a whole number, and some readers insist on one.
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": list(self.modules),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        }


def module_names(tensors: Iterable[str]) -> tuple[str, ...]:
    """Names of the adapted modules, sorted: `q_proj` for `….self_attn.q_proj.lora_A.weight`."""
    return tuple(sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}))


def require_finite(tensors: Mapping[str, Array], *, doing: str) -> None:
    """Raise `DivergedError` if a tensor has a value that is not finite: nothing of that kind ever leaves a run."""
    bad = [
        Problem(name, f"{int(np.count_nonzero(~np.isfinite(values))):,} of {values.size:,} values are not finite")
        for name, values in tensors.items()
        if not np.isfinite(values).all()
    ]
    if bad:
        raise DivergedError(
            f"refused to {doing}: values are not finite",
            problems=bad[:20],
            remedy="train with a lower --lr, or from the last checkpoint",
        )


def adapter_files(tensors: Mapping[str, Array], card: AdapterCard) -> dict[str, bytes]:
    """The content of an adapter's files by name, for `storage.place_files`.

    Raises as `require_finite` and `vllm.require_servable` do.
    """
    from safetensors.numpy import save

    require_finite(tensors, doing="export the adapter")
    require_servable(card.to_dict(), {name: values.shape for name, values in tensors.items()})
    arrays = {name: np.ascontiguousarray(tensors[name], dtype=np.float32) for name in sorted(tensors)}
    return {
        WEIGHTS_FILE: save(arrays, metadata={"format": "pt"}),
        CONFIG_FILE: (json.dumps(card.to_dict(), indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode(),
    }


def save_adapter(folder: Path, tensors: Mapping[str, Array], card: AdapterCard, *, keep: Iterable[Path] = ()) -> Path:
    """Write an adapter into `folder`, made if need be, in place of an earlier adapter; returns the folder.

    An interruption at any moment leaves the earlier adapter or the new one or, for the instant between two renames, a
    folder without configuration, which no tool loads. Raises `FileError` where `require_adapter_folder` does, and
    `ResourceError` when the disk is full.
    """
    require_adapter_folder(folder, keep=keep)
    place_files(folder, adapter_files(tensors, card), doing="save the adapter")
    return folder


def require_adapter_folder(folder: Path, *, keep: Iterable[Path] = ()) -> None:
    """Raise `FileError` if `folder` holds anything but an earlier adapter, its checkpoints, and the files of `keep`.

    It could be the folder of a model, or any other that was named by mistake.
    """
    kept = {path.absolute() for path in keep}
    try:
        strangers = sorted(path.name for path in folder.iterdir() if not _is_ours(path) and path.absolute() not in kept)
    except FileNotFoundError:
        return
    except OSError as error:
        if isinstance(error, NotADirectoryError) and folder.exists():
            raise FileError("the place for the adapter is a file", where=str(folder), remedy="name a folder") from error
        raise os_failure(error, "write to the output folder") from error
    if strangers:
        more = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
        raise FileError(
            f"the folder for the adapter holds other files: {', '.join(strangers[:5])}{more}",
            where=str(folder),
            remedy=f"name a new or empty folder, such as {folder}-2",
        )


def _is_ours(path: Path) -> bool:
    if path.name in {WEIGHTS_FILE, CONFIG_FILE}:
        return path.is_file()
    return path.name.startswith("checkpoint-") or (path.name.startswith(".") and path.name.endswith(PARTIAL))
