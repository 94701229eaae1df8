from __future__ import annotations

import enum
from dataclasses import dataclass

import pytest

from npubundle.errors import Error, FormatError
from npubundle.fields import (
    MAX_REPORTED,
    Fields,
    anything,
    checked,
    choice,
    dict_of,
    first_duplicate,
    flag,
    integer,
    list_of,
    literal,
    nullable,
    number,
    read,
    record,
    text,
)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float
    label: str | None


def read_point(fields: Fields) -> Point:
    return Point(fields.need("x", integer(0, 9)), fields.need("y", number()), fields.take("label", text(), None))


POINT = record(read_point)


def problems(document: object, kind: object) -> list[str]:
    with pytest.raises(FormatError) as caught:
        read(document, kind, what="it")  # type: ignore[arg-type]
    return [str(problem) for problem in caught.value.problems]


def test_a_record_becomes_a_value() -> None:
    assert read({"x": 3, "y": 1.5}, POINT, what="point") == Point(3, 1.5, None)
    assert read({"x": 0, "y": 2, "label": "a"}, POINT, what="point") == Point(0, 2.0, "a")


def test_all_problems_are_reported_with_their_places() -> None:
    document = {"points": [{"x": True, "y": "1"}, {"x": 10, "labels": ""}], "more": None}
    kind = record(lambda fields: fields.need("points", list_of(POINT)))
    assert problems(document, kind) == [
        "points[0].x: must be an integer, is a boolean",
        "points[0].y: must be a finite number, is text",
        "points[1].x: must be at most 9, is 10",
        "points[1].y: is missing",
        "points[1].labels: is not a known key; did you mean 'label'?",
        "more: is not a known key",
    ]


@pytest.mark.parametrize("document", [None, [], "text", 1, 1.0, True])
def test_a_document_of_another_type_is_named(document: object) -> None:
    (problem,) = problems(document, POINT)
    assert problem.startswith("document: must be an object, is ")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (text("[a-z]+"), "abc", "abC"),
        (text(), "a", ""),
        (text(empty=True), "", 1),
        (text(max_length=2), "ab", "abc"),
        (integer(), -5, 1.0),
        (integer(-1), -1, -2),
        (integer(maximum=3), 3, 2**900),
        (number(0.0, 1.0), 0.5, 1.5),
        (number(), 3.0, float("nan")),
        (number(0.0), 0.0, -0.5),
        (number(), 2.0, 10**400),
        (flag(), False, 0),
        (choice(Color), "red", "green"),
        (choice(Color), "blue", ["red"]),
        (literal("a", "b"), "b", "c"),
        (literal(1), 1, True),
        (list_of(integer(), minimum=1), [1], []),
        (list_of(integer(), maximum=1), [1], [1, 2]),
        (list_of(integer()), [], {}),
        (dict_of(integer()), {"a": 1}, {"a": "1"}),
        (dict_of(integer(), key=text("[a-z]+")), {"a": 1}, {"A": 1}),
        (dict_of(integer()), {}, []),
        (nullable(integer()), None, "x"),
        (checked(integer(), lambda value: "must be even" if value % 2 else None), 2, 3),
    ],
)
def test_each_kind_accepts_and_refuses(kind: object, good: object, bad: object) -> None:
    value = read(good, kind, what="it")  # type: ignore[arg-type, var-annotated]
    assert value == (Color(good) if isinstance(value, Color) else tuple(good) if isinstance(good, list) else good)
    assert problems(bad, kind)


def test_anything_is_passed_on_as_it_is() -> None:
    assert read({"a": [1, None]}, anything(), what="it") == {"a": [1, None]}


def test_unknown_members_can_be_allowed() -> None:
    def build(fields: Fields) -> int:
        fields.allow_unknown()
        return fields.need("a", integer())

    assert read({"a": 1, "b": 2}, record(build), what="it") == 1


def test_rules_over_several_members() -> None:
    def build(fields: Fields) -> None:
        if "low" in fields and fields.need("low", integer()) > fields.need("high", integer()):
            fields.wrong("low", "must not be above high")

    assert problems({"low": 3, "high": 2}, record(build)) == ["low: must not be above high"]


def test_the_report_is_bounded_and_the_error_is_the_one_asked_for() -> None:
    class OwnError(Error):
        code = "own"

    with pytest.raises(OwnError) as caught:
        read(["x"] * 1000, list_of(integer()), what="list", error=OwnError, where="a.json")
    assert len(caught.value.problems) == MAX_REPORTED + 1
    assert str(caught.value.problems[-1]) == f"…: {1000 - MAX_REPORTED} more problems"
    assert caught.value.where == "a.json"


def test_hostile_names_and_values_stay_short_and_printable() -> None:
    for problem in problems({"x" * 5000: 1, "a\n\x1b[31m": 2, "x": 10**80, "y": 1.0}, POINT):
        assert len(problem) < 300
        assert problem.isprintable()


def test_first_duplicate() -> None:
    assert first_duplicate(["a", "b", "a", "b"]) == "a"
    assert first_duplicate(["a", "b"]) is None
