"""Judging signatures: which of a bundle's envelopes count under a trust policy, and why the others do not.

The order is what makes it safe: first the signature over the raw payload, by a key that the policy lists; only then is
the payload parsed, and its subject compared with the digest of the manifest that is at hand.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from npubundle.dsse import Envelope
from npubundle.errors import FormatError, Problem, SignatureError
from npubundle.oci import BUNDLE_TYPE
from npubundle.statement import SIGNATURE, BundleClaim, Statement
from npubundle.trust import POLICY_VARIABLE, Mode, TrustedKey, TrustPolicy, default_places
from npubundle.version import FORMAT_VERSION


class Reason(enum.Enum):
    """Why a signature, or all of them together, do not count."""

    UNSIGNED = "unsigned"
    NO_KEYS = "no-keys"
    UNKNOWN_KEY = "unknown-key"
    BAD_SIGNATURE = "bad-signature"
    REVOKED = "revoked"
    NOT_YET_VALID = "not-yet-valid"
    EXPIRED = "expired"
    MALFORMED = "malformed"
    OTHER_STATEMENT = "other-statement"
    OTHER_BUNDLE = "other-bundle"
    NEWER_FORMAT = "newer-format"
    NO_RULE = "no-rule"
    NOT_ALLOWED = "not-allowed"
    BELOW_THRESHOLD = "below-threshold"


@dataclass(frozen=True, slots=True)
class Finding:
    """One signature that does not count, or one demand that is not met, in words for a person."""

    reason: Reason
    what: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy says about a bundle. `name` and `format_version` are those that were signed.

    `signers` are the keys of the policy whose signatures satisfy it; `findings` says what does not count, and why.
    """

    mode: Mode
    findings: tuple[Finding, ...] = ()
    name: str | None = None
    format_version: int | None = None
    signers: tuple[str, ...] = ()

    @property
    def trusted(self) -> bool:
        """Whether the signatures satisfy the policy."""
        return bool(self.signers)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to tell the user about a bundle that is used although it is not trusted: empty unless in mode `warn`."""
        return tuple(finding.what for finding in self.findings) if self.mode is Mode.WARN and not self.trusted else ()

    def to_dict(self) -> dict[str, object]:
        """As commands print it with `--json`."""
        findings = [{"reason": finding.reason.value, "what": finding.what} for finding in self.findings]
        return {"trusted": self.trusted, "mode": self.mode.value, "signers": list(self.signers), "findings": findings}

    def __str__(self) -> str:
        """For people: `signed by dev.pub`, or why not."""
        if self.trusted:
            return f"signed by {', '.join(self.signers)}"
        return "not trusted: " + "; ".join(finding.what for finding in self.findings)

    def require(self) -> None:
        """Raise `SignatureError` if the policy enforces trust and there is none."""
        if self.trusted or self.mode is not Mode.ENFORCE:
            return
        raise SignatureError(
            "no signature of this bundle is trusted",
            problems=[Problem(finding.reason.value, finding.what) for finding in self.findings],
            remedy=_remedy({finding.reason for finding in self.findings}),
        )


@dataclass(frozen=True, slots=True)
class Attestation:
    """A statement about the bundle, and the names of the policy's keys that signed it: none, if it is only a claim."""

    statement: Statement
    signed_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Vote:
    """A signature that holds: by a valid key of the policy, over a statement about this bundle."""

    key: TrustedKey
    statement: Statement


def evaluate(
    policy: TrustPolicy,
    manifest_digest: str,
    envelopes: Sequence[Envelope],
    *,
    place: str | None = None,
    now: datetime | None = None,
) -> Verdict:
    """Judge the signatures of the bundle whose manifest has this digest.

    `place` is the registry path that it came from, if any; the policy's rule is chosen by it, else by the signed name.
    """
    findings: list[Finding] = []
    if not envelopes:
        findings.append(Finding(Reason.UNSIGNED, "the bundle is not signed"))
    if not policy.keys and policy.mode is not Mode.OFF:
        findings.append(Finding(Reason.NO_KEYS, f"the {policy.origin} lists no key"))
    by_name: dict[str, list[tuple[TrustedKey, BundleClaim]]] = {}
    for envelope in envelopes:
        for vote in _votes(policy, manifest_digest, envelope, now or datetime.now(UTC), findings):
            if claim := _claim(vote, findings):
                by_name.setdefault(vote.statement.name, []).append((vote.key, claim))
    for name, signed in sorted(by_name.items()):
        if signers := _accepted(policy, place or name, [key for key, _ in signed], findings):
            version = next(claim.format_version for key, claim in signed if key.name in signers)
            return Verdict(policy.mode, tuple(findings), name, version, signers)
    return Verdict(policy.mode, tuple(findings))


