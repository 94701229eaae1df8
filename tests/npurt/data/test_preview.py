from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npurt.data.encoding import Document, encode_rows
from npurt.data.faults import Place
from npurt.data.options import DataOptions
from npurt.data.preview import preview
from npurt.data.rows import PairRow, Row, TextRow
from npurt.data.tokens import Tokenizer


@pytest.fixture(scope="module", params=["chatml", "llama2"])
def tokenizer(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_folder(model_folder(request.param))


def document_of(row: Row, tokenizer: Tokenizer) -> Document:
    (document,) = encode_rows([row], tokenizer, None, DataOptions())
    return document


def shown(document: Document, tokenizer: Tokenizer, end: int | None = None) -> str:
    return preview(document, (0, end or len(document.tokens)), tokenizer).split("\n", 1)[1]


def test_a_plain_pair_is_shown_with_its_special_tokens(tokenizer: Tokenizer) -> None:
    document = document_of(PairRow(Place("x", 3), "The capital:", " Paris 🙂"), tokenizer)
    bos, eos = (tokenizer.special_tokens[name] for name in ("bos_token", "eos_token"))
    expected = f"The capital:⟦ Paris 🙂{eos}⟧"
    assert shown(document, tokenizer) == (bos + expected if tokenizer.prefix else expected)


def test_the_first_token_is_never_marked(tokenizer: Tokenizer) -> None:
    text = shown(document_of(TextRow(Place("x", 1), "hello world"), tokenizer), tokenizer)
    assert not text.startswith("⟦")
    assert text.endswith("⟧")


def test_a_cut_row_is_shown_as_far_as_it_is_trained_on(tokenizer: Tokenizer) -> None:
    document = document_of(TextRow(Place("x", 1), "one two three four"), tokenizer)
    text = shown(document, tokenizer, end=4)
    assert "four" not in text
    assert tokenizer.special_tokens["eos_token"] not in text


@given(st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="⟦⟧"), min_size=1, max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_without_its_marks_the_preview_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    document = document_of(PairRow(Place("x", 1), "a" + text, text), tokenizer)
    plain = re.sub("[⟦⟧]", "", shown(document, tokenizer))
    tokens = tokenizer.special_tokens
    bare = plain.removesuffix(tokens["eos_token"])
    assert bare.removeprefix(tokens["bos_token"]) == "a" + text + text


def test_data_cannot_steer_the_terminal(tokenizer: Tokenizer) -> None:
    text = "a\x1b[2Jb\rc\u202ed\x9be\tf\ng"
    found = shown(document_of(TextRow(Place("x", 1), text), tokenizer), tokenizer)
    assert r"\x1b[2Jb\x0dc\u202ed\x9be" in re.sub("[⟦⟧]", "", found)
    assert "\tf\ng" in found
    assert not re.search("[\x1b\r\x9b\u202e]", found)


def test_colour_only_where_it_is_asked_for(tokenizer: Tokenizer) -> None:
    document = document_of(PairRow(Place("x", 1), "Hi", " there"), tokenizer)
    piece = (0, len(document.tokens))
    assert "\x1b" not in preview(document, piece, tokenizer)
    coloured = preview(document, piece, tokenizer, color=True)
    assert "\x1b[32m⟦ there" in coloured
    assert coloured.endswith("⟧\x1b[0m")


def test_long_rows_are_shortened(tokenizer: Tokenizer) -> None:
    document = document_of(PairRow(Place("x", 1), "Hi " * 2000, " there"), tokenizer)
    text = shown(document, tokenizer)
    assert "5,400 characters more" in re.sub(r"5,\d{3}", "5,400", text)
    assert len(text) < 800
    assert "⟦ there" in text
