"""The model's chat template: where it lies, what it is given, and what it renders.

The text must equal, byte for byte, what the reference (transformers' `apply_chat_template`) renders from the same
folder: a default system prompt that appears in training and not in serving, or the other way round, costs accuracy
silently.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npurt.data.model_folder import read_json, read_text
from npurt.data.rows import Message
from npurt.errors import DataError

if TYPE_CHECKING:
    import jinja2

    from npurt.data.chat_environment import GenerationBlocks

Span = tuple[int, int]

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Fields that hold a turn's reasoning, the standard name first. Templates read one or the other of the first two.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateRefusal(DataError):
    """The template cannot render a conversation; the message is the template's own."""


class ChatTemplate:
    """One model's chat template, compiled when it is first used. Not for use from several threads at once."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], clock: dt.datetime, where: str
    ) -> None:
        """`sources`: templates by name; `default` renders chats, `tool_use` (if there) those with tools."""
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._clock = clock
        self._where = where
        self._compiled: dict[str, tuple[jinja2.Template, GenerationBlocks]] = {}
        text = "".join(self._sources.values())
        self.has_generation_blocks = _GENERATION_TAG.search(text) is not None

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: Mapping[str, str], clock: dt.datetime) -> ChatTemplate | None:
        """The template of a model folder, None if it has none.

        `chat_template.jinja` and `additional_chat_templates/NAME.jinja` win over `chat_template` in
        tokenizer_config.json, which is one template or a list of named ones.
        """
        sources = _files(folder)
        where = folder / "chat_template.jinja"
        if not sources:
            where = folder / "tokenizer_config.json"
            sources = _configured(read_json(where, missing_ok=True).get("chat_template"), where)
        return cls(sources, special_tokens, clock, str(where)) if sources else None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation. Raises `TemplateRefusal` with the template's own words."""
        from npurt.data.chat_environment import TEMPLATE_ERRORS

        template, _ = self._template(tools)
        try:
            return template.render(self._variables(messages, tools, generation_prompt=generation_prompt))
        except TEMPLATE_ERRORS as error:
            raise self._refusal(error) from error

    def render_with_blocks(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[Span]]:
        """The text of a conversation and the (start, end) of its `{% generation %}` blocks."""
        from npurt.data.chat_environment import TEMPLATE_ERRORS

        template, blocks = self._template(tools)
        try:
            return blocks.watch(template.generate(self._variables(messages, tools, generation_prompt=False)))
        except TEMPLATE_ERRORS as error:
            raise self._refusal(error) from error

    def _variables(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, generation_prompt: bool
    ) -> dict[str, Any]:
        return {
            **self._special_tokens,
            "messages": [_as_templates_expect(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": generation_prompt,
        }

    def _template(self, tools: object) -> tuple[jinja2.Template, GenerationBlocks]:
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._compiled:
            import jinja2

            from npurt.data.chat_environment import chat_environment

            environment, blocks = chat_environment(self._clock)
            try:
                self._compiled[name] = environment.from_string(self._sources[name]), blocks
            except jinja2.TemplateSyntaxError as error:
                raise DataError(
                    f"the chat template is not valid jinja2: {error.message}",
                    where=f"{self._where}, line {error.lineno} of the template",
                    remedy="take the template from the model's publisher again",
                ) from error
            except RecursionError as error:
                raise DataError(
                    "the chat template is nested too deeply",
                    where=str(self._where),
                    remedy="take the template from the model's publisher again",
                ) from error
        return self._compiled[name]

    @staticmethod
    def _refusal(error: Exception) -> TemplateRefusal:
        from jinja2 import TemplateError

        said = str(error) or type(error).__name__
        # Python's words for a fault in an expression need the name of its kind to be understood.
        return TemplateRefusal(said if isinstance(error, TemplateError) else f"{type(error).__name__}: {said}")


def _as_templates_expect(message: Message) -> Message:
    """The message without nulls (templates would print "None"), its reasoning under the names that templates read."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[field] for field in _REASONING_FIELDS if field in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _files(folder: Path) -> dict[str, str]:
    sources = {}
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = read_text(folder / "chat_template.jinja")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        sources[path.stem] = read_text(path)
    return _with_default(sources, folder / "additional_chat_templates")


def _configured(value: object, where: Path) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list():
            named = {
                entry["name"]: entry["template"]
                for entry in value
                if isinstance(entry, dict)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            }
            if len(named) == len(value):
                return _with_default(named, where)
    raise DataError(
        '"chat_template" is neither text nor a list of {"name", "template"}',
        where=str(where),
        remedy="take the file from the model's publisher again",
    )


def _with_default(sources: dict[str, str], where: Path) -> dict[str, str]:
    if sources and "default" not in sources:
        raise DataError(
            f"of several chat templates ({', '.join(sorted(sources))}) none is called default",
            where=str(where),
            remedy="save the one to use as chat_template.jinja in the model folder",
        )
    return sources
