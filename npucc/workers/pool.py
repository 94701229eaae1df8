"""Processes that answer requests one at a time, as many as asked for, each replaced when it dies."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from npubundle.errors import ExitCode
from npucc.errors import CompilerError, ResourceError

Answer = Mapping[str, Any]

#: Lines of a dead worker's log that its error shows.
_LOG_LINES = 15


class WorkerFailedError(CompilerError):
    """A worker died, and the one that replaced it died over the same request."""

    code = "worker"
    exit_code = ExitCode.RESOURCE


class StoppedError(WorkerFailedError):
    """The pool was closed, or is, while it was asked."""


class OutOfTimeError(CompilerError):
    """A worker took longer over a request than it was given."""

    code = "worker"
    exit_code = ExitCode.RESOURCE


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a worker, and the first line to tell it. Nothing of our own environment reaches it."""

    arguments: Sequence[str]
    greeting: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Worker:
    """One process. Its standard error goes to a log file of its own."""

    def __init__(self, command: Command, log: Path) -> None:
        """Start it and wait for its greeting. Raises `ResourceError` if it cannot be started."""
        self.log = log
        self.out_of_time = False
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    list(command.arguments),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=dict(command.environment),
                    start_new_session=True,  # a Ctrl-C is ours to handle, and whatever it starts dies with it
                )
        except OSError as error:
            what = f"the compile worker cannot be started: {error.strerror}"
            raise ResourceError(what, where=command.arguments[0]) from error
        greeted = self.ask(command.greeting)
        if greeted is None or "ok" not in greeted:
            said = greeted.get("text") if greeted else self.last_words()
            self.kill()
            raise ResourceError(f"the compile worker does not start: {said}", where=command.arguments[0])
        self.greeting: Answer = greeted["ok"]

    def ask(self, request: Mapping[str, Any], limit: float | None = None) -> Answer | None:
        """The answer; None if the process ended instead, by itself or, `out_of_time`, after `limit` seconds."""
        if limit is None:
            return self._ask(request)
        timer = threading.Timer(min(limit, threading.TIMEOUT_MAX), self._end_late)
        timer.start()
        try:
            answer = self._ask(request)
        finally:
            timer.cancel()
            timer.join()  # it may have begun
        return None if self.out_of_time else answer

    def _end_late(self) -> None:
        self.out_of_time = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, request: Mapping[str, Any]) -> Answer | None:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("a worker without pipes")
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            answer: Answer = json.loads(stdout.readline())
        except (OSError, ValueError):
            return None
        return answer

    def last_words(self) -> str:
        """How it ended, and the end of its log."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        ended = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join([ended, *lines])

    def kill(self) -> None:
        """End it and everything it started, now."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class Pool:
    """`size` workers, started when they are first needed. `ask` may be called from as many threads."""

    def __init__(self, command: Command, size: int, logs: Path) -> None:
        """Logs of the workers are files of the folder `logs`."""
        self._command = command
        self._logs = logs
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._all: set[Worker] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._started = 0
        for _ in range(size):
            self._idle.put(None)

    def greeting(self) -> Answer:
        """What a worker says of itself."""
        worker = self._take()
        self._idle.put(worker)
        return worker.greeting

    def ask(self, request: Mapping[str, Any], *, about: str, limit: float | None = None) -> Answer:
        """The answer to a request; a worker that dies over it is replaced once.

        Raises `WorkerFailedError` with the log if the second dies as well, `OutOfTimeError` if one takes longer than
        `limit` seconds (not counting its start), `ResourceError` if none can be started, `StoppedError` after `close`.
        """
        for attempt in (1, 2):
            worker = self._take()
            answer = worker.ask(request, limit)
            if answer is not None:
                self._idle.put(worker)
                return answer
            said = worker.last_words()
            self._discard(worker)
            self._idle.put(None)
            if self._closed:
                break
            if worker.out_of_time:
                raise OutOfTimeError(f"the compile worker took more than {limit:.0f} s over {about}")
            if attempt == 2:
                what = f"the compile worker died twice over {about}"
                raise WorkerFailedError(
                    f"{what}: {said}", where=str(worker.log), remedy="see the log; is memory short?"
                )
        raise StoppedError(f"the build was stopped during {about}")

    def close(self) -> None:
        """End all workers, also those at work."""
        with self._lock:
            self._closed = True
            workers = list(self._all)
        for worker in workers:
            self._discard(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> Worker:
        worker = self._idle.get()
        if self._closed:
            self._idle.put(None)  # for the next that asks
            raise StoppedError("the build was stopped")
        if worker is not None:
            return worker
        with self._lock:
            self._started += 1
            log = self._logs / f"worker-{self._started}.log"
        try:
            made = Worker(self._command, log)
        except BaseException:
            self._idle.put(None)
            raise
        with self._lock:
            self._all.add(made)
            closed = self._closed
        if closed:  # in the meantime, so that nobody else ends it
            self._discard(made)
            self._idle.put(None)
            raise StoppedError("the build was stopped")
        return made

    def _discard(self, worker: Worker) -> None:
        worker.kill()
        with self._lock:
            self._all.discard(worker)
