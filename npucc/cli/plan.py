"""`npucc plan`."""

from __future__ import annotations

import json
from typing import Any

import typer

from npucc.cli import options as o
from npucc.cli.request import Request, asks_for_a_step


@asks_for_a_step
def plan(
    request: Request,
    cache_dir: o.CacheOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Say what a build would do: parts, memory, cache hits and why a miss. Compiles nothing."""
    from npucc import build as builder

    chosen = request.target()
    try:
        lowered = builder.lower(request.model(), request.what.recipe, chosen)
        document = describe(lowered, o.cache(cache_dir), request.what.recipe.memory_budget or chosen.MEMORY)
    finally:
        chosen.close()
    typer.echo(json.dumps(document, indent=2) if as_json else as_text(document))


def describe(lowered: Any, cache: Any, budget: int) -> dict[str, Any]:
    """The plan as plain values."""
    from npucc.build import estimated, part_of

    calls = dict.fromkeys(lowered.identities, 0)
    for program in lowered.programs.values():
        for phase in program.phases:
            for call in program.calls(phase):
                calls[call.part] += 1
    parts = []
    known = {}
    for spec in lowered.specs:
        identity = lowered.identities[spec.name]
        entry = cache.get(identity)
        cached = entry is not None
        if entry is not None:
            known[spec.name] = part_of(spec, lowered, entry)
        parts.append(
            {
                "name": spec.name,
                "key": identity.key,
                "nodes": len(spec.graph.nodes),
                "calls": calls[spec.name],
                "cached": cached,
                "why": None if cached else cache.why_missing(identity),
            }
        )
    memory = lowered.memory
    found = estimated(lowered, known)
    return {
        "target": lowered.target.NAME,
        "parts": parts,
        "cached": sum(part["cached"] for part in parts),
        "estimate": None if found is None else found.to_dict(),
        "memory": {
            "weights": memory.weights,
            "state": memory.state,
            "activations": memory.activations,
            "io": memory.io,
            "peak": memory.peak,
            "saved_layers": memory.saved_layers,
            "layers": lowered.traced.model.config.num_hidden_layers,
            "arenas": dict(lowered.programs["train"].arena),
            "budget": budget,
            "fits": memory.peak <= budget,
        },
    }


def as_text(document: dict[str, Any]) -> str:
    """The plan for people."""
    width = max(len(part["name"]) for part in document["parts"])
    lines = [f"{'part':<{width}}  nodes  calls  cache"]
    for part in document["parts"]:
        state = "hit" if part["cached"] else f"miss: {part['why']}"
        lines.append(f"{part['name']:<{width}}  {part['nodes']:>5}  {part['calls']:>5}  {state}")
    memory = document["memory"]
    lines += [
        "",
        f"{len(document['parts'])} parts, {document['cached']} of them cached",
        f"memory of the training program on {document['target']}: {o.show_size(memory['peak'])}",
        (
            f"  weights {o.show_size(memory['weights'])}, trained state {o.show_size(memory['state'])}, "
            f"activations {o.show_size(memory['activations'])}, inputs and outputs {o.show_size(memory['io'])}"
        ),
        f"  {memory['saved_layers']} of {memory['layers']} layers keep their activations, the others recompute them",
    ]
    lines += o.estimate_lines(document["estimate"])
    if not memory["fits"]:
        lines.append(f"  warning: more than the budget of {o.show_size(memory['budget'])}")
    return "\n".join(lines)
