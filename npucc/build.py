"""From a model and a recipe to the content of a bundle: trace, cut, compile, check, assemble."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

from npubundle import program_json
from npubundle.config import BundleConfig, Memory
from npubundle.config import Target as TargetInfo
from npubundle.content import Content, NewLayer, build_container
from npubundle.digest import sha256_of
from npubundle.estimate import StepEstimate, device_memory, estimate
from npubundle.keys import Signer
from npubundle.part import Numerics, OnnxForm, Part, PartGraph, Port
from npubundle.program import ROLES, Program
from npubundle.program_check import check
from npubundle.recipe import Activations, Recipe
from npubundle.statement import NUMERICS
from npucc.cache import Cache, Entry, Identity
from npucc.errors import ResourceError, UsageError
from npucc.models.config_reader import Model
from npucc.numerics import Measured, measure, part_bound
from npucc.parts import PartSpec, Traced, samplers, trace
from npucc.passes import PIPELINE_VERSION
from npucc.program_builder import reference_program, training_program
from npucc.progress import Progress
from npucc.targets import CutPolicy, Target, find

#: Annotation of a layer: the names of the parts or the program in it.
NAME_ANNOTATION = "dev.npucc.name"

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Lowered:
    """A build before anything is compiled: what `npucc plan` shows.

    `identities` has all parts, `onnx` those that are programs of a device, as the ONNX models that they also are.
    """

    traced: Traced
    target: Target
    programs: Mapping[str, Program]
    identities: Mapping[str, Identity]
    memory: Memory
    on_host: frozenset[str]
    onnx: Mapping[str, Identity]

    def target_of(self, part: str) -> Target:
        """What compiles this part."""
        return host_target() if part in self.on_host else self.target

    @property
    def specs(self) -> tuple[PartSpec, ...]:
        """The parts that the programs call, sorted by name."""
        return tuple(self.traced.parts[name] for name in sorted(self.identities))


@dataclass(frozen=True, slots=True)
class Compiled:
    """A finished build. `compiled` and `cached` count parts by key."""

    config: BundleConfig
    content: Content
    measured: Mapping[str, tuple[Measured, ...]]
    compiled: int
    cached: int
    estimate: StepEstimate | None = None


def estimated(lowered: Lowered, parts: Mapping[str, Part]) -> StepEstimate | None:
    """What the vendor's cost model says of a step; None where it says nothing, or of parts that are not compiled."""
    program, options = lowered.programs["train"], lowered.target.bundle_options()
    return estimate(program, parts, options, lowered.traced.recipe.seq_len)


def lower(model: Model, recipe: Recipe, target: Target, cut: CutPolicy | None = None) -> Lowered:
    """Trace the step, choose what to save, build both programs and name every part's identity.

    `cut` is for a search that tries another than the target's.
    """
    cut = cut or target.CUT
    if cut.own_memory and (recipe.train_norm or recipe.train_embeddings or recipe.train_head):
        raise UsageError(
            f"the target {target.NAME} trains decoder layers only",
            remedy="leave out --train-norm, --train-embeddings and --train-head, or use --target cpu",
        )
    traced = trace(model, recipe, cut)
    saved = saved_layers(traced, target)
    programs = {"train": training_program(traced, saved), "reference": reference_program(traced)}
    names = sorted({name for program in programs.values() for name in program.parts()})
    on_host = {
        call.part for p in programs.values() for phase in p.phases for call in p.calls(phase) if call.queue == "host"
    }
    host = host_target()
    toolchains = {each.NAME: each.toolchain() for each in (host, target)}
    identities, onnx = {}, {}
    for name in names:
        graph, chosen = traced.parts[name].graph, host if name in on_host else target
        made = Identity.of(name, graph, chosen.NAME, chosen.options(graph), toolchains[chosen.NAME])
        identities[name] = made
        if chosen.MEDIA_TYPE != host.MEDIA_TYPE:
            onnx[name] = dataclasses.replace(
                made, target=host.NAME, options=host.options(graph), toolchain=toolchains[host.NAME]
            )
    memory = _memory(programs["train"], saved)
    return Lowered(traced, target, programs, identities, memory, frozenset(on_host), onnx)


def host_target() -> Target:
    """What compiles parts that run on the host of a device, and the ONNX forms of the others."""
    return find("cpu")


