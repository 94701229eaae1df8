"""The files beside the weights of a model folder: which of them an export takes over."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npubundle.blob import read_small
from npubundle.errors import os_failure
from npurt.weights import INDEX, Checkpoint

CONFIG = "config.json"
#: What loaders read, and the terms under which the model is passed on.
_TAKEN = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
_TEMPLATES = "additional_chat_templates"
#: Never, whatever the name: pickles run code when they are loaded, and so do programs.
_CODE = ("*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
#: Far above any tokenizer.
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Companions:
    """Files by their path in the folder, and the names of those that are left out."""

    files: Mapping[str, bytes]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, base: Checkpoint, dtype: str | None) -> Companions:
        """Read the files of a model folder as they are; in `config.json` the dtype follows `dtype`.

        Raises `FileError` if one cannot be read.
        """
        weights = {stored.path.name for stored in base.tensors.values()} | {INDEX}
        files, left_out = {}, []
        for path in _entries(base.folder):
            name = path.relative_to(base.folder).as_posix()
            if name.startswith(".") or name in weights:
                continue
            if _is_taken(name):
                files[name] = read_small(path, _MAX_BYTES)
            else:
                left_out.append(name)
        if dtype is not None:
            files[CONFIG] = _with_dtype(base.config, dtype)
        return cls(files, tuple(left_out))


def _entries(folder: Path) -> Iterator[Path]:
    """What is in a model folder, sorted; of the folders in it, that of further chat templates is entered."""
    try:
        for path in sorted(folder.iterdir()):
            if path.name == _TEMPLATES and path.is_dir():
                yield from sorted(path.iterdir())
            else:
                yield path
    except OSError as error:
        raise os_failure(error, "read the model folder") from error


def _is_taken(name: str) -> bool:
    if any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _CODE):
        return False
    if "/" in name:
        return name.endswith(".jinja")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _TAKEN)


def _with_dtype(config: Mapping[str, Any], dtype: str) -> bytes:
    """The configuration with another dtype, under its name there, or else the one that all versions read."""
    changed = _renamed(config, dtype)
    if not {"dtype", "torch_dtype"} & changed.keys():
        changed["torch_dtype"] = dtype
    return (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()


def _renamed(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Also in the parts of a configuration that describe one of several models, such as `text_config`."""
    changed = dict(config)
    for key, value in config.items():
        if key in {"dtype", "torch_dtype"}:
            changed[key] = dtype
        elif key.endswith("_config") and isinstance(value, dict) and key != "quantization_config":
            changed[key] = _renamed(value, dtype)
    return changed
