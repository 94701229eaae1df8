"""`npucc plan`."""

from __future__ import annotations

import json
from typing import Any

import typer

from npucc.cli import options as o


def plan(
    model: o.ModelOption = None,
    recipe: o.RecipeOption = None,
    target: o.TargetOption = None,
    mode: o.ModeOption = None,
    rank: o.RankOption = None,
    alpha: o.AlphaOption = None,
    targets: o.TargetsOption = None,
    seq_len: o.SeqLenOption = None,
    activations: o.ActivationsOption = None,
    memory_budget: o.BudgetOption = None,
    logits: o.LogitsOption = False,
    ignore_config_key: o.IgnoreOption = None,
    fusion: o.FusionOption = None,
    max_mm: o.MaxProductsOption = None,
    tactic: o.TacticOption = None,
    max_shapes: o.MaxShapesOption = None,
    cache_dir: o.CacheOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Say what a build would do: parts, memory, cache hits and why a miss. Compiles nothing."""
    flags = {
        "model": model, "target": target, "mode": mode, "rank": rank, "alpha": alpha, "targets": targets,
        "seq_len": seq_len, "activations": activations, "memory_budget": memory_budget, "logits": logits,
    }  # fmt: skip
    wanted = o.build_options(recipe, flags, ignore_config_key)

    from npucc import build as builder
    from npucc.hub import config_path
    from npucc.models.config_reader import read_model
    from npucc.targets import find

    chosen = find(wanted.target, o.target_options(fusion, 1, max_mm, tactic, max_shapes))
    try:
        lowered = builder.lower(
            read_model(config_path(wanted.model), ignore_keys=wanted.ignore_keys), wanted.recipe, chosen
        )
        document = describe(lowered, o.cache(cache_dir), wanted.recipe.memory_budget or chosen.MEMORY)
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
