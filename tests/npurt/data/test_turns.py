"""The assistant's turns are found in every family of templates, and refused where they cannot be."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from npurt.data.encoding import encode_rows
from npurt.data.faults import Place
from npurt.data.options import DataOptions
from npurt.data.rows import ChatRow
from npurt.data.template import ChatTemplate, TemplateRefusal
from npurt.data.tokens import Tokenizer
from npurt.data.turns import render_chat

CLOCK = dt.datetime(2026, 12, 1)  # noqa: DTZ001 -- as templates see it, without a zone
A, B = {"role": "user", "content": "What is the capital of France?"}, {"role": "user", "content": "And of Spain? 🙂"}
PARIS, MADRID = {"role": "assistant", "content": "Paris."}, {"role": "assistant", "content": "Madrid, señor 🙂."}
CHAT = [A, PARIS, B, MADRID]
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
}


def supervised(folder: Path, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The supervised texts, as the tokens of the document give them back."""
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer.special_tokens, CLOCK)
    row = ChatRow(Place("x", 1), tuple(dict(message) for message in messages))
    (document,) = encode_rows([row], tokenizer, template, DataOptions())
    texts = []
    for first, past in document.supervised:
        texts.append(document.text[document.offsets[first][0] : document.offsets[past - 1][1]])
        decoded = tokenizer._backend.decode(document.tokens[first:past], skip_special_tokens=False)
        assert decoded.strip() == texts[-1].strip()
    assert document.turn_ends == [past for _, past in document.supervised]
    return texts


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("chatml", ["Paris.<|im_end|>", "Madrid, señor 🙂.<|im_end|>"]),
        ("qwen", ["Paris.<|im_end|>", "Madrid, señor 🙂.<|im_end|>"]),
        ("generation", ["Paris.<|im_end|>", "Madrid, señor 🙂.<|im_end|>"]),
        ("llama3", ["Paris.<|eot_id|>", "Madrid, señor 🙂.<|eot_id|>"]),
        ("endless", ["Paris.", "Madrid, señor 🙂."]),
        # No prompt for answers: the model writes the blank, too.
        ("mistral", [" Paris.</s>", " Madrid, señor 🙂.</s>"]),
        ("llama2", [" Paris. </s>", " Madrid, señor 🙂. </s>"]),
    ],
)
def test_every_turn_with_its_end_and_nothing_else(
    family: str, expected: list[str], model_folder: Callable[..., Path]
) -> None:
    assert supervised(model_folder(family), CHAT) == expected
    assert supervised(model_folder(family), CHAT[:2]) == expected[:1]
    assert supervised(model_folder(family), CHAT[:3]) == expected[:1]


def test_smollm2(smollm2_dir: Path) -> None:
    assert supervised(smollm2_dir, CHAT) == ["Paris.<|im_end|>", "Madrid, señor 🙂.<|im_end|>"]


@pytest.mark.parametrize("family", ["chatml", "qwen", "generation", "llama3"])
def test_an_assistant_may_open_the_chat_and_speak_twice(family: str, model_folder: Callable[..., Path]) -> None:
    end = "<|eot_id|>" if family == "llama3" else "<|im_end|>"
    found = supervised(model_folder(family), [PARIS, A, MADRID, PARIS])
    assert found == [f"Paris.{end}", f"Madrid, señor 🙂.{end}", f"Paris.{end}"]


def test_a_system_prompt_that_moves_to_the_last_user_turn(model_folder: Callable[..., Path]) -> None:
    # The beginning of this chat, rendered alone, has the system prompt elsewhere.
    folder = model_folder("mistral")
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert supervised(folder, chat) == [" Paris.</s>", " Madrid, señor 🙂.</s>"]


def test_a_last_turn_that_ends_otherwise_than_the_others(model_folder: Callable[..., Path]) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'user' or loop.last %}<|im_end|>{% else %} # {% endif %}{% endfor %}" + _PROMPT
    )
    assert supervised(model_folder("chatml", template=source), CHAT) == ["Paris.", "Madrid, señor 🙂.<|im_end|>"]


