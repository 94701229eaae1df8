from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npubundle.errors import ExitCode
from npurt.data.faults import EXCERPT_WIDTH, FAULTS_SHOWN, column_of, excerpt
from npurt.data.jsonl import Rows, read_rows
from npurt.data.rows import ChatRow, PairRow, TextRow
from npurt.errors import DataError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["text", "prompt", "response", "completion", "messages", "role", "content", "tools", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def read(tmp_path: Path, content: bytes | str) -> Rows:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_rows([path])


def faults(tmp_path: Path, content: bytes | str) -> list[str]:
    """The faults found, without the folder's name."""
    with pytest.raises(DataError) as caught:
        read(tmp_path, content)
    assert caught.value.exit_code == ExitCode.DATA
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_all_shapes_in_one_file_and_extra_keys(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '{"text": "a", "id": 7, "meta": null}\n'
        '{"prompt": "b", "response": "c"}\n'
        '{"prompt": "d", "completion": "e", "score": 0.5}\n'
        '{"messages": [{"role": "user", "content": "f", "name": "Eve"}, {"role": "assistant", "content": "g"}]}\n',
    )
    text, first, second, chat = found.rows
    assert isinstance(text, TextRow)
    assert text.text == "a"
    assert isinstance(first, PairRow)
    assert isinstance(second, PairRow)
    assert (first.prompt, first.response, second.prompt, second.response) == ("b", "c", "d", "e")
    assert isinstance(chat, ChatRow)
    assert [message["content"] for message in chat.messages] == ["f", "g"]
    assert chat.messages[0]["name"] == "Eve"
    assert [row.place.line for row in found.rows] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n',
        b'{"text": "a"}\r\n{"text": "b"}\r\n',
        b'\r\n{"text": "a"}\n\n  \t\n{"text": "b"}',
        b'\xef\xbb\xbf{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n',
    ],
    ids=["byte-order mark", "CRLF", "blank lines and no last newline", "two files with marks joined"],
)
def test_line_ends_and_byte_order_marks_change_nothing(tmp_path: Path, content: bytes) -> None:
    rows = read(tmp_path, content).rows
    assert [row.text for row in rows if isinstance(row, TextRow)] == ["a", "b"]


def test_blank_lines_are_counted_and_keep_their_numbers(tmp_path: Path) -> None:
    found = read(tmp_path, '\n{"text": "a"}\n \n\n{"text": "b"}\n')
    assert found.blank_lines == 3
    assert [row.place.line for row in found.rows] == [2, 5]


