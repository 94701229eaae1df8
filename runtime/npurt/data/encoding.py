"""Rows to documents: rendered, tokenized, and with the tokens known that count in the loss.

| row | tokens | supervised |
|---|---|---|
| text | BOS as the tokenizer has it, the text, EOS once | all |
| chat | the rendered template, nothing added | every assistant turn with its end-of-turn token |
| prompt and response, the model has a chat template | the same, as a user and an assistant turn | the same |
| prompt and response, plain | BOS as the tokenizer has it, both texts, EOS once | the response and EOS |

The first token of a document has nothing before it to be predicted from, so it counts nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from npurt.data.faults import Faults, Place
from npurt.data.options import DataOptions
from npurt.data.rows import ChatRow, Message, PairRow, Row, TextRow
from npurt.data.template import ChatTemplate, Span, TemplateRefusal
from npurt.data.tokens import Encoded, Tokenizer, close_turn, token_range
from npurt.data.turns import Tools, render_chat
from npurt.errors import DataError

_BATCH = 512  # rows tokenized together: enough to keep all cores at work


@dataclass(frozen=True, slots=True)
class Document:
    """A tokenized row.

    tokens -- ids of the whole row, before it is fitted to the sequence length.
    supervised -- ranges (first, past the last) of tokens to be predicted, in order, without overlap.
    turn_ends -- numbers of tokens after which the document may end, because an assistant turn is complete there.
    splits -- whether a document that is too long continues in another (plain text), or is cut.
    open_turns -- assistant turns that no special token ends.
    text, offsets, lead -- what `tokens[lead:]` was made from, and where in it each token stands.
    """

    place: Place
    tokens: list[int]
    supervised: list[Span]
    turn_ends: list[int]
    splits: bool
    open_turns: int
    text: str
    offsets: list[Span]
    lead: int


class _Rendered(NamedTuple):
    """A row as one text. `turns`: spans of characters to learn; `is_chat`: the text has all special tokens itself."""

    row: Row
    text: str
    turns: list[Span]
    is_chat: bool


def encode_rows(
    rows: Sequence[Row], tokenizer: Tokenizer, template: ChatTemplate | None, options: DataOptions
) -> Iterator[Document]:
    """The documents of all rows, in order.

    Raises `DataError`: at the first row for which the model lacks a template, at the end for all rows that the template
    refuses (each with the template's own words) or that have nothing to learn.
    """
    faults = Faults()
    remaining = iter(rows)
    while batch := list(islice(remaining, _BATCH)):
        rendered = [found for row in batch if (found := _render(row, template, options, faults)) is not None]
        if not faults.total:  # after a fault the rest is only rendered, to find more
            for source, encoded in zip(rendered, tokenizer.encode([found.text for found in rendered]), strict=True):
                yield (
                    _chat(source, encoded, tokenizer, options)
                    if source.is_chat
                    else _plain(source, encoded, tokenizer, options)
                )
    faults.stop_if_any(
        "the chat template cannot render these rows", "mend the rows, or train with --template plain if none is a chat"
    )


def _render(row: Row, template: ChatTemplate | None, options: DataOptions, faults: Faults) -> _Rendered | None:
    match row:
        case TextRow():
            return _Rendered(row, row.text, [(0, len(row.text))], is_chat=False)
        case PairRow() if options.template == "plain" or (options.template == "auto" and template is None):
            text = row.prompt + row.response
            return _Rendered(row, text, [(len(row.prompt), len(text))], is_chat=False)
        case PairRow():
            messages: list[Message] = [
                {"role": "user", "content": row.prompt},
                {"role": "assistant", "content": row.response},
            ]
            return _render_chat(row, messages, None, _wanted(template, row, options), faults)
        case ChatRow():
            if options.loss_on == "response" and all(message["role"] != "assistant" for message in row.messages):
                roles = ", ".join(sorted({str(message["role"]) for message in row.messages}))
                faults.add(str(row.place), f'no message has the role "assistant" (roles: {roles}); nothing to learn')
                return None
            return _render_chat(row, row.messages, row.tools, _wanted(template, row, options), faults)


def _wanted(template: ChatTemplate | None, row: Row, options: DataOptions) -> ChatTemplate:
    if options.template == "plain":
        raise DataError(
            'a row of "messages" needs the chat template, which --template plain leaves unused',
            where=str(row.place),
            remedy="train with --template auto",
        )
    if template is None:
        raise DataError(
            "the row needs a chat template and the model folder has none",
            where=str(row.place),
            remedy="put the model's chat_template.jinja into the model folder",
        )
    return template


def _render_chat(
    row: Row, messages: Sequence[Message], tools: Tools, template: ChatTemplate, faults: Faults
) -> _Rendered | None:
    try:
        text, turns = render_chat(template, messages, tools)
    except TemplateRefusal as refusal:
        faults.add(str(row.place), f"the chat template says: {refusal.what}")
        return None
    return _Rendered(row, text, turns, is_chat=True)


def _chat(source: _Rendered, encoded: Encoded, tokenizer: Tokenizer, options: DataOptions) -> Document:
    closed = [close_turn(encoded, source.text, turn, tokenizer.ends) for turn in source.turns]
    turns = [turn for turn, _ in closed]
    return Document(
        place=source.row.place,
        tokens=encoded.ids,
        supervised=turns if options.loss_on == "response" else [(0, len(encoded.ids))],
        turn_ends=[past for _, past in turns],
        splits=False,
        open_turns=sum(not has_end for _, has_end in closed),
        text=source.text,
        offsets=encoded.offsets,
        lead=0,
    )


def _plain(source: _Rendered, encoded: Encoded, tokenizer: Tokenizer, options: DataOptions) -> Document:
    tokens, lead = tokenizer.plain(encoded, where=str(source.row.place))
    is_text = isinstance(source.row, TextRow)
    first = 0 if is_text or options.loss_on == "all" else lead + token_range(encoded, source.turns[0])[0]
    return Document(
        place=source.row.place,
        tokens=tokens,
        supervised=[(first, len(tokens))],
        turn_ends=[],
        splits=is_text,
        open_turns=0,
        text=source.text,
        offsets=encoded.offsets[: len(tokens) - lead - 1],
        lead=lead,
    )
