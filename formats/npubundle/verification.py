"""What both `verify` commands do: open a bundle under a policy, and say what it is and who vouches for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from npubundle.config import BundleConfig
from npubundle.container import open_container
from npubundle.trust import TrustPolicy
from npubundle.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Verified:
    """A bundle whose every byte was checked: name, digest of the manifest, what the policy says, number of blobs."""

    name: str
    digest: str
    verdict: Verdict
    blobs: int

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"name": self.name, "digest": self.digest, "blobs": self.blobs} | self.verdict.to_dict()

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.digest}  {self.name}  {self.verdict}; {self.blobs} blobs intact"


def verify(path: str | os.PathLike[str], policy: TrustPolicy) -> Verified:
    """Check a bundle's signatures and every blob. Raises `IntegrityError` with what is amiss."""
    with open_container(path, policy) as opened:
        config = BundleConfig.of(opened)
        return Verified(config.name, opened.manifest_digest, opened.verdict, len(opened.blobs))