def test_reasoning_that_is_dropped_from_earlier_turns(model_folder: Callable[..., Path]) -> None:
    def thinks(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{text}"}

    found = supervised(model_folder("thinking"), [A, thinks("Paris."), B, thinks("Madrid.")])
    assert found == ["Paris.<|im_end|>", "hm\n</think>\n\nMadrid.<|im_end|>"]


def test_tool_calls_are_part_of_the_turn(model_folder: Callable[..., Path]) -> None:
    chat = [A, CALL, {"role": "tool", "content": "12"}, PARIS]
    assert supervised(model_folder("qwen"), chat) == [
        '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'.lstrip("\n"),
        "Paris.<|im_end|>",
    ]
    assert supervised(model_folder("llama3"), chat) == [
        '{"name": "f", "parameters": {"x": 1}}<|eot_id|>',
        "Paris.<|eot_id|>",
    ]


def test_a_user_who_says_the_same_is_not_taken_for_the_assistant(model_folder: Callable[..., Path]) -> None:
    same = {"role": "user", "content": "Paris."}
    assert supervised(model_folder("mistral"), [same, PARIS, same, PARIS]) == [" Paris.</s>"] * 2
    assert supervised(model_folder("chatml"), [same, PARIS, same, PARIS]) == ["Paris.<|im_end|>"] * 2


def test_a_generation_block_without_the_end_gets_it(model_folder: Callable[..., Path]) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    folder = model_folder("generation", template=source)
    assert supervised(folder, CHAT) == ["Paris.<|im_end|>", "Madrid, señor 🙂.<|im_end|>"]


def test_a_generation_block_with_the_end_does_not_take_the_next_header(model_folder: Callable[..., Path]) -> None:
    source = (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    )
    folder = model_folder("llama3", template=source)
    assert supervised(folder, CHAT) == ["Paris.<|eot_id|>", "Madrid, señor 🙂.<|eot_id|>"]


_IN_A_MACRO = (
    "{% macro say(m) %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ say(m) if m.role == 'assistant' else m.content + '<|im_end|>' }}\n{% endfor %}"
)
_IN_A_SET = (
    "{% for m in messages %}{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"
    "<|im_start|>{{ m.role }}\n{{ x }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("body", [_IN_A_MACRO + _PROMPT, _IN_A_SET + _PROMPT], ids=["macro", "set"])
def test_generation_blocks_at_untrue_places_are_not_believed(body: str, model_folder: Callable[..., Path]) -> None:
    folder = model_folder("generation", template=body)
    assert supervised(folder, CHAT) == ["Paris.<|im_end|>", "Madrid, señor 🙂.<|im_end|>"]


def test_the_mask_is_the_references_where_it_has_one(
    model_folder: Callable[..., Path], reference: Callable[[Path], Any]
) -> None:
    folder = model_folder("generation")
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer.special_tokens, CLOCK)
    (document,) = encode_rows([ChatRow(Place("x", 1), tuple(CHAT))], tokenizer, template, DataOptions())
    expected = reference(folder).apply_chat_template(CHAT, return_assistant_tokens_mask=True)
    assert document.tokens == expected["input_ids"]
    mask = [0] * len(document.tokens)
    for first, past in document.supervised:
        mask[first:past] = [1] * (past - first)
    assert mask == expected["assistant_masks"]


_ONLY_USERS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
_TWICE = "{% for m in messages %}{{ m.content | upper }}{% endfor %}{{ messages | length }}{{ messages[1].content }}"


@pytest.mark.parametrize("source", [_ONLY_USERS, _TWICE], ids=["leaves turns out", "says them twice"])
def test_a_turn_that_cannot_be_found_is_refused(source: str, model_folder: Callable[..., Path]) -> None:
    folder = model_folder("chatml", template=source)
    template = ChatTemplate.from_folder(folder, {}, CLOCK)
    assert template
    with pytest.raises(TemplateRefusal, match=r"message 2 \(assistant\) cannot be found"):
        render_chat(template, CHAT[:2])
