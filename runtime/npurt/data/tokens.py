"""The model's tokenizer, with the special tokens that the model folder names, and the token ranges of text spans."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from npurt.data.model_folder import read_json
from npurt.data.template import Span
from npurt.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Encoded(NamedTuple):
    """The tokens of a text and the (start, end) of each in it, in characters. A token's span is never trimmed."""

    ids: list[int]
    offsets: list[Span]


class Tokenizer:
    """A model's tokenizer. It adds nothing by itself: `encode` gives the tokens of the text and no others.

    special_tokens -- `bos_token` and the like with their text, as the chat template gets them.
    prefix -- what the tokenizer puts before a plain text, as a rule the beginning-of-sequence token or nothing.
    bos, eos -- ids, None where the model has none.
    ends -- ids that can end a turn: the special tokens without BOS (unless it is EOS as well).
    """

    def __init__(self, backend: Backend, special_tokens: dict[str, str], eos: int | None) -> None:
        self._backend = backend
        self.special_tokens = special_tokens
        bos_text, eos_text = special_tokens.get("bos_token"), special_tokens.get("eos_token")
        self.bos: int | None = backend.token_to_id(bos_text) if bos_text is not None else None
        self.eos: int | None = backend.token_to_id(eos_text) if eos_text is not None else eos
        self.prefix: tuple[int, ...] = _prefix(backend)
        backend.no_truncation()  # a limit saved with the tokenizer would cut rows unseen
        backend.no_padding()
        # A post-processor would only add tokens, which is done here, and trim blanks from offsets, which loses them.
        backend.post_processor = None
        special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
        ends = special if self.bos is None else special - {self.bos}
        self.ends: frozenset[int] = frozenset(ends if self.eos is None else ends | {self.eos})

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder: `tokenizer.json`, and the special tokens that its other files name.

        Raises `DataError` if files are missing, broken, or name tokens that tokenizer.json does not have.
        """
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        if not folder.is_dir():
            raise DataError("there is no model folder here", where=str(folder), remedy="name the folder of the model")
        if not path.is_file():
            raise DataError(
                "the model folder has no tokenizer.json",
                where=str(folder),
                remedy=f"python -c \"from transformers import AutoTokenizer as T; d = '{folder}'; "
                'T.from_pretrained(d).save_pretrained(d)"',
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise DataError(
                f"the tokenizer cannot be read: {error}",
                where=str(path),
                remedy="take it from the model's publisher again",
            ) from error
        config = read_json(folder / "tokenizer_config.json", missing_ok=True)
        named = config
        if "added_tokens_decoder" not in config:  # older folders keep them in a file of their own, which then wins
            named = config | read_json(folder / "special_tokens_map.json", missing_ok=True)
        special_tokens = {name: text for name in _NAMES if (text := _token_text(named.get(name))) is not None}
        _require_known(backend, special_tokens, folder)
        return cls(backend, special_tokens, _configured_eos(folder))

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokenize texts, special tokens written in them included (chat templates write theirs)."""
        return [
            Encoded(found.ids, found.offsets) for found in self._backend.encode_batch(texts, add_special_tokens=False)
        ]

    def text_of(self, token: int) -> str:
        """The text of one token as the vocabulary has it."""
        return self._backend.id_to_token(token) or f"<{token}>"

    def plain(self, encoded: Encoded, *, where: str) -> tuple[list[int], int]:
        """Tokens of a plain document, and how many of them come before the text.

        That is one BOS if the tokenizer gives one, the text, and EOS exactly once.

        Texts that bring the tokens along already do not get them twice.
        """
        if self.eos is None:
            raise DataError(
                "the model has no end-of-sequence token, which plain rows need to end with",
                where=where,
                remedy='name it as "eos_token" in tokenizer_config.json',
            )
        prefix = list(self.prefix)
        if prefix and encoded.ids[:1] == prefix[-1:]:
            prefix.pop()
        end = len(encoded.ids)
        while end and encoded.ids[end - 1] == self.eos:
            end -= 1
        return [*prefix, *encoded.ids[:end], self.eos], len(prefix)


def token_range(encoded: Encoded, span: Span) -> Span:
    """The tokens that overlap a span of characters, as (first, past the last)."""
    start, end = span
    offsets = encoded.offsets
    first = bisect_right(offsets, start, key=lambda offset: offset[1])  # the first that ends past the start
    past = bisect_left(
        offsets, end, lo=first, key=lambda offset: offset[0]
    )  # the first that begins at the end or later
    return first, past


def close_turn(encoded: Encoded, text: str, span: Span, ends: frozenset[int]) -> tuple[Span, bool]:
    """The tokens of an assistant turn up to and with its end-of-turn token, and whether it has one.

    Blanks behind the turn belong to the template, not to the turn; blanks between text and end-of-turn token to the
    turn: the model has to write them before it can end.
    """
    start, end = span
    written = start + len(text[start:end].rstrip())
    first, past = token_range(encoded, (start, written))
    if past > first and encoded.ids[past - 1] in ends:
        return (first, past), True
    following = len(text) - len(text[written:].lstrip())
    at = bisect_right(encoded.offsets, following, lo=past, key=lambda offset: offset[1])  # the token written there
    if at < len(encoded.ids) and encoded.ids[at] in ends:
        return (first, at + 1), True
    return (first, past), False


def _prefix(backend: Backend) -> tuple[int, ...]:
    """What the tokenizer puts before a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start])
    return ()


def _token_text(value: object) -> str | None:
    """The text of a special token, which files write as text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _require_known(backend: Backend, special_tokens: dict[str, str], folder: Path) -> None:
    for name in ("bos_token", "eos_token"):
        text = special_tokens.get(name)
        if text is not None and backend.token_to_id(text) is None:
            raise DataError(
                f"{name} {text!r} is not in tokenizer.json",
                where=str(folder / "tokenizer_config.json"),
                remedy="take both files from the same release of the model",
            )


def _configured_eos(folder: Path) -> int | None:
    """`eos_token_id` of config.json, for folders whose tokenizer files name no EOS."""
    value = read_json(folder / "config.json", missing_ok=True).get("eos_token_id")
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, int) else None
