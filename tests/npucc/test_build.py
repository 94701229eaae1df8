from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from npubundle import container, keys, program_json
from npubundle.config import BundleConfig
from npubundle.digest import sha256_of
from npubundle.errors import FormatError
from npubundle.program import Program
from npubundle.recipe import Activations, Mode, Recipe
from npubundle.statement import NUMERICS
from npubundle.trust import TrustPolicy
from npucc.build import (
    NAME_ANNOTATION,
    Compiled,
    Lowered,
    assemble,
    build,
    bundle_name,
    compile_all,
    lower,
    saved_layers,
)
from npucc.cache import Cache, Identity
from npucc.errors import UsageError
from npucc.parts import trace
from npucc.program_builder import training_program
from npucc.progress import Progress
from npucc.targets import cpu
from tests.npucc import tiny

QUIET = Progress("quiet")


def test_a_second_build_compiles_nothing_and_is_the_same_file(
    lowered: Lowered, warm_cache: Cache, signed: Compiled, key: Path, tmp_path: Path
) -> None:
    signer = keys.PrivateKey.load(key)
    again = build(lowered.traced.model, lowered.traced.recipe, cpu, warm_cache, QUIET, signer=signer)
    assert (again.compiled, again.cached) == (0, len({i.key for i in lowered.identities.values()}))
    assert again.content.manifest_digest == signed.content.manifest_digest
    container.write(tmp_path / "a.npub", signed.content)
    container.write(tmp_path / "b.npub", again.content)
    assert (tmp_path / "a.npub").read_bytes() == (tmp_path / "b.npub").read_bytes()