def saved_layers(traced: Traced, target: Target) -> int:
    """How many layers keep their activations: all, none, or as many as the memory budget has room for."""
    recipe, layers = traced.recipe, traced.model.config.num_hidden_layers
    if recipe.activations is not Activations.AUTO:
        return layers if recipe.activations is Activations.SAVE else 0
    budget = recipe.memory_budget or target.MEMORY
    # Where the device's memory is its own, what the host keeps is not in it.
    needs = device_memory if traced.cut.own_memory else _peak
    low, high = 0, layers
    while low < high:  # the peak grows with the number of saved layers
        middle = (low + high + 1) // 2
        if needs(training_program(traced, middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _peak(program: Program) -> int:
    return _memory(program, 0).peak


def _memory(program: Program, saved: int) -> Memory:
    sizes = dict.fromkeys(ROLES, 0)
    for buffer in program.buffers.values():
        if buffer.view_of is None:
            sizes[buffer.role] += buffer.type.nbytes
    return Memory(
        weights=sizes["weight"] + sizes["copy"],
        state=sizes["param"] + sizes["grad"] + sizes["moment"],
        activations=max(program.arena.values()),
        io=sizes["input"] + sizes["scalar"] + sizes["output"],
        saved_layers=saved,
    )


def bundle_name(lowered: Lowered) -> str:
    """A name from the recipe, for people and trust rules, when none is given."""
    recipe, config = lowered.traced.recipe, lowered.traced.model.config
    trained = "full" if recipe.full else f"lora-r{recipe.rank}-{'-'.join(recipe.targets)}"
    size = f"{config.num_hidden_layers}x{config.hidden_size}"
    return f"{config.model_type}-{size}-{trained}-s{recipe.seq_len}-{lowered.target.NAME}"


def compile_all(lowered: Lowered, cache: Cache, progress: Progress) -> tuple[dict[str, Entry], int]:
    """Every part by name, from the cache or compiled and checked now; and how many keys were compiled.

    ONNX forms come first and are not counted: a graph that computes something wrong is found in seconds.
    """
    cache.remove_abandoned()
    inputs, host = samplers(lowered.traced), host_target()

    def make_form(spec: PartSpec) -> Entry:
        part = host.compile_part(spec.graph)
        return Entry(part, tuple(measure(spec.graph, part, host, inputs, bounds=lowered.target)))

    def make(spec: PartSpec) -> Entry:
        target = lowered.target_of(spec.name)
        part = target.compile_part(spec.graph)
        return Entry(part, tuple(measure(spec.graph, part, target, inputs)))

    forms, _ = _all_of(lowered, lowered.onnx, make_form, cache, progress, "onnx")
    entries, compiled = _all_of(lowered, lowered.identities, make, cache, progress)
    return {name: dataclasses.replace(entry, onnx=forms.get(name)) for name, entry in entries.items()}, compiled


def _all_of(
    lowered: Lowered,
    identities: Mapping[str, Identity],
    make: Callable[[PartSpec], Entry],
    cache: Cache,
    progress: Progress,
    group: str | None = None,
) -> tuple[dict[str, Entry], int]:
    """Entries by the name of their part, from the cache or made now, and how many were made."""
    by_key: dict[str, Entry] = {}
    missing: dict[str, PartSpec] = {}
    for name, identity in sorted(identities.items()):
        if identity.key in by_key or identity.key in missing:
            continue
        entry = cache.get(identity)
        if entry is None:
            missing[identity.key] = lowered.traced.parts[name]
        else:
            progress.cached(group or name.split(".")[0], name)
            by_key[identity.key] = entry

    def made(spec: PartSpec) -> Entry:
        with progress.step(group or spec.name.split(".")[0], spec.name):
            entry = make(spec)
            remember(cache, identities[spec.name], entry, progress)
        return entry

    by_key |= dict(zip(missing, in_parallel(made, list(missing.values()), lowered.target), strict=True))
    return {name: by_key[identity.key] for name, identity in identities.items()}, len(missing)


def in_parallel(make: Callable[[PartSpec], Made], specs: Sequence[PartSpec], target: Target) -> list[Made]:
    """What is made of each, in the order of `specs`. The first failure ends the others, and the target's work."""
    if target.jobs == 1:
        return [make(spec) for spec in specs]
    with ThreadPoolExecutor(target.jobs, thread_name_prefix="compile") as pool:
        futures = [pool.submit(make, spec) for spec in specs]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            target.close()
            raise
    return [future.result() for future in futures]


def remember(cache: Cache, identity: Identity, entry: Entry, progress: Progress) -> None:
    """A cache that cannot be written costs time, not the build."""
    try:
        cache.put(identity, entry)
    except OSError as failure:
        progress.note(f"warning: {identity.part} is not cached: {failure.strerror} ({cache.root})")


def assemble(
    lowered: Lowered,
    entries: Mapping[str, Entry],
    compiled: int,
    *,
    name: str | None = None,
    signer: Signer | None = None,
) -> Compiled:
    """The bundle's content, signed if there is a signer; without one there is no numerics statement either."""
    programs = {role: program_json.encode(program) for role, program in lowered.programs.items()}
    config = _config(
        lowered, entries, {role: sha256_of(raw) for role, raw in programs.items()}, name or bundle_name(lowered)
    )
    for program in lowered.programs.values():
        check(program, {part.name: part for part in config.parts})
    measured = {part: entry.measured for part, entry in entries.items()}
    forms = {part: entry.onnx.measured for part, entry in entries.items() if entry.onnx}
    content = build_container(
        config.name,
        config.encode(),
        _layers(lowered, entries, programs),
        signer=signer,
        attestations=[(NUMERICS, _numerics_predicate(lowered, measured, forms))] if signer else (),
    )
    distinct = len({identity.key for identity in lowered.identities.values()})
    found = estimated(lowered, {part.name: part for part in config.parts})
    return Compiled(config, content, measured, compiled, distinct - compiled, found)


def _config(lowered: Lowered, entries: Mapping[str, Entry], programs: Mapping[str, str], name: str) -> BundleConfig:
    import torch

    toolchain = {
        "torch": torch.__version__.split("+")[0],
        "passes": str(PIPELINE_VERSION),
        **host_target().toolchain(),
        **lowered.target.toolchain(),
    }
    return BundleConfig(
        name=name,
        model=lowered.traced.model.config,
        recipe=lowered.traced.recipe,
        target=TargetInfo(lowered.target.NAME, lowered.target.bundle_options()),
        toolchain=toolchain,
        parts=tuple(part_of(spec, lowered, entries[spec.name]) for spec in lowered.specs),
        programs=programs,
        memory=lowered.memory,
    )


def part_of(spec: PartSpec, lowered: Lowered, entry: Entry) -> Part:
    """A part as `bundle.json` has it."""
    graph, target = spec.graph, lowered.target_of(spec.name)
    outputs = zip(graph.outputs, graph.output_types, strict=True)
    return Part(
        name=spec.name,
        key=lowered.identities[spec.name].key,
        inputs=tuple(Port(v.name, v.type) for v in graph.inputs),
        outputs=tuple(Port(name, kind) for (name, _), kind in outputs),
        inplace=spec.inplace,
        digest=sha256_of(entry.payload),
        size=len(entry.payload),
        media_type=target.MEDIA_TYPE,
        requires=target.requirements(),
        numerics=Numerics(part_bound(graph, target), "pass"),
        graph=_graph_of(entry, target),
        estimate=entry.part.estimate,
        onnx=_onnx_of(entry),
    )


def _graph_of(entry: Entry, target: Target) -> PartGraph | None:
    raw = entry.part.graph
    if raw is None or target.GRAPH_MEDIA_TYPE is None:
        return None
    return PartGraph(sha256_of(raw), len(raw), target.GRAPH_MEDIA_TYPE)


def _onnx_of(entry: Entry) -> OnnxForm | None:
    if entry.onnx is None:
        return None
    raw = entry.onnx.payload
    return OnnxForm(sha256_of(raw), len(raw), host_target().requirements())


def _layers(lowered: Lowered, entries: Mapping[str, Entry], programs: Mapping[str, bytes]) -> Sequence[NewLayer]:
    """Programs first, then each payload once, under the names of all parts that have it."""
    layers = [NewLayer(program_json.MEDIA_TYPE, raw, {NAME_ANNOTATION: role}) for role, raw in sorted(programs.items())]
    names: dict[tuple[str, bytes], list[str]] = {}
    for name in sorted(entries):
        target, part = lowered.target_of(name), entries[name].part
        names.setdefault((target.MEDIA_TYPE, part.payload), []).append(name)
        if part.graph is not None and target.GRAPH_MEDIA_TYPE is not None:
            names.setdefault((target.GRAPH_MEDIA_TYPE, part.graph), []).append(name)
        if (form := entries[name].onnx) is not None:
            names.setdefault((host_target().MEDIA_TYPE, form.payload), []).append(name)
    for (media_type, blob), parts in names.items():
        layers.append(NewLayer(media_type, blob, {NAME_ANNOTATION: ",".join(parts)}))
    return layers


def _numerics_predicate(
    lowered: Lowered, measured: Mapping[str, Sequence[Measured]], forms: Mapping[str, Sequence[Measured]]
) -> dict[str, Any]:
    return {
        "bound": lowered.target.BOUND,
        "reference": "float64 interpretation of the canonical graph",
        "parts": _plain(measured),
        **({"onnx": _plain(forms)} if forms else {}),
    }


def _plain(measured: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    return {part: [dataclasses.asdict(one) for one in outcomes] for part, outcomes in sorted(measured.items())}


def build(  # noqa: PLR0913 -- what a user may choose, by keyword and with a default
    model: Model,
    recipe: Recipe,
    target: Target,
    cache: Cache,
    progress: Progress,
    *,
    name: str | None = None,
    signer: Signer | None = None,
    graphs: bool = True,
    on_lowered: Callable[[Lowered], None] | None = None,
) -> Compiled:
    """The whole way. Raises CompilerError; a numerics check that fails leaves no entry in the cache.

    Without `graphs`, the bundle leaves out the graphs that a device's parts were compiled from. `on_lowered` is called
    with the lowered step before anything is compiled, for a dump of it.
    """
    with progress.step("trace", f"{model.config.num_hidden_layers} layers, {recipe.seq_len} tokens"):
        lowered = lower(model, recipe, target)
    if on_lowered is not None:
        on_lowered(lowered)
    try:
        entries, compiled = compile_all(lowered, cache, progress)
    except MemoryError:
        raise ResourceError("out of memory", remedy="use a host with more memory") from None
    if not graphs:
        entries = {name: entry.without_graph() for name, entry in entries.items()}
    return assemble(lowered, entries, compiled, name=name, signer=signer)