def attest(
    policy: TrustPolicy,
    manifest_digest: str,
    envelope: Envelope,
    *,
    place: str | None = None,
    now: datetime | None = None,
) -> tuple[Attestation | None, tuple[Finding, ...]]:
    """Judge one attestation: by which keys that may sign this bundle it is signed, if by any.

    In mode `enforce` a statement that no such key has signed is left out; in the others it is kept as a mere claim.
    """
    findings: list[Finding] = []
    statement: Statement | None = None
    signed_by: dict[str, None] = {}
    for vote in _votes(policy, manifest_digest, envelope, now or datetime.now(UTC), findings):
        rule = policy.rule_for(place or vote.statement.name)
        if vote.statement.predicate_type == SIGNATURE:
            findings.append(Finding(Reason.OTHER_STATEMENT, "an attestation holds a bundle signature"))
        elif rule is None or vote.key.name not in rule.keys:
            findings.append(Finding(Reason.NOT_ALLOWED, f"the key {vote.key.name} may not sign for this bundle"))
        else:
            statement = vote.statement
            signed_by[vote.key.name] = None
    if statement is None and policy.mode is not Mode.ENFORCE:
        claimed = Statement.decode(envelope)
        statement = claimed if claimed.subject == manifest_digest else None
    return (Attestation(statement, tuple(signed_by)) if statement else None), tuple(findings)


def _votes(
    policy: TrustPolicy, manifest_digest: str, envelope: Envelope, now: datetime, findings: list[Finding]
) -> Iterator[_Vote]:
    """Yield the signatures of an envelope that hold; note why the others do not."""
    for signature in envelope.signatures:
        key = policy.key(signature.key_id)
        if key is None:
            findings.append(Finding(Reason.UNKNOWN_KEY, f"signed by a key that is not trusted: {signature.key_id}"))
        elif not key.public.verify(signature.sig, envelope.signed_bytes()):
            findings.append(Finding(Reason.BAD_SIGNATURE, f"the signature is not one of the key {key.name}"))
        elif fault := _invalid(key, now):
            findings.append(fault)
        else:
            try:
                statement = Statement.decode(envelope)
            except FormatError as error:
                findings.append(Finding(Reason.MALFORMED, f"signed by {key.name}, but {error}"))
                continue
            if statement.subject == manifest_digest:
                yield _Vote(key, statement)
            else:
                other = f"signed by {key.name} for another bundle, {statement.name} with the digest {statement.subject}"
                findings.append(Finding(Reason.OTHER_BUNDLE, other))


def _invalid(key: TrustedKey, now: datetime) -> Finding | None:
    """Why a key's signatures do not count at this time."""
    if key.revoked:
        return Finding(Reason.REVOKED, f"the key {key.name} has been revoked")
    if key.valid_from and now < key.valid_from:
        return Finding(Reason.NOT_YET_VALID, f"the key {key.name} is valid from {key.valid_from.isoformat()}")
    if key.valid_until and now >= key.valid_until:
        return Finding(Reason.EXPIRED, f"the key {key.name} was valid until {key.valid_until.isoformat()}")
    return None


def _claim(vote: _Vote, findings: list[Finding]) -> BundleClaim | None:
    """The claim of a bundle signature, if it is one that this version understands."""
    if vote.statement.predicate_type != SIGNATURE:
        what = f"signed by {vote.key.name}, but as {vote.statement.predicate_type} and not as a bundle"
        findings.append(Finding(Reason.OTHER_STATEMENT, what))
        return None
    try:
        claim = BundleClaim.from_statement(vote.statement)
    except FormatError as error:
        findings.append(Finding(Reason.MALFORMED, f"signed by {vote.key.name}, but {error}"))
        return None
    if claim.artifact_type != BUNDLE_TYPE:
        what = f"signed by {vote.key.name} as an artifact of type {claim.artifact_type}"
        findings.append(Finding(Reason.OTHER_STATEMENT, what))
        return None
    if claim.format_version > FORMAT_VERSION:
        what = f"the bundle has format version {claim.format_version}; this release reads up to {FORMAT_VERSION}"
        findings.append(Finding(Reason.NEWER_FORMAT, what))
        return None
    return claim


def _accepted(policy: TrustPolicy, name: str, keys: Iterable[TrustedKey], findings: list[Finding]) -> tuple[str, ...]:
    """The names of the keys that satisfy the policy's rule for a bundle; empty if they do not."""
    rule = policy.rule_for(name)
    if rule is None:
        findings.append(Finding(Reason.NO_RULE, f"no rule of the policy {policy.origin} matches {name}"))
        return ()
    signers = dict.fromkeys(key.name for key in keys)
    for signer in signers:
        if signer not in rule.keys:
            what = f"the key {signer} may not sign for {name} (rule {rule.match!r})"
            findings.append(Finding(Reason.NOT_ALLOWED, what))
    accepted = tuple(signer for signer in signers if signer in rule.keys)
    if len(accepted) < rule.threshold:
        what = f"{len(accepted)} of {rule.threshold} required signatures for {name} (rule {rule.match!r})"
        findings.append(Finding(Reason.BELOW_THRESHOLD, what))
        return ()
    return accepted


def _remedy(reasons: set[Reason]) -> str:
    if Reason.NO_KEYS in reasons:
        places = ", ".join(map(str, default_places()))
        return f"give --trust KEY.pub, or a trust policy in {POLICY_VARIABLE} or one of: {places}"
    if Reason.UNSIGNED in reasons:
        return "have it signed when it is built (npucc build --key KEY), or use a trust policy with mode = 'off'"
    if Reason.NEWER_FORMAT in reasons:
        return "install a newer release"
    if Reason.UNKNOWN_KEY in reasons:
        return "if you trust the signer, give --trust with the signer's public key, or add it to the trust policy"
    return "get the bundle again from whoever built it, or have it signed by a key that the policy accepts"
