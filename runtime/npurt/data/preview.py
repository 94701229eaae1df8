"""One row as the model will see it, with the tokens that count in the loss marked: looked at before hours are spent."""

from __future__ import annotations

import re
from itertools import groupby

from npurt.data.encoding import Document
from npurt.data.fitting import count_supervised
from npurt.data.template import Span
from npurt.data.tokens import Tokenizer

OPEN, CLOSE = "⟦", "⟧"
_RUN_SHOWN = 600  # characters of one marked or unmarked run; of longer ones the middle is left out
_GREEN, _RESET = "\x1b[32m", "\x1b[0m"
# Data must not steer the terminal: control characters, and those that turn the direction of writing.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def preview(document: Document, piece: Span, tokenizer: Tokenizer, *, color: bool = False) -> str:
    """The row's text with its supervised tokens in ⟦ ⟧ (and green, with `color`), below a line that names the row.

    `piece` is the range of tokens that is trained on; it begins with the row's first.
    """
    _, end = piece
    marked = [False] * end
    for first, past in document.supervised:
        for index in range(max(first, 1), min(past, end)):
            marked[index] = True
    texts = _token_texts(document, end, tokenizer)
    runs = []
    for is_marked, indices in groupby(range(end), key=marked.__getitem__):
        run = _safe(_shortened("".join(texts[index] for index in indices)))
        if is_marked:
            run = f"{_GREEN}{OPEN}{run}{CLOSE}{_RESET}" if color else f"{OPEN}{run}{CLOSE}"
        runs.append(run)
    supervised = count_supervised(document, piece)
    return f"{document.place}: {end:,} tokens, {supervised:,} supervised (in {OPEN} {CLOSE})\n" + "".join(runs)


def _token_texts(document: Document, end: int, tokenizer: Tokenizer) -> list[str]:
    """The part of the text that each of the first `end` tokens stands for; joined, nothing of it is missing.

    Tokens that no text stands for (BOS and EOS of plain rows) show as the vocabulary has them. Of tokens that share a
    character, the first shows it.
    """
    lead, offsets, text = document.lead, document.offsets, document.text
    texts = [tokenizer.text_of(token) for token in document.tokens[:lead]]
    at = 0
    for index in range(min(end - lead, len(offsets))):
        last = index + 1 == len(offsets)
        until = offsets[index][1] if last else max(offsets[index][1], min(offsets[index + 1][0], len(text)))
        texts.append(text[at : max(at, until)])
        at = max(at, until)
    return texts + [tokenizer.text_of(token) for token in document.tokens[len(texts) : end]]


def _shortened(text: str) -> str:
    if len(text) <= _RUN_SHOWN:
        return text
    half = _RUN_SHOWN // 2
    return f"{text[:half]} … {len(text) - _RUN_SHOWN:,} characters more … {text[-half:]}"


def _safe(text: str) -> str:
    return _UNSAFE.sub(
        lambda found: f"\\x{ord(found[0]):02x}" if ord(found[0]) < 256 else f"\\u{ord(found[0]):04x}", text
    )
