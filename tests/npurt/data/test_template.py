"""What is rendered equals what transformers renders from the same folder, byte for byte."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from npurt.data.template import ChatTemplate, TemplateRefusal
from npurt.data.tokens import Tokenizer
from npurt.errors import DataError

CLOCK = dt.datetime(2026, 12, 1, 9, 30)  # noqa: DTZ001 -- as templates see it, without a zone
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": 'in <°C> & "rain"', "parameters": {"b": 1, "a": []}},
    }
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}],
}
USER, ASSISTANT = {"role": "user", "content": "Hi <b>there</b> 🙂"}, {"role": "assistant", "content": " Hello!\n"}
SYSTEM = {"role": "system", "content": "Be {{ brief }}. {% raw %}"}
THINKING = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
REASONING = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER, ASSISTANT],
    "system": [SYSTEM, USER, ASSISTANT],
    "two turns": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Why?", "name": None}, ASSISTANT],
    "question": [USER],
    "assistant first": [ASSISTANT, USER, ASSISTANT],
    "user twice": [USER, USER, ASSISTANT],
    "tool call": [USER, CALL, {"role": "tool", "content": '{"rain": true}'}, ASSISTANT],
    "thinking": [USER, THINKING, USER, THINKING],
    "reasoning": [USER, {"role": "assistant", "content": "Yes.", "reasoning": "hm"}, USER, REASONING],
    "empty system": [{"role": "system", "content": ""}, USER, ASSISTANT],
}


def open_template(folder: Path, clock: dt.datetime = CLOCK) -> ChatTemplate:
    template = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder).special_tokens, clock)
    assert template is not None
    return template


@pytest.fixture
def fixed_reference(reference: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """The reference with its clock at `CLOCK`."""
    from transformers.utils import chat_template_utils

    class FixedClock(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> FixedClock:
            return cls(CLOCK.year, CLOCK.month, CLOCK.day, CLOCK.hour, CLOCK.minute, tzinfo=tz)

    monkeypatch.setattr(chat_template_utils, "datetime", FixedClock)
    return reference


def rendered_by(render: Callable[[], str], errors: tuple[type[Exception], ...]) -> str:
    """What is rendered, or the last words."""
    try:
        return render()
    except errors as error:
        return f"refused: {getattr(error, 'what', error)}"


def assert_renders_as(ours: ChatTemplate, theirs: Any, chat: list[dict[str, Any]], tools: Any, *, prompt: bool) -> None:
    import jinja2

    expected = rendered_by(
        lambda: theirs.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=prompt),
        (jinja2.TemplateError, TypeError),
    )
    found = rendered_by(lambda: ours.render(chat, tools=tools, generation_prompt=prompt), (TemplateRefusal,))
    assert found.replace("refused: TypeError: ", "refused: ") == expected
    if not expected.startswith("refused: "):
        assert ours.render_with_blocks(chat, tools=tools)[0] == ours.render(chat, tools=tools)


def test_every_family_renders_as_the_reference(
    families: Sequence[str], model_folder: Callable[..., Path], fixed_reference: Callable[[Path], Any]
) -> None:
    rendered = 0
    for family in families:
        folder = model_folder(family)
        ours, theirs = open_template(folder), fixed_reference(folder)
        for chat in CHATS.values():
            for tools in (None, TOOLS):
                for prompt in (False, True):
                    assert_renders_as(ours, theirs, chat, tools, prompt=prompt)
                    rendered += 1
    assert rendered == len(families) * len(CHATS) * 4


def test_smollm2_renders_as_the_reference(smollm2_dir: Path, reference: Callable[[Path], Any]) -> None:
    ours, theirs = open_template(smollm2_dir), reference(smollm2_dir)
    for name in ("one turn", "system", "two turns", "question", "assistant first", "empty system"):
        for prompt in (False, True):
            assert_renders_as(ours, theirs, CHATS[name], None, prompt=prompt)
    assert "SmolLM, trained by Hugging Face" in ours.render(CHATS["question"])  # the default system prompt
    assert "SmolLM, trained by Hugging Face" not in ours.render(CHATS["system"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson(indent=2) }}",
        "{{ messages | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}",
        "{% for m in messages %}\n  {%- if loop.index > 1 %}{% break %}{% endif %}\n  {{ m.role }}\n{% endfor %}\n",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ dict(a=1, b=2) }}{{ dict.fromkeys(['x', 'y'], 0) }}{{ dict.__class__ }}",
        "{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ mask_token is defined }}{{ documents }}{{ tools }}",
        "{{ strftime_now('%Y-%m-%d %H:%M %Z') }}",
        "{{ messages[0].name is defined }}{{ messages[3].name is defined }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].__class__.__init__.__globals__ }}",
        "{{ nothing.at.all }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ raise_exception('because') }}",
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{% filter upper %}b{% endfilter %}\n\n",
        "a{% generation %}b{{ messages[0].content }}{% endgeneration %}c",
    ],
)
def test_the_environment_is_the_references(
    source: str, model_folder: Callable[..., Path], fixed_reference: Callable[[Path], Any]
) -> None:
    import jinja2

    folder = model_folder("chatml", template=source)
    chat = CHATS["two turns"]
    expected = rendered_by(
        lambda: fixed_reference(folder).apply_chat_template(chat, tokenize=False), (jinja2.TemplateError, TypeError)
    )
    found = rendered_by(lambda: open_template(folder).render(chat), (TemplateRefusal,))
    if "_" in source and expected.startswith("refused"):
        assert found.startswith("refused")  # our own words for what the sandbox forbids
    else:
        assert found.replace("refused: TypeError: ", "refused: ") == expected


@pytest.mark.parametrize(
    "configured",
    [
        "{{ messages[0].content }} from the configuration",
        [{"name": "tool_use", "template": "tools {{ tools | length }}"}, {"name": "default", "template": "none"}],
    ],
)
def test_templates_in_tokenizer_config(
    configured: Any, model_folder: Callable[..., Path], reference: Callable[[Path], Any]
) -> None:
    folder = model_folder("chatml", template=None, config={"chat_template": configured})
    ours, theirs = open_template(folder), reference(folder)
    for tools in (None, TOOLS):
        assert_renders_as(ours, theirs, CHATS["one turn"], tools, prompt=False)


def test_the_file_wins_over_the_configuration(
    model_folder: Callable[..., Path], reference: Callable[[Path], Any]
) -> None:
    folder = model_folder("chatml", template="file", config={"chat_template": "configuration"})
    assert open_template(folder).render([USER]) == "file"
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("with tools")
    ours, theirs = open_template(folder), reference(folder)
    for tools in (None, TOOLS):
        assert_renders_as(ours, theirs, [USER], tools, prompt=False)
    assert ours.render([USER], tools=TOOLS) == "with tools"


def test_special_tokens_as_objects_and_in_their_own_file(
    model_folder: Callable[..., Path], reference: Callable[[Path], Any]
) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    folder = model_folder(
        "llama3", template=template, config={"eos_token": {"__type": "AddedToken", "content": "<|eot_id|>"}}
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|endoftext|>"}}))
    ours = open_template(folder)
    assert ours.render([USER]) == "<|endoftext|>|<|eot_id|>|<|eot_id|>"
    assert ours.render([USER]) == reference(folder).apply_chat_template([USER], tokenize=False)


def test_a_folder_without_template_has_none(model_folder: Callable[..., Path]) -> None:
    assert ChatTemplate.from_folder(model_folder("chatml", template=None), {}, CLOCK) is None


@pytest.mark.parametrize("configured", [3, [{"name": "default"}], {"default": "x"}, [{"name": "a", "template": "x"}]])
def test_templates_of_no_known_form_are_refused(configured: Any, model_folder: Callable[..., Path]) -> None:
    folder = model_folder("chatml", template=None, config={"chat_template": configured})
    with pytest.raises(DataError, match=r"chat.template") as caught:
        ChatTemplate.from_folder(folder, {}, CLOCK)
    assert caught.value.where == str(folder / "tokenizer_config.json")


def test_a_template_that_does_not_compile_is_placed() -> None:
    template = ChatTemplate({"default": "ok\n{% if %}"}, {}, CLOCK, "model/chat_template.jinja")
    with pytest.raises(DataError, match="not valid jinja2") as caught:
        template.render([USER])
    assert caught.value.where == "model/chat_template.jinja, line 2 of the template"


@pytest.mark.parametrize("text", ["{", "[]", '"x"', ""])
def test_a_broken_tokenizer_config_names_its_file(text: str, model_folder: Callable[..., Path]) -> None:
    folder = model_folder("chatml", template=None)
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(DataError) as caught:
        ChatTemplate.from_folder(folder, {}, CLOCK)
    assert caught.value.where == str(folder / "tokenizer_config.json")


def test_a_template_that_is_not_utf8_names_its_file(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("chatml")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match="UTF-8"):
        ChatTemplate.from_folder(folder, {}, CLOCK)


def test_the_clock_can_be_set(model_folder: Callable[..., Path]) -> None:
    template = open_template(model_folder("llama3"))
    assert "Today Date: 01 Dec 2026" in template.render([USER])


def test_rendering_leaves_the_messages_alone(model_folder: Callable[..., Path]) -> None:
    chat = [dict(message) for message in CHATS["reasoning"]]
    open_template(model_folder("thinking")).render(chat)
    assert chat == CHATS["reasoning"]


def test_a_template_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(DataError, match="nested too deeply"):
        ChatTemplate({"default": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"}, {}, CLOCK, "a").render([USER])