def test_unicode_line_separators_are_text(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\x0b"
    (row,) = read(tmp_path, json.dumps({"text": text}, ensure_ascii=False)).rows
    assert isinstance(row, TextRow)
    assert row.text == text


def test_nulls_of_absent_shapes_are_no_shapes(tmp_path: Path) -> None:
    (row,) = read(tmp_path, '{"text": null, "prompt": "p", "response": null, "completion": "c", "messages": null}').rows
    assert isinstance(row, PairRow)
    assert row.response == "c"


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    rows = read_rows([tmp_path / "b", tmp_path / "a"]).rows
    assert [str(row.place) for row in rows] == [f"{tmp_path / 'b'}:1", f"{tmp_path / 'a'}:1"]


@pytest.mark.parametrize(
    ("line", "column", "words"),
    [
        ('{"text": 17}', 10, '"text" is text, this is a number'),
        ('{"text": ""}', 10, '"text" is empty'),
        ('{"text": " \\n"}', 10, '"text" is empty'),
        ('{"text": null}', 10, '"text" is null'),
        ('{"text": ["a"]}', 10, "this is an array"),
        ("{}", 1, "the row is empty"),
        ('"text"', 1, "a row is an object, this is text"),
        ("17", 1, "a row is an object, this is a number"),
        ("null", 1, "a row is an object, this is null"),
        ('{"body": "x"}', 1, '"body" found'),
        ('{"prompt": "x"}', 1, '"prompt" without "response" or "completion"'),
        ('{"response": "x"}', 1, '"response" without "prompt"'),
        ('{"prompt": "x", "response": null}', 29, '"response" is null'),
        ('{"prompt": "x", "response": 4}', 29, '"response" is text, this is a number'),
        ('{"prompt": "", "response": "y"}', 12, '"prompt" is empty'),
        ('{"prompt": "x", "response": "y", "completion": "z"}', 1, "2 shapes at once"),
        ('{"text": "x", "messages": [{"role": "user", "content": "y"}]}', 1, "text and messages"),
        ('{"messages": []}', 14, "an empty array"),
        ('{"messages": "hello"}', 14, "an array of messages, this is text"),
        ('{"messages": ["hello"]}', 15, "a message is an object, this is text"),
        ('{"messages": [{"content": "x"}]}', 15, 'no "role"'),
        ('{"messages": [{"role": 3, "content": "x"}]}', 24, '"role" is text, this is a number'),
        ('{"messages": [{"role": "user"}]}', 15, 'no "content"'),
        ('{"messages": [{"from": "human", "value": "x"}]}', 15, '"from", "value" found'),
        ('{"messages": [{"role": "user", "content": null}]}', 43, '"content" is text, this is null'),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}', 43, "this is an array"),
        ('{"messages": [{"role": "assistant", "content": ""}]}', 48, '"content" of the assistant is empty'),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "t"}', 59, '"tools" is an array of objects'),
        ('{"text": "x"', 13, "not JSON: Expecting ',' delimiter"),
        ("{'text': 'x'}", 2, "not JSON: Expecting property name"),
        ('{"text": "x"} {"text": "y"}', 15, "not JSON: Extra data"),
        ('{"text": "x\ty"}', 12, "not JSON: Invalid control character"),
        ('{"text": "ok \\\\ud800 \\ud83d\\ude00 \\ud83d!"}', 35, "half of a surrogate pair"),
        ('{"text": "x", "n": ' + "9" * 5000 + "}", 1, "not JSON that can be read"),
        ('{"text": ' + "[" * 100_000, 1, "not JSON that can be read"),
    ],
)
def test_every_fault_has_its_place(tmp_path: Path, line: str, column: int, words: str) -> None:
    content = f'{{"text": "good"}}\n\n{line}\n{{"text": "good"}}\n'
    (fault,) = faults(tmp_path, content)
    assert fault.startswith(f"data.jsonl:3:{column}: ")
    assert words in fault
    assert len(fault.split(" | ")[1]) <= EXCERPT_WIDTH


def test_all_faults_of_a_row_and_of_all_files_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"prompt": 1, "response": 2}\n')
    (tmp_path / "b").write_text(
        '{"messages": [{"role": 1, "content": 2}, {"role": "user", "content": null}]}\nnot json\n'
    )
    with pytest.raises(DataError) as caught:
        read_rows([tmp_path / "a", tmp_path / "b"])
    places = [Path(problem.where).name for problem in caught.value.problems]
    assert places == ["a:1:12", "a:1:27", "b:1:24", "b:1:38", "b:1:70", "b:2:1"]
    assert "6 faults" in caught.value.what


def test_twenty_faults_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    shown = faults(tmp_path, '{"text": 1}\n' * 57)
    assert len(shown) == FAULTS_SHOWN
    with pytest.raises(DataError, match="57 faults, the first 20"):
        read(tmp_path, '{"text": 1}\n' * 57)


def test_invalid_utf8_is_placed_by_character(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, '{"text": "é'.encode() + b'\xff"}')
    assert fault.startswith("data.jsonl:1:12: byte 0xff is not UTF-8")


def test_utf16_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="UTF-16") as caught:
        read(tmp_path, '{"text": "a"}'.encode("utf-16"))
    assert caught.value.remedy
    assert caught.value.remedy.startswith("iconv")


