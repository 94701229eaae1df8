"""Hub ids, against a small server in the place of the hub."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from npucc.hub import config_path
from tests.npucc import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Knows the model `org/tiny` at `main` and at `v2`, and nothing else."""

    body = json.dumps(tiny.config()).encode()
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self._answer():
            self.wfile.write(self.body)

    def _answer(self) -> bool:
        known = self.path in {"/org/tiny/resolve/main/config.json", "/org/tiny/resolve/v2/config.json"}
        self.send_response(200 if known else 404)
        if known:
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", '"abc"')
            self.send_header("Content-Length", str(len(self.body)))
        else:
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
        self.end_headers()
        return known

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


FETCH = """
import json, sys
from npubundle.errors import Error
from npucc.hub import config_path
for model in sys.argv[1:]:
    try:
        print(json.dumps(json.loads(config_path(model).read_bytes())))
    except Error as failure:
        print(json.dumps(failure.as_dict()))
"""


def fetch(home: Path, endpoint: str, *models: str) -> list[dict[str, Any]]:
    """What `config_path` finds, in a process of its own: the hub's client reads its settings when it is imported."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    clean |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", FETCH, *models]
    ran = subprocess.run(command, cwd=home, env=clean, check=True, capture_output=True, text=True, timeout=120)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_only_the_configuration_is_asked_for(hub: str, tmp_path: Path) -> None:
    Hub.asked.clear()
    found, missing = fetch(tmp_path, hub, "org/tiny@v2", "org/other")
    assert found == tiny.config()
    assert Hub.asked == ["/org/tiny/resolve/v2/config.json"]
    assert (missing["what"], missing["exit_code"]) == ("the hub answered 404 for org/other", 4)


def test_a_hub_out_of_reach_is_told_at_once(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        (told,) = fetch(tmp_path, f"http://127.0.0.1:{unused.getsockname()[1]}", "org/tiny")
    assert told["what"] == "there is no file or folder org/tiny, and the hub cannot be reached"
    assert told["exit_code"] == 4
    assert "downloaded config.json" in told["remedy"]


def test_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert config_path("org/tiny") == Path("org/tiny")


@pytest.mark.parametrize("model", ["/abs/path", "one", "a/b/c", "./org/tiny", "org/ti ny", "~/model"])
def test_what_cannot_be_an_id_is_a_path(model: str) -> None:
    assert config_path(model) == Path(model)
