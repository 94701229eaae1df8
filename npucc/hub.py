"""Fetches a model's `config.json`, and nothing else, from the Hugging Face hub."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from npucc.errors import ResourceError, UsageError

_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def config_path(model: str) -> Path:
    """A local path as it is; the `config.json` of a hub id (`ORG/NAME` or `ORG/NAME@REVISION`) after fetching it."""
    path = Path(model)
    if os.path.lexists(path) or not _ID.fullmatch(model):
        return path
    return _fetch(*model.partition("@")[::2])


def _fetch(repository: str, revision: str) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # the client reads it when it is imported
    try:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise UsageError(
            f"there is no file or folder {repository}, and hub ids need huggingface_hub",
            remedy="pip install 'npucc[hub]', or give a path to a config.json",
        ) from None
    remedy = "give a path to a downloaded config.json; only that file is needed"
    unreachable = ResourceError(
        f"there is no file or folder {repository}, and the hub cannot be reached",
        where=constants.ENDPOINT,
        remedy=remedy,
    )
    if not constants.HF_HUB_OFFLINE and not _reachable(constants.ENDPOINT):
        raise unreachable
    try:
        return Path(hf_hub_download(repository, "config.json", revision=revision or None, etag_timeout=5))
    except HfHubHTTPError as failure:
        raise ResourceError(
            f"the hub answered {failure.response.status_code} for {repository}", where="config.json", remedy=remedy
        ) from failure
    except OSError as failure:  # offline, or the connection broke, and the file is not in the hub's own cache
        raise unreachable from failure


def _reachable(endpoint: str) -> bool:
    """Whether a connection can be made, asked once: the hub's client would try for half a minute before it says no."""
    url = urlsplit(endpoint)
    if getproxies().get(url.scheme) or url.hostname is None:
        return True  # only the proxy knows
    try:
        socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=5).close()
    except OSError:
        return False
    return True
