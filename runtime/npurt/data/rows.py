"""The shapes that a row of training data may have, and the checks that tell them apart.

A row is one of `{"text"}`, `{"prompt", "response"}` (or `"completion"`) and `{"messages"}`. Keys that belong to no
shape are ignored, since files carry ids, sources and scores along. What a shape needs is checked here to the last
value, so that nothing later meets a number where it expects text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from npurt.data.faults import Place

Message: TypeAlias = dict[str, Any]
"""One message of a chat, as the JSON has it: `role`, `content`, and whatever else the chat template reads."""

Report: TypeAlias = Callable[[Sequence[str | int], str], None]
"""Notes a fault: the path of the faulty value within the row, and what is wrong with it."""

# Messages of these roles must say something; an empty system prompt or tool result means what it says.
_SPEAKING_ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class TextRow:
    """Plain text, to be learned token by token."""

    place: Place
    text: str


@dataclass(frozen=True, slots=True)
class PairRow:
    """A prompt and the response to learn."""

    place: Place
    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation; what the assistant says is to be learned."""

    place: Place
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None


Row: TypeAlias = TextRow | PairRow | ChatRow


def parse_row(value: object, place: Place, report: Report) -> Row | None:
    """The row that a decoded line holds, or None when something was wrong with it and has been reported."""
    if not isinstance(value, dict):
        report((), f"a row is an object, this is {_kind(value)}")
        return None
    shapes = _shapes(value)
    if len(shapes) > 1:
        report((), f"the row has {len(shapes)} shapes at once ({' and '.join(shapes)}); keep one of them")
        return None
    if not shapes:
        report(*_why_no_shape(value))
        return None
    match shapes[0]:
        case "text":
            return TextRow(place, value["text"]) if _speaks(value, "text", report) else None
        case "messages":
            return _parse_chat(value, place, report)
        case _:
            answer = "response" if value.get("response") is not None else "completion"
            # Both are looked at before either is refused, so that one run reports both.
            good = [_speaks(value, key, report) for key in ("prompt", answer)]
            return PairRow(place, value["prompt"], value[answer]) if all(good) else None


def _shapes(row: Mapping[str, Any]) -> list[str]:
    """The shapes that `row` has in full. A null is no value: tools that write mixed files fill absent keys with it."""
    present = {key for key in ("text", "prompt", "response", "completion", "messages") if row.get(key) is not None}
    shapes = ["text"] if "text" in present else []
    if "prompt" in present:
        shapes += [f"prompt/{answer}" for answer in ("response", "completion") if answer in present]
    return shapes + (["messages"] if "messages" in present else [])


def _why_no_shape(row: Mapping[str, Any]) -> tuple[Sequence[str | int], str]:
    for key in ("text", "messages", "prompt", "response", "completion"):
        if key in row and row[key] is None:
            return (key,), f'"{key}" is null'
    if "prompt" in row:
        return (), '"prompt" without "response" or "completion"'
    for answer in ("response", "completion"):
        if answer in row:
            return (), f'"{answer}" without "prompt"'
    if not row:
        return (), "the row is empty"
    wanted = '"text", "prompt" with "response" or "completion", or "messages"'
    return (), f"none of the known shapes: {wanted} wanted, {_keys(row)} found"


def _parse_chat(row: Mapping[str, Any], place: Place, report: Report) -> ChatRow | None:
    messages, tools = row["messages"], row.get("tools")
    good = True
    if not isinstance(messages, list) or not messages:
        found = "an empty array" if messages == [] else _kind(messages)
        report(("messages",), f'"messages" is an array of messages, this is {found}')
        good = False
    else:
        # First all are looked at, so that the faults of all are reported and not the first one's only.
        checked = [_check_message(message, ("messages", index), report) for index, message in enumerate(messages)]
        good = all(checked)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        report(("tools",), '"tools" is an array of objects, each a JSON schema of a function')
        good = False
    return ChatRow(place, tuple(messages), None if tools is None else tuple(tools)) if good else None


def _check_message(message: object, path: tuple[str | int, ...], report: Report) -> bool:
    if not isinstance(message, dict):
        report(path, f"a message is an object, this is {_kind(message)}")
        return False
    role, content = message.get("role"), message.get("content")
    calls_tools = role == "assistant" and bool(message.get("tool_calls"))
    missing = [key for key in ("role", "content") if key not in message and not (key == "content" and calls_tools)]
    faults: list[tuple[tuple[str | int, ...], str]] = []
    if missing:
        wanted = " and no ".join(f'"{key}"' for key in missing)
        faults.append((path, f"the message has no {wanted} ({_keys(message)} found)"))
    if "role" in message and (not isinstance(role, str) or not role):
        faults.append(((*path, "role"), f'"role" is text, this is {_kind(role)}'))
    if "content" in message and not (content is None and calls_tools):
        if not isinstance(content, str):
            faults.append(((*path, "content"), f'"content" is text, this is {_kind(content)}'))
        elif not content.strip() and role in _SPEAKING_ROLES and not calls_tools:
            faults.append(((*path, "content"), f'"content" of the {role} is empty'))
    for where, what in faults:
        report(where, what)
    return not faults


def _speaks(row: Mapping[str, Any], key: str, report: Report) -> bool:
    """Whether `row[key]` is text that says something; reported if not."""
    value = row[key]
    if not isinstance(value, str):
        report((key,), f'"{key}" is text, this is {_kind(value)}')
        return False
    if not value.strip():
        report((key,), f'"{key}" is empty')
        return False
    return True


def _kind(value: object) -> str:
    """What JSON calls the value."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "text" if value else "empty text"
        case list():
            return "an array"
        case _:
            return "an object"


def _keys(row: Mapping[str, Any]) -> str:
    """The keys of an object for a message, a few of many."""
    shown = [f'"{key}"' for key in list(row)[:5]]
    return ", ".join(shown) + (", …" if len(row) > len(shown) else "") if shown else "nothing"
