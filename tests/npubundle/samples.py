"""Small keys and bundles for the tests of this folder."""

from __future__ import annotations

import functools
from pathlib import Path

from npubundle import keys
from npubundle.content import Content, NewLayer, build_container
from npubundle.statement import NUMERICS
from npubundle.trust import Mode, Rule, TrustedKey, TrustPolicy

PART = "application/vnd.npucc.part.onnx.v1"
CONFIG = b'{"format_version":1,"name":"tiny/llama-lora"}'
NAME = "tiny/llama-lora"


@functools.cache
def key(name: str) -> keys.PrivateKey:
    """The same fresh key for the same name, within one run of the tests."""
    return keys.generate("ecdsa-p256" if name.startswith("ecdsa") else "ed25519")


def trusted(*names: str) -> tuple[TrustedKey, ...]:
    return tuple(TrustedKey(name, key(name).public) for name in names)


def trusting(*names: str, rules: tuple[Rule, ...] = (), mode: Mode = Mode.ENFORCE) -> TrustPolicy:
    """A policy with these keys."""
    return TrustPolicy(mode, trusted(*names), rules)


def unsigned(name: str = NAME, layers: tuple[bytes, ...] = (b"part one", b"part two" * 100)) -> Content:
    """A bundle of a few bytes."""
    new = [NewLayer(PART, data, {"dev.npucc.part": f"part-{number}"}) for number, data in enumerate(layers)]
    return build_container(name, CONFIG, new)


def signed(*names: str, content: Content | None = None) -> Content:
    """A bundle with a signature by each of these keys."""
    made = content or unsigned()
    for name in names:
        made = made.with_signature(key(name))
    return made


def attested(*names: str) -> Content:
    """A bundle with a signature and a statement about its numerics by each of these keys."""
    made = signed(*names)
    for name in names:
        made = made.with_attestation(key(name), NUMERICS, {"errors": {"part-0": 1.25e-7}, "host": name})
    return made


def blob_path(layout: Path, digest: str) -> Path:
    return layout / "blobs" / "sha256" / digest.removeprefix("sha256:")
