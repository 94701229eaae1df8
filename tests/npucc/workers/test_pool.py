"""Worker processes: answers, deaths, logs, and what they inherit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from npucc.errors import ResourceError
from npucc.workers.pool import Command, OutOfTimeError, Pool, StoppedError, WorkerFailedError

WORKER = r"""
import json, os, signal, sys, time
from pathlib import Path

greeting = json.loads(input())
print(json.dumps({"text": "no card"} if "refuse" in greeting else {"ok": {"pid": os.getpid()}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print("working on", request, file=sys.stderr, flush=True)
    if "die_unless" in request and not Path(request["die_unless"]).exists():
        Path(request["die_unless"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if "die" in request:
        sys.exit("out of luck")
    time.sleep(request.get("sleep", 0))
    print(json.dumps({"ok": request | {"pid": os.getpid(), "environment": dict(os.environ)}}), flush=True)
"""


def command(tmp_path: Path, **greeting: object) -> Command:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return Command([sys.executable, "-I", str(script)], greeting, {"LANG": "C.UTF-8"})


def test_answers_come_from_as_many_processes_as_asked_for(tmp_path: Path) -> None:
    with Pool(command(tmp_path), 2, tmp_path) as pool:
        pids: list[int] = []
        threads = [
            threading.Thread(target=lambda: pids.append(pool.ask({"sleep": 0.3}, about="x")["ok"]["pid"]))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(pids) == 4
        assert len(set(pids)) == 2


def test_nothing_of_our_environment_reaches_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACTIC_SORTING_SEED", "7")
    with Pool(command(tmp_path), 1, tmp_path) as pool:
        environment = pool.ask({}, about="x")["ok"]["environment"]
    assert "TACTIC_SORTING_SEED" not in environment
    assert environment["LANG"] == "C.UTF-8"


def test_a_worker_that_dies_is_replaced_once(tmp_path: Path) -> None:
    with Pool(command(tmp_path), 1, tmp_path) as pool:
        before = pool.greeting()["pid"]
        answer = pool.ask({"die_unless": str(tmp_path / "died")}, about="layer.forward")
        assert answer["ok"]["pid"] != before


def test_a_request_that_kills_two_workers_is_reported_with_the_log(tmp_path: Path) -> None:
    with Pool(command(tmp_path), 1, tmp_path) as pool:
        with pytest.raises(WorkerFailedError, match=r"layer\.forward") as caught:
            pool.ask({"die": True}, about="layer.forward")
        assert "exit code 1" in caught.value.what
        assert "out of luck" in caught.value.what
        assert pool.ask({}, about="the next")["ok"]


def test_the_signal_that_ended_a_worker_is_named(tmp_path: Path) -> None:
    with Pool(command(tmp_path), 1, tmp_path) as pool:
        pid = pool.greeting()["pid"]
        os.kill(pid, signal.SIGKILL)
        assert pool.ask({}, about="x")["ok"]["pid"] != pid


def test_a_worker_that_refuses_or_is_missing_says_why(tmp_path: Path) -> None:
    with Pool(command(tmp_path, refuse=True), 1, tmp_path) as pool, pytest.raises(ResourceError, match="no card"):
        pool.greeting()
    with Pool(Command([str(tmp_path / "none")]), 1, tmp_path) as pool, pytest.raises(ResourceError, match="none"):
        pool.greeting()


def test_closing_ends_workers_at_work(tmp_path: Path) -> None:
    pool = Pool(command(tmp_path), 1, tmp_path)
    pid = pool.greeting()["pid"]
    failures: list[str] = []

    def ask() -> None:
        try:
            pool.ask({"sleep": 3600}, about="x")
        except WorkerFailedError as error:
            failures.append(error.what)

    thread = threading.Thread(target=ask)
    thread.start()
    while "working on" not in (tmp_path / "worker-1.log").read_text():
        time.sleep(0.01)
    pool.close()
    thread.join(30)
    assert failures == ["the build was stopped during x"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_request_that_takes_too_long_ends_its_worker_alone(tmp_path: Path) -> None:
    with Pool(command(tmp_path), 1, tmp_path) as pool:
        slow = pool.greeting()["pid"]
        with pytest.raises(OutOfTimeError, match=r"more than 0 s over layer\.forward"):
            pool.ask({"sleep": 3600}, about="layer.forward", limit=0.1)
        with pytest.raises(ProcessLookupError):
            os.kill(slow, 0)
        answer = pool.ask({}, about="the next", limit=600)["ok"]
        assert answer["pid"] == pool.greeting()["pid"] != slow


def test_a_worker_that_dies_within_its_time_is_replaced(tmp_path: Path) -> None:
    with Pool(command(tmp_path), 1, tmp_path) as pool:
        assert pool.ask({"die_unless": str(tmp_path / "died")}, about="x", limit=600)["ok"]


def test_a_closed_pool_starts_nothing(tmp_path: Path) -> None:
    pool = Pool(command(tmp_path), 1, tmp_path)
    pool.close()
    for _ in range(2):
        with pytest.raises(StoppedError):
            pool.ask({}, about="x")
    assert not list(tmp_path.glob("worker-*.log"))
