"""Work in a thread: results, errors, progress, and giving up."""

from __future__ import annotations

import threading

import pytest

from npurt.background import Advance, Background


def ignore(_done: int, _total: int) -> None:
    """An `advance` that nobody looks at."""


def test_the_result_comes_with_progress() -> None:
    seen: list[tuple[int, int]] = []
    go_on = threading.Event()

    def work(advance: Advance) -> str:
        advance(1, 3)
        go_on.wait(10)
        advance(3, 3)
        return "made"

    def look(done: int, total: int) -> None:
        seen.append((done, total))
        go_on.set()

    assert Background(work, "test").result(look) == "made"
    assert seen[0] == (1, 3)


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    def work(_advance: Advance) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        Background(work, "test").result(ignore)


def test_giving_up_ends_the_work_at_its_next_sign_of_progress() -> None:
    started, reached_the_end = threading.Event(), threading.Event()

    def work(advance: Advance) -> None:
        started.set()
        for number in range(10_000):
            advance(number, 10_000)
            threading.Event().wait(0.01)
        reached_the_end.set()

    background = Background(work, "test")
    started.wait(10)
    assert background.give_up() is None
    assert not reached_the_end.is_set()


def test_giving_up_hands_over_what_is_finished_already() -> None:
    background = Background(lambda _advance: "made", "test")
    background.result(ignore)
    assert background.give_up() == "made"
