"""Judging signatures: each way in which they do not count, in words."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from npubundle.digest import sha256_of
from npubundle.dsse import Envelope, Signature
from npubundle.errors import ExitCode, SignatureError
from npubundle.keys import sign_envelope
from npubundle.oci import BUNDLE_TYPE
from npubundle.statement import NUMERICS, PAYLOAD_TYPE, SIGNATURE, BundleClaim, Statement
from npubundle.trust import Mode, Rule, TrustedKey, TrustPolicy
from npubundle.verdict import Reason, Verdict, attest, evaluate
from npubundle.version import FORMAT_VERSION
from tests.npubundle.samples import key, trusting

DIGEST = sha256_of(b"manifest")
NOW = datetime(2026, 6, 1, tzinfo=UTC)


def envelope(signer: str, **changes: Any) -> Envelope:
    claim = BundleClaim(FORMAT_VERSION, BUNDLE_TYPE)
    statement = replace(Statement(DIGEST, "prod/llama", SIGNATURE, claim.to_dict()), **changes)
    return sign_envelope(key(signer), PAYLOAD_TYPE, statement.encode())


def reasons(verdict: Verdict) -> list[Reason]:
    return [finding.reason for finding in verdict.findings]


@pytest.mark.parametrize("signer", ["a", "ecdsa"])
def test_one_trusted_signature_suffices(signer: str) -> None:
    verdict = evaluate(trusting(signer), DIGEST, [envelope(signer)], now=NOW)
    assert (verdict.trusted, verdict.signers, verdict.name) == (True, (signer,), "prod/llama")
    assert verdict.format_version == FORMAT_VERSION
    assert not verdict.findings
    verdict.require()


def test_signatures_by_strangers_beside_it_do_no_harm() -> None:
    verdict = evaluate(trusting("a"), DIGEST, [envelope("b"), envelope("a")])
    assert verdict.signers == ("a",)
    assert reasons(verdict) == [Reason.UNKNOWN_KEY]
    assert not verdict.warnings


def tampered(signer: str) -> Envelope:
    good = envelope(signer)
    return replace(good, payload=good.payload.replace(b"llama", b"lorem"))


def under_another_key(signer: str, claimed: str) -> Envelope:
    good = envelope(signer)
    return replace(good, signatures=(Signature(key(claimed).key_id, good.signatures[0].sig),))


@pytest.mark.parametrize(
    ("envelopes", "expected"),
    [
        ([], [Reason.UNSIGNED]),
        ([envelope("b")], [Reason.UNKNOWN_KEY]),
        ([tampered("a")], [Reason.BAD_SIGNATURE]),
        ([under_another_key("b", "a")], [Reason.BAD_SIGNATURE]),
        ([under_another_key("a", "b")], [Reason.UNKNOWN_KEY]),
        ([replace(envelope("a"), payload_type="text/plain")], [Reason.BAD_SIGNATURE]),
        ([envelope("a", subject=sha256_of(b"other"))], [Reason.OTHER_BUNDLE]),
        ([envelope("a", predicate_type=NUMERICS)], [Reason.OTHER_STATEMENT]),
        ([envelope("a", predicate={"artifactType": "text/plain", "formatVersion": 1})], [Reason.OTHER_STATEMENT]),
        ([envelope("a", predicate={"artifactType": BUNDLE_TYPE})], [Reason.MALFORMED]),
        ([envelope("a", predicate=BundleClaim(99, BUNDLE_TYPE).to_dict())], [Reason.NEWER_FORMAT]),
        ([sign_envelope(key("a"), PAYLOAD_TYPE, b"{}")], [Reason.MALFORMED]),
        ([sign_envelope(key("a"), "text/plain", b"{}")], [Reason.MALFORMED]),
    ],
)
def test_a_signature_that_does_not_count(envelopes: list[Envelope], expected: list[Reason]) -> None:
    verdict = evaluate(trusting("a"), DIGEST, envelopes)
    assert not verdict.trusted
    assert reasons(verdict) == expected
    with pytest.raises(SignatureError) as caught:
        verdict.require()
    assert caught.value.exit_code is ExitCode.INTEGRITY
    assert [problem.where for problem in caught.value.problems] == [reason.value for reason in expected]
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"revoked": True}, Reason.REVOKED),
        ({"valid_until": NOW}, Reason.EXPIRED),
        ({"valid_from": NOW + timedelta(seconds=1)}, Reason.NOT_YET_VALID),
    ],
)
def test_a_key_whose_time_it_is_not(limits: dict[str, Any], expected: Reason) -> None:
    trusted_key = TrustedKey("a", key("a").public, **limits)
    verdict = evaluate(TrustPolicy(Mode.ENFORCE, (trusted_key,)), DIGEST, [envelope("a")], now=NOW)
    assert reasons(verdict) == [expected]
    assert not verdict.trusted


def test_a_key_within_its_time() -> None:
    trusted_key = TrustedKey("a", key("a").public, NOW, NOW + timedelta(seconds=1))
    assert evaluate(TrustPolicy(Mode.ENFORCE, (trusted_key,)), DIGEST, [envelope("a")], now=NOW).trusted


def test_a_threshold_counts_keys_and_not_signatures() -> None:
    policy = trusting("a", "b", "ecdsa", rules=(Rule("prod/*", ("a", "b", "ecdsa"), 2),))
    assert evaluate(policy, DIGEST, [envelope("b"), envelope("ecdsa")]).signers == ("b", "ecdsa")
    assert reasons(evaluate(policy, DIGEST, [envelope("a"), envelope("a")])) == [Reason.BELOW_THRESHOLD]
    assert reasons(evaluate(policy, DIGEST, [envelope("ecdsa"), envelope("ecdsa")])) == [Reason.BELOW_THRESHOLD]


def test_signatures_for_different_names_do_not_add_up() -> None:
    policy = trusting("a", "b", rules=(Rule("*", ("a", "b"), 2),))
    verdict = evaluate(policy, DIGEST, [envelope("a"), envelope("b", name="other")])
    assert reasons(verdict) == [Reason.BELOW_THRESHOLD, Reason.BELOW_THRESHOLD]


def test_several_signatures_in_one_envelope() -> None:
    both = replace(envelope("a"), signatures=envelope("a").signatures + envelope("b").signatures)
    policy = trusting("a", "b", rules=(Rule("*", ("a", "b"), 2),))
    assert evaluate(policy, DIGEST, [both]).signers == ("a", "b")


def test_a_rule_limits_the_keys() -> None:
    policy = trusting("a", "b", rules=(Rule("prod/*", ("a",)), Rule("dev/*", ("a", "b"))))
    assert reasons(evaluate(policy, DIGEST, [envelope("b")])) == [Reason.NOT_ALLOWED, Reason.BELOW_THRESHOLD]
    assert evaluate(policy, DIGEST, [envelope("b", name="dev/llama")]).trusted
    assert reasons(evaluate(policy, DIGEST, [envelope("a", name="test/llama")])) == [Reason.NO_RULE]


def test_the_place_decides_before_the_signed_name() -> None:
    policy = trusting("a", "b", rules=(Rule("registry/prod/*", ("a",)), Rule("dev/*", ("b",))))
    fake = [envelope("b", name="dev/llama")]
    assert evaluate(policy, DIGEST, fake).trusted
    assert not evaluate(policy, DIGEST, fake, place="registry/prod/llama").trusted
    assert evaluate(policy, DIGEST, [envelope("a")], place="registry/prod/llama").trusted


def test_without_keys_the_message_says_how_to_give_them() -> None:
    verdict = evaluate(TrustPolicy(Mode.ENFORCE, origin="default trust policy"), DIGEST, [envelope("a")])
    with pytest.raises(SignatureError) as caught:
        verdict.require()
    for word in ("--trust KEY.pub", "NPUCC_TRUST_POLICY", "/etc/npucc/trust.toml"):
        assert word in str(caught.value.remedy)


def test_the_modes() -> None:
    warned = evaluate(trusting("a", mode=Mode.WARN), DIGEST, [envelope("b")])
    warned.require()
    assert [warning.split(":")[0] for warning in warned.warnings] == ["signed by a key that is not trusted"]
    off = evaluate(TrustPolicy.off(), DIGEST, [])
    off.require()
    assert not off.warnings
    assert not off.trusted


def test_an_attestation_counts_if_a_key_of_the_bundle_signed_it() -> None:
    policy = trusting("a", "b", rules=(Rule("prod/*", ("a",)),))
    statement = {"predicate_type": NUMERICS, "predicate": {"error": 0.5}}
    good, findings = attest(policy, DIGEST, envelope("a", **statement))
    assert good is not None
    assert (good.signed_by, good.statement.predicate, findings) == (("a",), {"error": 0.5}, ())
    for bad in (
        envelope("b", **statement),
        envelope("unknown", **statement),
        envelope("a", subject=sha256_of(b"other"), **statement),
        envelope("a"),
        tampered("a"),
    ):
        attestation, findings = attest(policy, DIGEST, bad)
        assert attestation is None
        assert len(findings) == 1


def test_an_unsigned_attestation_is_a_claim_where_trust_is_not_enforced() -> None:
    claim, _ = attest(TrustPolicy.off(), DIGEST, envelope("a", predicate_type=NUMERICS))
    assert claim is not None
    assert claim.signed_by == ()
    other, _ = attest(TrustPolicy.off(), DIGEST, envelope("a", subject=sha256_of(b"other"), predicate_type=NUMERICS))
    assert other is None
