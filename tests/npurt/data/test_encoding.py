from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from npubundle.errors import ExitCode
from npurt.data.encoding import Document, encode_rows
from npurt.data.jsonl import read_rows
from npurt.data.options import DataOptions
from npurt.data.template import ChatTemplate
from npurt.data.tokens import Tokenizer
from npurt.errors import DataError

CLOCK = dt.datetime(2026, 12, 1)  # noqa: DTZ001 -- as templates see it, without a zone
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
PAIR = {"prompt": "Hi", "response": "Hello"}


def encode(folder: Path, rows: Path, options: DataOptions | None = None) -> list[Document]:
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer.special_tokens, CLOCK)
    return list(encode_rows(read_rows([rows]).rows, tokenizer, template, options or DataOptions()))


def supervised_tokens(document: Document) -> list[int]:
    return [token for first, past in document.supervised for token in document.tokens[first:past]]


def test_chats_are_tokenized_as_the_reference_tokenizes_them(
    families: Sequence[str],
    model_folder: Callable[..., Path],
    write_rows: Callable[..., Path],
    reference: Callable[[Path], Any],
    smollm2_dir: Path,
) -> None:
    chat = [
        {"role": "user", "content": "What is  the capital\nof France? 🙂"},
        {"role": "assistant", "content": "Paris,\n\n  señor."},
        {"role": "user", "content": "Thanks <|im_end|> </s>"},
    ]
    folders = [model_folder(family) for family in families if family != "llama3"]  # llama3 writes the date
    for folder in [*folders, smollm2_dir]:
        (document,) = encode(folder, write_rows({"messages": chat}))
        theirs = reference(folder)
        assert document.tokens == theirs.apply_chat_template(chat)["input_ids"]
        assert document.tokens.count(theirs.bos_token_id) == document.text.count(theirs.bos_token)


def test_bos_of_the_template_is_not_doubled(model_folder: Callable[..., Path], write_rows: Callable[..., Path]) -> None:
    folder = model_folder("mistral")
    bos = Tokenizer.from_folder(folder).bos
    assert bos is not None
    (document,) = encode(folder, write_rows(CHAT))
    assert document.tokens.count(bos) == 1
    assert document.tokens[0] == bos


def test_every_token_of_a_text_is_supervised_and_eos_once(
    model_folder: Callable[..., Path], write_rows: Callable[..., Path]
) -> None:
    for family in ("llama2", "chatml"):
        folder = model_folder(family)
        eos = Tokenizer.from_folder(folder).eos
        assert eos is not None
        for loss_on in ("response", "all"):
            (document,) = encode(folder, write_rows({"text": "hello world"}), DataOptions(loss_on=loss_on))
            assert supervised_tokens(document) == document.tokens
            assert document.tokens[-1] == eos
            assert document.tokens.count(eos) == 1


def test_eos_is_learned_although_it_is_the_padding_token(
    model_folder: Callable[..., Path], write_rows: Callable[..., Path]
) -> None:
    folder = model_folder("chatml")  # pad_token and eos_token are one there
    tokenizer = Tokenizer.from_folder(folder)
    for row in ({"text": "hello"}, PAIR, CHAT):
        (document,) = encode(folder, write_rows(row))
        assert tokenizer.eos in supervised_tokens(document)


def test_a_pair_is_a_chat_where_the_model_has_a_template(
    model_folder: Callable[..., Path], write_rows: Callable[..., Path]
) -> None:
    folder = model_folder("qwen")
    (chat,), (pair,) = encode(folder, write_rows(CHAT)), encode(folder, write_rows(PAIR))
    assert (pair.tokens, pair.supervised) == (chat.tokens, chat.supervised)
    (forced,) = encode(folder, write_rows(PAIR), DataOptions(template="chat"))
    assert forced.tokens == chat.tokens


