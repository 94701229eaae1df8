from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from npurt.data.tokens import Encoded, Tokenizer, close_turn, token_range
from npurt.errors import DataError


@pytest.fixture(scope="module")
def llama(model_folder: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_folder(model_folder("llama2"))


@pytest.fixture(scope="module")
def gpt(model_folder: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_folder(model_folder("chatml"))


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    (encoded,) = tokenizer.encode([text])
    tokens, lead = tokenizer.plain(encoded, where="x:1")
    assert tokens[lead : lead + 1] == encoded.ids[:1]
    return tokens


def test_plain_text_has_bos_as_the_tokenizer_gives_it_and_eos_once(
    llama: Tokenizer, gpt: Tokenizer, model_folder: Callable[..., Path], reference: Callable[[Path], Any]
) -> None:
    for family, tokenizer in (("llama2", llama), ("chatml", gpt)):
        expected = reference(model_folder(family))("hello world")["input_ids"]
        assert plain(tokenizer, "hello world") == [*expected, tokenizer.eos]
    assert llama.prefix == (llama.bos,)
    assert gpt.prefix == ()


@pytest.mark.parametrize("text", ["hello", "<s>hello", "hello</s>", "<s>hello</s>", "<s>hello</s></s></s>"])
def test_bos_and_eos_in_the_text_are_not_doubled(text: str, llama: Tokenizer) -> None:
    tokens = plain(llama, text)
    assert tokens.count(llama.bos or -1) == 1
    assert tokens.count(llama.eos or -1) == 1
    assert (tokens[0], tokens[-1]) == (llama.bos, llama.eos)


def test_eos_within_a_text_stays(llama: Tokenizer) -> None:
    assert plain(llama, "one</s>two").count(llama.eos or -1) == 2


def test_a_tokenizer_that_adds_eos_itself_does_not_double_it(model_folder: Callable[..., Path]) -> None:
    from tokenizers import processors

    def add_both(backend: Backend) -> None:
        ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="$A $B", special_tokens=ids)

    tokenizer = Tokenizer.from_folder(model_folder("llama2", change=add_both))
    tokens = plain(tokenizer, "hello")
    assert (tokens.count(tokenizer.bos or -1), tokens.count(tokenizer.eos or -1)) == (1, 1)


def test_limits_and_padding_saved_with_the_tokenizer_do_nothing(model_folder: Callable[..., Path]) -> None:
    def limit(backend: Backend) -> None:
        backend.enable_truncation(4)
        backend.enable_padding(length=64)

    short = Tokenizer.from_folder(model_folder("chatml", change=limit))
    free = Tokenizer.from_folder(model_folder("chatml"))
    text = "What is the capital of France? The capital of France is Paris."
    assert short.encode([text, "a"]) == free.encode([text, "a"])


def test_eos_comes_from_config_json_where_the_tokenizer_names_none(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("chatml", config={"eos_token": None})
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert Tokenizer.from_folder(folder).eos == 2


def test_no_eos_at_all_is_refused_for_plain_text_only(model_folder: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_folder(model_folder("chatml", config={"eos_token": None}))
    (encoded,) = tokenizer.encode(["a"])
    with pytest.raises(DataError, match="end-of-sequence") as caught:
        tokenizer.plain(encoded, where="x:7")
    assert caught.value.where == "x:7"


def test_a_named_token_that_is_missing_is_refused(model_folder: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"eos_token '<\|end\|>' is not in tokenizer.json"):
        Tokenizer.from_folder(model_folder("chatml", config={"eos_token": "<|end|>"}))


def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "save_pretrained" in (caught.value.remedy or "")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_bos_is_no_end_unless_it_is_eos(model_folder: Callable[..., Path]) -> None:
    chatml = Tokenizer.from_folder(model_folder("chatml"))
    assert chatml.bos not in chatml.ends
    assert chatml.eos in chatml.ends
    both = Tokenizer.from_folder(model_folder("endless", config={"bos_token": "<|endoftext|>"}))
    assert both.bos == both.eos
    assert both.eos in both.ends


@given(st.text(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_character_is_without_a_token(gpt: Tokenizer, text: str) -> None:
    """Offsets are not trimmed: a blank or a newline at the border of a turn belongs to the token that writes it."""
    (encoded,) = gpt.encode([text])
    covered = {at for start, end in encoded.offsets for at in range(start, end)}
    assert covered == set(range(len(text)))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 50), st.integers(0, 50))
def test_a_range_has_the_tokens_that_overlap_its_span(widths: list[int], one: int, other: int) -> None:
    offsets, at = [], 0
    for width in widths:
        offsets.append((at, at + width))
        at += width
    start, end = sorted((min(one, at), min(other, at)))
    first, past = token_range(Encoded(list(range(len(offsets))), offsets), (start, end))
    overlapping = [index for index, (low, high) in enumerate(offsets) if high > start and low < end]
    if start < end:
        assert list(range(first, past)) == overlapping


def test_close_turn_takes_the_blanks_before_the_end_and_not_those_behind(gpt: Tokenizer) -> None:
    text = "hello \n<|im_end|>\n<|im_start|>"
    (encoded,) = gpt.encode([text])
    (first, past), closed = close_turn(encoded, text, (0, 5), gpt.ends)
    assert closed
    assert first == 0
    assert encoded.ids[past - 1] == gpt.eos
    assert close_turn(encoded, text, (0, text.index("<|im_start|>")), gpt.ends) == ((first, past), True)


def test_close_turn_does_not_take_what_begins_the_next_turn(gpt: Tokenizer) -> None:
    text = "hello\n<|im_start|>user"
    (encoded,) = gpt.encode([text])
    (_, past), closed = close_turn(encoded, text, (0, 6), gpt.ends)
    assert not closed
    assert encoded.offsets[past - 1][1] == len("hello")


def test_an_end_that_swallows_the_blanks_around_it(model_folder: Callable[..., Path]) -> None:
    from tokenizers import AddedToken

    def greedy(backend: Backend) -> None:
        backend.add_special_tokens([AddedToken("<|stop|>", lstrip=True, rstrip=True, special=True)])

    tokenizer = Tokenizer.from_folder(model_folder("chatml", change=greedy))
    text = "hello \n<|stop|>\nuser"
    (encoded,) = tokenizer.encode([text])
    (_, past), closed = close_turn(encoded, text, (0, 5), tokenizer.ends)
    assert closed
    assert tokenizer.text_of(encoded.ids[past - 1]) == "<|stop|>"
