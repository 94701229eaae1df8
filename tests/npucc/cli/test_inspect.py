from __future__ import annotations

from pathlib import Path

from npucc.build import Compiled, Lowered
from tests.npucc.cli.conftest import Run


def test_everything_is_there_for_programs(
    run: Run, bundle: Path, trust: Path, signed: Compiled, lowered: Lowered
) -> None:
    told = run("inspect", bundle, "--trust", trust, "--json").json
    assert told["name"] == signed.config.name
    assert told["digest"] == signed.content.manifest_digest
    assert told["verified"]["trusted"] is True
    assert told["model"] == signed.config.model.to_dict()
    assert told["recipe"] == signed.config.recipe.to_dict()
    assert told["toolchain"] == dict(signed.config.toolchain)
    assert told["memory"]["peak"] == lowered.memory.peak
    assert {part["name"]: part["key"] for part in told["parts"]} == {n: i.key for n, i in lowered.identities.items()}
    assert all(part["measured"] for part in told["parts"])


def test_everything_is_there_for_people(run: Run, bundle: Path, trust: Path, signed: Compiled) -> None:
    text = run("inspect", bundle, "--trust", trust).out
    assert text.startswith(f"{signed.config.name}  {signed.content.manifest_digest}\n")
    assert "model      llama, 2 layers of 36, vocabulary 61\n" in text
    assert "recipe     lora, rank 3, alpha 6, targets q,v, 14 tokens, activations auto\n" in text
    for part in signed.config.parts:
        assert f"\n{part.name}  " in text
    assert "(2e-05)" in text


def test_an_untrusted_bundle_is_shown_on_demand_only(run: Run, bundle: Path) -> None:
    assert run("inspect", bundle).code == 5
    shown = run("inspect", bundle, "--unverified", "--json")
    assert shown.code == 0
    assert shown.json["verified"]["trusted"] is False


def test_damage_is_refused_even_then(run: Run, bundle: Path, tmp_path: Path) -> None:
    raw = bytearray(bundle.read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "bad.npub").write_bytes(raw)
    assert run("inspect", "bad.npub", "--unverified").code == 5
