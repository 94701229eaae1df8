"""`npucc inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from npubundle import program_json
from npubundle.config import BundleConfig
from npubundle.container import Container, open_container
from npubundle.estimate import estimate
from npubundle.recipe import FULL_FLAGS
from npubundle.statement import NUMERICS
from npubundle.trust import TrustPolicy
from npucc.cli import options as o


def inspect(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="An .npub file or an OCI layout folder.")],
    trust: o.TrustOption = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Show a bundle whoever signed it; digests are still checked.")
    ] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Show what is in a bundle: model, recipe, toolchain, parts, memory, numerics, signers."""
    policy = TrustPolicy.off() if unverified else o.policy(trust)
    with open_container(bundle, policy) as opened:
        document = describe(opened)
    typer.echo(json.dumps(document, indent=2) if as_json else as_text(document))


def describe(opened: Container) -> dict[str, Any]:
    """The bundle as plain values."""
    config = BundleConfig.of(opened)
    numerics = [a.statement.predicate for a in opened.attestations if a.statement.predicate_type == NUMERICS]
    measured = numerics[0]["parts"] if numerics else {}
    return {
        "name": config.name,
        "digest": opened.manifest_digest,
        "verified": opened.verdict.to_dict(),
        "target": config.target.name,
        "toolchain": dict(config.toolchain),
        "model": config.model.to_dict(),
        "recipe": config.recipe.to_dict(),
        "memory": {
            "weights": config.memory.weights,
            "state": config.memory.state,
            "activations": config.memory.activations,
            "io": config.memory.io,
            "peak": config.memory.peak,
            "saved_layers": config.memory.saved_layers,
        },
        "estimate": _estimate(opened, config),
        "programs": dict(config.programs),
        "parts": [part.to_dict() | {"measured": measured.get(part.name)} for part in config.parts],
    }


def _estimate(opened: Container, config: BundleConfig) -> dict[str, Any] | None:
    """Of a device's bundle, what the vendor's cost model says of a step."""
    program = program_json.decode(opened.blobs[config.programs["train"]].read(), where="program train")
    parts = {part.name: part for part in config.parts}
    found = estimate(program, parts, config.target.options, config.recipe.seq_len)
    return None if found is None else found.to_dict()


def as_text(document: dict[str, Any]) -> str:
    """The bundle for people."""
    model, recipe = document["model"], document["recipe"]
    lines = [
        f"{document['name']}  {document['digest']}",
        f"target     {document['target']}",
        "toolchain  " + ", ".join(f"{name} {version}" for name, version in document["toolchain"].items()),
        (
            f"model      {model['model_type']}, {model['num_hidden_layers']} layers of {model['hidden_size']}, "
            f"vocabulary {model['vocab_size']}"
        ),
        (
            f"recipe     {recipe['mode']}, {_trained(recipe)}, {recipe['seq_len']} tokens, "
            f"activations {recipe['activations']}"
        ),
        f"memory     {o.show_size(document['memory']['peak'])}",
        *o.estimate_lines(document["estimate"]),
        "",
    ]
    width = max(len(part["name"]) for part in document["parts"])
    lines.append(f"{'part':<{width}}  {'size':>8}  key           error (bound)")
    for part in document["parts"]:
        worst = max((outcome["relative"] for outcome in part["measured"] or ()), default=None)
        error = "not stated" if worst is None else f"{worst:.1e}"
        bound = f"{part['numerics']['bound']:.0e}"
        lines.append(f"{part['name']:<{width}}  {part['size']:>8}  {part['key'][7:19]}  {error} ({bound})")
    return "\n".join(lines)


def _trained(recipe: dict[str, Any]) -> str:
    if "rank" in recipe:
        return f"rank {recipe['rank']}, alpha {recipe['alpha']:g}, targets {','.join(recipe['targets'])}"
    more = [name.removeprefix("train_") for name in FULL_FLAGS if recipe[name]]
    return " and ".join(["decoder layers", *more])
