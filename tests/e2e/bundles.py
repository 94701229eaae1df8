"""Bundles for tests of the whole path, built by the command that users type."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Built:
    """A signed bundle, and the public key that it is trusted by."""

    path: Path
    trust: Path


@dataclass(slots=True)
class Workshop:
    """Builds bundles in a folder, each once, with one key and one cache of compiled parts."""

    folder: Path
    _built: dict[tuple[str, ...], Built] = field(default_factory=dict)

    def build(self, model: Path, *flags: str) -> Built:
        """`npucc build --model MODEL FLAGS`; the flags must not name key, cache or output."""
        words = ("--model", str(model), *flags)
        if words not in self._built:
            path = self.folder / f"{len(self._built)}.npub"
            run("npucc", "build", *words, "--key", str(self._key()), "--cache-dir", str(self.folder / "cache"),
                "-o", str(path))  # fmt: skip
            self._built[words] = Built(path, self._key().with_name("key.pub"))
        return self._built[words]

    def _key(self) -> Path:
        key = self.folder / "key"
        if not key.exists():
            run("npucc", "keygen", "--out", str(key))
        return key


def run(program: str, *words: str) -> str:
    """Run an installed program and return its stdout; fail with its stderr unless it succeeds."""
    done = subprocess.run(
        [BIN / program, *words], check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=1800
    )
    assert done.returncode == 0, f"{program} {' '.join(words)} ended with {done.returncode}:\n{done.stderr}"
    return done.stdout
