r"""Finding what the assistant says in a rendered chat, with or without the template's help.

Few templates mark the assistant's text with `{% generation %}`. Where they do, the marks are taken. Otherwise each
assistant turn is found from renderings alone, in one of two ways, and each is checked against the text before it is
believed:

    prefixes    render(messages before the turn, with the prompt for an answer)   "…<|assistant|>\n"
                render(messages up to the turn)                                   "…<|assistant|>\nHi.<|end|>\n"
                Both must begin the whole text; the turn is the difference. This is what the model will have to write,
                the turn's header included if the template does not put that into the prompt.

    a marker    render the whole chat with a unique word in place of the turn's content. What stands before and after
                the word must stand so in the whole text too; the turn is what lies between. This also serves templates
                that render the beginning of a chat otherwise than the whole: that drop earlier reasoning, or put the
                system prompt into the last user turn.

A turn that neither finds is refused: to train on a guess would be worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from npurt.data.rows import Message
from npurt.data.template import ChatTemplate, Span, TemplateRefusal

Tools = Sequence[Mapping[str, Any]] | None


class RenderedChat(NamedTuple):
    """A chat's text and the (start, end) of each assistant turn in it, in characters, in order.

    A span may end before the end-of-turn token or after blanks behind it; `tokens.close_turn` settles that.
    """

    text: str
    turns: list[Span]


def render_chat(template: ChatTemplate, messages: Sequence[Message], tools: Tools = None) -> RenderedChat:
    """Render a chat and find its assistant turns.

    Raises `TemplateRefusal` if the template refuses the messages or an assistant turn cannot be found for certain.
    """
    if template.has_generation_blocks:
        text, spans = template.render_with_blocks(messages, tools=tools)
        if spans:
            return RenderedChat(text, spans)
    else:
        text = template.render(messages, tools=tools)
    turns = [
        _turn(template, messages, index, text, tools)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    return RenderedChat(text, turns)


def _turn(template: ChatTemplate, messages: Sequence[Message], index: int, text: str, tools: Tools) -> Span:
    span = _by_prefixes(template, messages, index, text, tools) or _by_marker(template, messages, index, text, tools)
    if span is None:
        raise TemplateRefusal(
            f"message {index + 1} (assistant) cannot be found in the rendered chat: the template leaves it out, or "
            "renders it in a way that depends on its content or on what follows"
        )
    return span


def _by_prefixes(
    template: ChatTemplate, messages: Sequence[Message], index: int, text: str, tools: Tools
) -> Span | None:
    try:
        before = template.render(messages[:index], tools=tools, generation_prompt=True)
        last = index == len(messages) - 1
        through = text if last else template.render(messages[: index + 1], tools=tools)
    except TemplateRefusal:
        return None  # the whole chat was rendered; its beginning alone need not be valid (an assistant who opens it)
    found = text.startswith(before) and text.startswith(through) and len(through) > len(before)
    return (len(before), len(through)) if found else None


def _by_marker(template: ChatTemplate, messages: Sequence[Message], index: int, text: str, tools: Tools) -> Span | None:
    message = messages[index]
    if not message.get("content") or message.get("tool_calls"):
        return None  # a turn that is more than its content
    marker = "AssistantSpeaksHere"
    while marker in text:
        marker += "X"
    marked_messages = [*messages[:index], {**message, "content": marker}, *messages[index + 1 :]]
    try:
        marked = template.render(marked_messages, tools=tools)
    except TemplateRefusal:
        return None
    left, found, right = marked.partition(marker)
    if not found or not text.startswith(left) or not text.endswith(right):
        return None  # also if the word came twice: the text does not have it
    # Most tokenizers make one token of a blank and the word behind it, so the model writes that blank.
    start, end = len(left.rstrip(" ")), len(text) - len(right)
    return (start, end) if start < end else None
