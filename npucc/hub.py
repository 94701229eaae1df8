"""Fetches a model's `config.json`, and nothing else, from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from npucc.errors import ResourceError, UsageError

_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def config_path(model: str) -> Path:
    """A local path as it is; the `config.json` of a hub id (`ORG/NAME` or `ORG/NAME@REVISION`) after fetching it."""
    path = Path(model)
    if path.exists() or not _ID.fullmatch(model):
        return path
    return _fetch(*model.partition("@")[::2])


def _fetch(repository: str, revision: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ImportError:
        raise UsageError(
            f"there is no file or folder {repository}, and hub ids need huggingface_hub",
            remedy="pip install 'npucc[hub]', or give a path to a config.json",
        ) from None
    import httpx

    remedy = "give a path to a downloaded config.json; only that file is needed"
    try:
        return Path(hf_hub_download(repository, "config.json", revision=revision or None, etag_timeout=5))
    except HfHubHTTPError as failure:
        status = failure.response.status_code if failure.response is not None else "no"
        raise ResourceError(f"the hub answered {status} for {repository}", where="config.json", remedy=remedy) from failure
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError, OSError) as failure:
        raise ResourceError(
            f"there is no file or folder {repository}, and the hub cannot be reached", where=repository, remedy=remedy
        ) from failure