@pytest.mark.parametrize("family", ["llama2", "chatml"])
def test_a_plain_pair_is_prompt_response_and_eos(
    family: str, model_folder: Callable[..., Path], write_rows: Callable[..., Path]
) -> None:
    row = {"prompt": "Question: What is the capital of France?\nAnswer:", "completion": " Paris"}
    for folder, options in (
        (model_folder(family), DataOptions(template="plain")),
        (model_folder(family, template=None), DataOptions()),
    ):
        tokenizer = Tokenizer.from_folder(folder)
        (document,) = encode(folder, write_rows(row), options)
        (encoded,) = tokenizer.encode([row["prompt"] + row["completion"]])
        assert document.tokens == [*tokenizer.prefix, *encoded.ids, tokenizer.eos]
        first, past = document.supervised[0]
        assert past == len(document.tokens)
        assert document.text[document.offsets[first - document.lead][0] :] == " Paris"
        assert not document.splits


def test_loss_on_all_supervises_prompts_too(model_folder: Callable[..., Path], write_rows: Callable[..., Path]) -> None:
    folder = model_folder("chatml")
    everything = DataOptions(loss_on="all")
    for row, options in ((CHAT, everything), (PAIR, everything), (PAIR, DataOptions("plain", "all"))):
        (document,) = encode(folder, write_rows(row), options)
        assert supervised_tokens(document) == document.tokens


def test_refusals_carry_row_and_the_templates_words(
    model_folder: Callable[..., Path], write_rows: Callable[..., Path]
) -> None:
    user, assistant = CHAT["messages"]
    rows = write_rows(
        CHAT,
        {"messages": [{"role": "system", "content": "Be brief."}, user, assistant]},
        {"messages": [user, user, assistant]},
        CHAT,
        {"messages": [assistant]},
    )
    with pytest.raises(DataError) as caught:
        encode(model_folder("llama2"), rows)
    assert caught.value.exit_code == ExitCode.DATA
    alternate = "the chat template says: Conversation roles must alternate user/assistant/user/assistant/..."
    assert [str(problem) for problem in caught.value.problems] == [
        f"{rows}:2: the chat template says: System role not supported",
        f"{rows}:3: {alternate}",
        f"{rows}:5: {alternate}",
    ]


def test_faults_of_expressions_are_named(model_folder: Callable[..., Path], write_rows: Callable[..., Path]) -> None:
    folder = model_folder("chatml", template="{{ messages[0].content + messages[0].turn }}")
    with pytest.raises(DataError) as caught:
        encode(folder, write_rows({"messages": [{"role": "assistant", "content": "x", "turn": 1}]}))
    assert "TypeError: can only concatenate str" in caught.value.problems[0].what


def test_a_chat_without_assistant_is_refused_with_its_roles(
    model_folder: Callable[..., Path], write_rows: Callable[..., Path]
) -> None:
    rows = write_rows(*[{"messages": [{"role": "user", "content": "x"}, {"role": "gpt", "content": "y"}]}] * 30)
    with pytest.raises(DataError, match="30 faults, the first 20") as caught:
        encode(model_folder("chatml"), rows)
    assert 'no message has the role "assistant" (roles: gpt, user)' in caught.value.problems[0].what
    assert len(encode(model_folder("chatml"), rows, DataOptions(loss_on="all"))) == 30


def test_missing_or_unwanted_templates_are_refused(
    model_folder: Callable[..., Path], write_rows: Callable[..., Path]
) -> None:
    rows = write_rows({"text": "a"}, CHAT)
    with pytest.raises(DataError, match="model folder has none") as caught:
        encode(model_folder("chatml", template=None), rows)
    assert caught.value.where == f"{rows}:2"
    with pytest.raises(DataError, match="--template plain"):
        encode(model_folder("chatml"), rows, DataOptions(template="plain"))
    with pytest.raises(DataError, match="model folder has none"):
        encode(model_folder("chatml", template=None), write_rows(PAIR), DataOptions(template="chat"))


def test_turns_that_the_template_leaves_open_are_counted(
    model_folder: Callable[..., Path], write_rows: Callable[..., Path]
) -> None:
    (open_ended,) = encode(model_folder("endless"), write_rows(CHAT))
    (closed,) = encode(model_folder("chatml"), write_rows(CHAT))
    assert (open_ended.open_turns, closed.open_turns) == (1, 0)