def test_a_build_elsewhere_by_somebody_else_is_the_same_file(
    signed: Compiled, key: Path, config_file: Path, tmp_path: Path
) -> None:
    """Another folder, HOME, locale, time zone, hash seed and cache; everything is compiled anew."""
    home = tmp_path / "somewhere else" / "ü"
    home.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "XDG_"))}
    environment |= {
        "HOME": str(home), "USER": "somebody", "LC_ALL": "C", "TZ": "Pacific/Auckland", "PYTHONHASHSEED": "99",
        "NPUCC_CACHE": str(home / "cache"), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    command = [sys.executable, "-m", "npucc", "build", "--model", str(config_file), "--rank", "3", "--alpha", "6"]
    command += ["--seq-len", str(tiny.SEQ_LEN), "--key", str(key), "-o", "out.npub", "--json"]
    ran = subprocess.run(command, cwd=home, env=environment, check=True, capture_output=True, text=True, timeout=300)
    assert json.loads(ran.stdout)["digest"] == signed.content.manifest_digest
    container.write(tmp_path / "here.npub", signed.content)
    assert (home / "out.npub").read_bytes() == (tmp_path / "here.npub").read_bytes()


def test_an_ecdsa_key_signs_the_same_digest(lowered: Lowered, warm_cache: Cache, signed: Compiled) -> None:
    model, recipe = lowered.traced.model, lowered.traced.recipe
    made = build(model, recipe, cpu, warm_cache, QUIET, signer=keys.generate("ecdsa-p256"))
    assert made.content.manifest_digest == signed.content.manifest_digest


def test_an_unsigned_build_has_the_same_digest_and_no_statements(
    lowered: Lowered, warm_cache: Cache, signed: Compiled
) -> None:
    made = build(lowered.traced.model, lowered.traced.recipe, cpu, warm_cache, QUIET)
    assert made.content.manifest_digest == signed.content.manifest_digest
    assert made.content.attached == ()


def test_a_name_is_made_from_the_recipe_or_given(lowered: Lowered, warm_cache: Cache, signed: Compiled) -> None:
    assert signed.config.name == bundle_name(lowered) == f"llama-2x36-lora-r3-q-v-s{tiny.SEQ_LEN}-cpu"
    made = build(lowered.traced.model, lowered.traced.recipe, cpu, warm_cache, QUIET, name="team/model")
    assert made.config.name == "team/model"
    assert made.compiled == 0
    with pytest.raises(FormatError):
        build(lowered.traced.model, lowered.traced.recipe, cpu, warm_cache, QUIET, name="a b")


def test_what_is_in_the_bundle_is_what_was_built(lowered: Lowered, signed: Compiled, key: Path, tmp_path: Path) -> None:
    container.write(tmp_path / "out.npub", signed.content)
    with container.open_container(tmp_path / "out.npub", TrustPolicy.from_paths([Path(f"{key}.pub")])) as opened:
        config = BundleConfig.of(opened)
        (statement,) = [a.statement.predicate for a in opened.attestations if a.statement.predicate_type == NUMERICS]
        layers = {layer.digest: layer for layer in opened.layers}
        programs = {role: opened.blobs[digest].read() for role, digest in config.programs.items()}
    assert config == signed.config
    assert {part.name for part in config.parts} == set(lowered.identities)
    for part in config.parts:
        assert part.key == lowered.identities[part.name].key
        assert part.name in layers[part.digest].annotations[NAME_ANNOTATION].split(",")
        assert layers[part.digest].size == part.size
        assert (part.numerics.bound, part.numerics.verdict) == (cpu.BOUND, "pass")
        spec = lowered.traced.parts[part.name]
        assert [(p.name, p.type) for p in part.inputs] == [(v.name, v.type) for v in spec.graph.inputs]
    assert {role: program_json.decode(raw) for role, raw in programs.items()} == dict(lowered.programs)
    assert config.programs["train"] == sha256_of(programs["train"])
    assert set(statement["parts"]) == set(lowered.identities)
    assert all(m["relative"] <= cpu.BOUND for outcomes in statement["parts"].values() for m in outcomes)


def test_nothing_measured_or_of_the_host_is_in_what_is_signed(signed: Compiled) -> None:
    documents = signed.config.encode() + signed.content.raw
    for told in (b"relative", b"seconds", b"created", os.fsencode(Path.cwd()), os.fsencode(Path.home()) + b"/"):
        assert told not in documents


def test_parts_with_equal_graphs_are_compiled_once(lowered: Lowered, tmp_path: Path) -> None:
    embed = lowered.traced.parts["embed"]
    twin = replace(embed, name="twin", graph=replace(embed.graph, name="twin"))
    traced = replace(lowered.traced, parts=dict(lowered.traced.parts) | {"twin": twin})
    identity = Identity.of("twin", twin.graph, cpu.NAME, {}, cpu.toolchain())
    made = replace(lowered, traced=traced, identities=dict(lowered.identities) | {"twin": identity})
    entries, compiled = compile_all(made, Cache(tmp_path), QUIET)
    assert compiled == len({i.key for i in lowered.identities.values()})
    config = assemble(made, entries, compiled).config
    assert config.part("twin").digest == config.part("embed").digest


def recompiled(lowered: Lowered, warm_cache: Cache, recipe: Recipe) -> set[str]:
    """Names of the parts that a build with another recipe would compile."""
    changed = lower(lowered.traced.model, recipe, cpu)
    return {name for name, identity in changed.identities.items() if warm_cache.get(identity) is None}


def test_another_rank_compiles_only_what_contains_lora(lowered: Lowered, warm_cache: Cache) -> None:
    missing = recompiled(lowered, warm_cache, replace(lowered.traced.recipe, rank=5))
    assert missing == {
        "accumulate", "adamw", "clip", "layer.forward.save", "layer.backward.save", "layer.backward.save.first",
        "reference.accumulate", "reference.layer.forward", "reference.layer.backward",
    }  # fmt: skip


def test_another_policy_compiles_only_layers(lowered: Lowered, warm_cache: Cache) -> None:
    missing = recompiled(lowered, warm_cache, replace(lowered.traced.recipe, activations=Activations.RECOMPUTE))
    assert missing == {"layer.forward", "layer.backward", "layer.backward.first"}


def test_logits_compile_only_their_slices(lowered: Lowered, warm_cache: Cache) -> None:
    assert recompiled(lowered, warm_cache, replace(lowered.traced.recipe, logits=True)) == {"logits.slice.61"}


def test_learning_rate_and_the_like_are_inputs(lowered: Lowered) -> None:
    inputs = {value.name for value in lowered.traced.parts["adamw"].graph.inputs}
    assert {"learning_rate", "weight_decay", "correction1", "scale"} <= inputs


def test_a_small_budget_saves_fewer_layers(lowered: Lowered) -> None:
    model, recipe = tiny.model(num_hidden_layers=6), lowered.traced.recipe
    traced = trace(model, recipe, cpu.CUT)
    peaks = [_peak(training_program(traced, saved)) for saved in range(7)]
    assert peaks == sorted(set(peaks))
    for saved, peak in enumerate(peaks):
        assert saved_layers(replace(traced, recipe=replace(recipe, memory_budget=peak)), cpu) == saved
        assert saved_layers(replace(traced, recipe=replace(recipe, memory_budget=peak - 1)), cpu) == max(0, saved - 1)
    made = lower(model, replace(recipe, memory_budget=peaks[4]), cpu)
    assert (made.memory.saved_layers, made.memory.peak) == (4, peaks[4])


def _peak(program: Program) -> int:
    """Bytes of everything that the program declares, counted here once more."""
    owned = [b.type.nbytes for b in program.buffers.values() if b.view_of is None and b.role != "activation"]
    return sum(owned) + max(program.arena.values())


def test_the_memory_report_adds_up(lowered: Lowered) -> None:
    memory, program = lowered.memory, lowered.programs["train"]
    assert memory.peak == _peak(program)
    assert memory.activations == max(program.arena.values())
    assert memory.state == 5 * 4 * lowered.traced.trained
    assert memory.weights == sum(4 * math.prod(shape) for shape in program.checkpoint.values())


def test_a_full_build_is_named_so_and_devices_train_layers_only() -> None:
    recipe = Recipe(Mode.FULL, targets=(), seq_len=tiny.SEQ_LEN)
    assert bundle_name(lower(tiny.model(), recipe, cpu)) == f"llama-2x36-full-s{tiny.SEQ_LEN}-cpu"
    device = replace(tiny.CUT, head_rows=None, query_rows=tiny.SEQ_LEN, products_per_part=3, own_memory=True)
    assert "upload" in lower(tiny.model(), recipe, cpu, device).programs["train"].phases
    with pytest.raises(UsageError, match="trains decoder layers only"):
        lower(tiny.model(), replace(recipe, train_norm=True), cpu, device)
