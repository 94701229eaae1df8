"""Reading the small text and JSON files of a model folder, with faults that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from npurt.errors import DataError


def read_text(path: Path) -> str:
    """The text of a file. Raises `DataError` if it cannot be read or is not UTF-8."""
    try:
        # As the reference reads it: line ends become newlines.
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror}", where=str(path), remedy="check the model folder"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            "the file is not UTF-8", where=str(path), remedy="take it from the model's publisher again"
        ) from error


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in a file; an empty one if the file may be missing and is."""
    if missing_ok and not path.exists():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the file is not JSON: {error}", where=str(path), remedy="take it from the model's publisher again"
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            "the file does not hold a JSON object", where=str(path), remedy="take it from the publisher again"
        )
    return value
