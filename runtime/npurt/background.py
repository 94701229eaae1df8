"""Work that goes on in a thread while the caller does something else, and can be given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")
Advance = Callable[[int, int], None]

#: Seconds to wait for work that was given up. One job of loading takes less.
PATIENCE = 10.0
_WAIT = 0.05  # seconds between two looks at how far the work has come


class Background(Generic[Made]):
    """Calls `work(advance)` in a thread; `result` waits for what it returns or raises.

    `work` calls `advance(done, all)` as it goes on, which is also where it ends early once `give_up` was called.
    """

    def __init__(self, work: Callable[[Advance], Made], name: str) -> None:
        self._work = work
        self._given_up = threading.Event()
        self._state = (0, 0)
        self._made: list[Made] = []
        self._error: BaseException | None = None
        # A daemon: should it not come to an end in time, it does not keep the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self, advance: Advance) -> Made:
        """What `work` returned. Passes on how far it has come. Raises what `work` raised."""
        seen = (0, 0)
        while self._thread.is_alive():
            self._thread.join(_WAIT)
            if self._state != seen:
                seen = self._state
                advance(*seen)
        if self._error is not None:
            raise self._error
        return self._made[0]

    def give_up(self) -> Made | None:
        """End the work and wait until it has ended, but not for ever: an interruption may have left it stuck.

        Gives what it had made by then, for the caller to close.
        """
        self._given_up.set()
        self._thread.join(PATIENCE)
        return self._made[0] if self._made else None

    def _run(self) -> None:
        try:
            self._made.append(self._work(self._advance))
        except BaseException as error:  # noqa: BLE001 -- raised where the result is asked for
            self._error = error

    def _advance(self, done: int, total: int) -> None:
        if self._given_up.is_set():
            raise _GivenUpError
        self._state = (done, total)


class _GivenUpError(Exception):
    """Unwinds work whose result nobody wants any more."""
