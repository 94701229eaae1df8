"""`npurt verify`."""

from __future__ import annotations

import json

from npubundle.config import BundleConfig
from npubundle.container import open_container
from npubundle.trust import TrustPolicy
from npurt.cli.options import Settings
from npurt.signals import Signals


def run(settings: Settings, _signals: Signals, bundle: str) -> int:
    """Verify a bundle; returns the exit code. What is amiss is raised as `IntegrityError`."""
    with open_container(bundle, TrustPolicy.from_paths(settings["trust"])) as opened:
        config = BundleConfig.decode(opened.config_bytes, where=bundle)
        verdict, digest, blobs = opened.verdict, opened.manifest_digest, len(opened.blobs)
    findings = [finding.what for finding in verdict.findings]
    if settings["json"]:
        document = {
            "name": config.name,
            "digest": digest,
            "trusted": verdict.trusted,
            "mode": verdict.mode.value,
            "signers": list(verdict.signers),
            "findings": findings,
            "blobs": blobs,
        }
        print(json.dumps(document, ensure_ascii=False))
    else:
        said = f"signed by {', '.join(verdict.signers)}" if verdict.trusted else f"not trusted: {'; '.join(findings)}"
        print(f"{digest}  {config.name}  {said}; {blobs} blobs intact")
    return 0
