"""A model folder and data for the simulator: one token for each character, and rows that the model can learn."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import Tokenizer, models

_CHARACTERS = [*string.ascii_lowercase, *" .?!,", *string.digits]


def write_model_folder(folder: Path) -> Path:
    """Write tokenizer and settings of a model whose vocabulary the simulator has."""
    folder.mkdir(parents=True)
    vocabulary = {"</s>": 0, "<unk>": 1} | {character: number for number, character in enumerate(_CHARACTERS, start=2)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def write_rows(path: Path, count: int = 40) -> Path:
    """Write rows of which the second letter follows from the first."""
    rows = [{"text": f"a{c}b{c}a{c}"} for c in string.ascii_lowercase]
    path.write_text("".join(json.dumps(rows[index % len(rows)]) + "\n" for index in range(count)))
    return path
