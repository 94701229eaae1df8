"""A request to stop, made in one place and heeded in others: between two micro-steps, between two packs."""

from __future__ import annotations


class StoppedError(Exception):
    """Work was given up because a stop was requested. Never leaves the package."""


class Stop:
    """Whether a stop was requested. Setting one attribute is atomic, so signal handlers and threads may do it."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        """Ask for a stop; it cannot be taken back."""
        self.requested = True

    def check(self) -> None:
        """Raise `StoppedError` if a stop was requested."""
        if self.requested:
            raise StoppedError