def test_a_json_array_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one JSON array") as caught:
        read(tmp_path, '[\n  {"text": "a"},\n  {"text": "b"}\n]\n')
    assert caught.value.remedy
    assert caught.value.remedy.startswith("jq")


@pytest.mark.parametrize("content", [b"", b"\n\n \n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="no rows"):
        read(tmp_path, content)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file") as caught:
        read_rows([tmp_path / "absent.jsonl"])
    assert caught.value.where == str(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="directory"):
        read_rows([tmp_path])


def test_turns_that_only_call_tools_need_no_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    row = {
        "messages": [{"role": "user", "content": "x"}, call, {"role": "tool", "content": ""}],
        "tools": [{"name": "f"}],
    }
    (found,) = read(tmp_path, json.dumps(row)).rows
    assert isinstance(found, ChatRow)
    assert found.tools == ({"name": "f"},)


@given(st.lists(json_values, min_size=1, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_any_json_is_read_or_refused_with_places_within_its_lines(tmp_path: Path, values: list[Any]) -> None:
    lines = [json.dumps(value, ensure_ascii=False).replace("\n", " ") for value in values]
    path = tmp_path / "any.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        rows = read_rows([path]).rows
    except DataError as error:
        for problem in error.problems:
            match = re.fullmatch(r".*:(\d+):(\d+)", problem.where)
            assert match
            assert 1 <= int(match[2]) <= len(lines[int(match[1]) - 1]) + 1
            assert len(problem.what.rsplit(" | ", 1)[-1]) <= EXCERPT_WIDTH
    else:
        assert len(rows) == len(lines)


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(b'{"text": "' + content + b'"}')
    with contextlib.suppress(DataError):
        read_rows([path])


def _paths(value: Any) -> list[tuple[str | int, ...]]:
    found: list[tuple[str | int, ...]] = [()]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, child in items:
        found += [(key, *rest) for rest in _paths(child)]
    return found


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


@given(json_values, st.sampled_from([None, 1, 2]))
def test_columns_lead_to_their_values(value: Any, indent: int | None) -> None:
    line = json.dumps(value, indent=indent)
    for path in _paths(value):
        found, _ = json.JSONDecoder().raw_decode(line, column_of(line, path) - 1)
        assert found == _at(value, path)
        # What is missing is placed at the value that lacks it.
        assert column_of(line, (*path, "no such key")) == column_of(line, path)


def test_of_equal_keys_the_column_is_the_last_ones() -> None:
    line = '{"text": "a", "text": 2}'
    assert column_of(line, ("text",)) == 23


@given(st.text(max_size=300), st.integers(1, 301))
def test_excerpts_are_short_printable_and_show_the_column(line: str, column: int) -> None:
    shown = excerpt(line, column)
    assert len(shown) <= EXCERPT_WIDTH
    assert shown.isprintable()
    assert len(shown) == min(len(line), EXCERPT_WIDTH)


def test_an_excerpt_of_a_long_line_surrounds_the_column() -> None:
    line = "a" * 500 + "XYZ" + "b" * 500
    shown = excerpt(line, 501)
    assert "XYZ" in shown
    assert shown[0] == shown[-1] == "…"
    assert len(shown) == EXCERPT_WIDTH


def test_a_pipe_is_read_and_one_that_nobody_writes_to_has_no_rows(tmp_path: Path) -> None:
    pipe = tmp_path / "rows"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="no rows"):
        read_rows([pipe])
    keeping = os.open(pipe, os.O_RDWR)
    os.write(keeping, b'{"text": "a"}\n')
    reading, writing = os.pipe()
    os.write(writing, b'{"text": "b"}\n')
    os.close(writing)
    try:
        assert len(read_rows([Path(f"/dev/fd/{reading}")]).rows) == 1
    finally:
        os.close(reading)
        os.close(keeping)


def test_a_device_is_no_data() -> None:
    with pytest.raises(DataError, match="neither a regular file nor a pipe"):
        read_rows([Path("/dev/zero")])
