"""`npurt verify`."""

from __future__ import annotations

import json

from npubundle.trust import TrustPolicy
from npubundle.verification import verify
from npurt.cli.options import Settings
from npurt.signals import Signals


def run(settings: Settings, _signals: Signals, bundle: str) -> int:
    """Verify a bundle; returns the exit code. What is amiss is raised as `IntegrityError`."""
    verified = verify(bundle, TrustPolicy.from_paths(settings["trust"]))
    print(json.dumps(verified.to_dict(), ensure_ascii=False) if settings["json"] else verified)
    return 0
