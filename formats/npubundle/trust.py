"""Trust policies: whose signatures count, for which bundles, and what happens without them.

A policy is a TOML file (docs/reference/trust-policy.md), or is made of public keys given on the command line.
"""

from __future__ import annotations

import enum
import fnmatch
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from npubundle.blob import read_small
from npubundle.errors import Error, FileError
from npubundle.fields import Fields, Kind, Place, choice, first_duplicate, flag, integer, list_of, read, record, text
from npubundle.keys import KeyFileError, PublicKey

POLICY_VARIABLE = "NPUCC_TRUST_POLICY"
SYSTEM_POLICY = Path("/etc/npucc/trust.toml")
MAX_POLICY = 1 << 20


class PolicyError(Error):
    """A trust policy cannot be read."""

    code = "trust-policy"


class Mode(enum.Enum):
    """What happens to a bundle without the signatures that the policy asks for."""

    ENFORCE = "enforce"
    WARN = "warn"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A key of the policy, and the time in which its signatures count: the time of verification is what matters."""

    name: str
    public: PublicKey
    valid_from: datetime | None = None
    valid_until: datetime | None = None
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """For bundles whose name or registry path matches a pattern: which keys may sign, and how many of them must."""

    match: str
    keys: tuple[str, ...]
    threshold: int = 1


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """Keys and rules. Without rules, one signature by any of the keys is enough. `origin` names it in messages."""

    mode: Mode
    keys: tuple[TrustedKey, ...] = ()
    rules: tuple[Rule, ...] = ()
    origin: str = "trust policy"

    def key(self, key_id: str) -> TrustedKey | None:
        """Return the key with this id, if the policy lists it."""
        return next((key for key in self.keys if key.public.key_id == key_id), None)

    def rule_for(self, name: str) -> Rule | None:
        """Return the first rule that matches a name or registry path; None if there are rules but none matches."""
        if not self.rules:
            return Rule("*", tuple(key.name for key in self.keys))
        return next((rule for rule in self.rules if fnmatch.fnmatchcase(name, rule.match)), None)

    @classmethod
    def off(cls) -> TrustPolicy:
        """A policy that accepts unsigned bundles. Digests are still checked."""
        return cls(Mode.OFF, origin="no trust policy")

    @classmethod
    def from_key_files(cls, paths: Sequence[str | os.PathLike[str]]) -> TrustPolicy:
        """Make a policy that enforces a signature by any one of these public keys."""
        keys: dict[str, TrustedKey] = {}
        for path in paths:
            public = PublicKey.load(path)
            keys.setdefault(public.key_id, TrustedKey(str(path), public))
        return cls(Mode.ENFORCE, tuple(keys.values()), origin=", ".join(map(str, paths)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrustPolicy:
        """Read a policy file; raise `PolicyError` with all of its problems, or `FileError`."""
        raw = read_small(Path(path), MAX_POLICY)
        try:
            document = tomllib.loads(raw.decode("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PolicyError(f"this trust policy is not valid TOML: {error}", where=str(path)) from error
        kind = record(lambda fields: _policy(fields, Path(path)))
        return read(document, kind, what="trust policy", error=PolicyError, where=str(path))

    @classmethod
    def from_paths(cls, paths: Sequence[str | os.PathLike[str]]) -> TrustPolicy:
        """Read what `--trust` was given: public keys, or one policy file; nothing stands for the default policy."""
        if not paths:
            return cls.default()
        are_keys = [b"-----BEGIN" in read_small(Path(path), MAX_POLICY) for path in paths]
        if all(are_keys):
            return cls.from_key_files(paths)
        if len(paths) > 1:
            given = ", ".join(map(str, paths))
            raise PolicyError("give public keys, or one policy file, but not both", where=given)
        return cls.load(paths[0])

    @classmethod
    def default(cls) -> TrustPolicy:
        """Read the policy of this user or host; without one, enforce signatures and trust no key."""
        if explicit := os.environ.get(POLICY_VARIABLE):
            return cls.load(explicit)
        for path in default_places():
            if path.is_file():
                return cls.load(path)
        return cls(Mode.ENFORCE, origin="default trust policy")


def default_places() -> tuple[Path, ...]:
    """Return where the default policy is looked for, unless `NPUCC_TRUST_POLICY` names a file."""
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    home = os.environ.get("HOME", "")
    if configured.is_absolute():
        return configured / "npucc" / "trust.toml", SYSTEM_POLICY
    if home:
        return Path(home) / ".config" / "npucc" / "trust.toml", SYSTEM_POLICY
    return (SYSTEM_POLICY,)


def _policy(fields: Fields, path: Path) -> TrustPolicy:
    mode = fields.take("mode", choice(Mode), Mode.ENFORCE)
    read_keys = fields.take("keys", list_of(record(lambda inner: _key(inner, path.parent)), maximum=1000), ())
    keys = tuple(key for key in read_keys if key is not None)
    rules = fields.take("rules", list_of(record(_rule), maximum=1000), ())
    if mode is not Mode.OFF and not read_keys:
        fields.wrong("keys", f"must list at least one key in mode {mode.value!r}")
    if name := first_duplicate(key.name for key in keys):
        fields.wrong("keys", f"has two keys named {name!r}")
    if key_id := first_duplicate(key.public.key_id for key in keys):
        fields.wrong("keys", f"has the key {key_id} twice")
    if len(keys) == len(read_keys):
        known = {key.name for key in keys}
        for index, rule in enumerate(rules):
            for name in sorted(set(rule.keys) - known):
                fields.wrong(f"rules[{index}].keys", f"names {name!r}, which is not in [[keys]]")
    return TrustPolicy(mode, keys, rules, str(path))


def _key(fields: Fields, folder: Path) -> TrustedKey | None:
    name = fields.need("name", text(max_length=200))
    path = fields.take("path", text(), None)
    pem = fields.take("pem", text(), None)
    valid_from = fields.take("valid_from", _moment(), None)
    valid_until = fields.take("valid_until", _moment(), None)
    revoked = fields.take("revoked", flag(), default=False)
    if valid_from and valid_until and valid_until <= valid_from:
        fields.wrong("valid_until", "must be later than valid_from")
    if (path is None) == (pem is None):
        fields.wrong("path", "must be given, or else pem, but not both")
        return None
    try:
        public = PublicKey.load(folder / path) if path is not None else PublicKey.from_pem(_ascii(pem), where=name)
    except (KeyFileError, FileError) as error:
        fields.wrong("path" if path is not None else "pem", str(error))
        return None
    return TrustedKey(name, public, valid_from, valid_until, revoked)


def _rule(fields: Fields) -> Rule:
    keys = fields.need("keys", list_of(text(), minimum=1))
    rule = Rule(
        match=fields.need("match", text(max_length=500)),
        keys=tuple(dict.fromkeys(keys)),
        threshold=fields.take("threshold", integer(minimum=1), 1),
    )
    if keys and rule.threshold > len(rule.keys):
        fields.wrong("threshold", f"is {rule.threshold}, but there are only {len(rule.keys)} different keys")
    return rule


def _moment() -> Kind[datetime | None]:
    """A TOML date-time with its offset from UTC."""

    def read_moment(place: Place) -> datetime | None:
        value: Any = place.value
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value
        place.wrong("must be a date and time with its offset, such as 2027-01-01T00:00:00Z")
        return None

    return Kind(read_moment, lambda: None)


def _ascii(pem: str | None) -> bytes:
    return (pem or "").encode("ascii", "replace")
