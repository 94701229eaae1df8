"""A search for the variants of a step's parts that the vendor's cost model likes best, within a budget of time.

First the cut of the layers, then the tactics of every part, the dearest first. What compiles stays in the part cache,
so that a later build finds the winners there. What was found goes into a tuning table after every part.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from npubundle.estimate import step_launches
from npubundle.recipe import Recipe
from npucc.build import Lowered, in_parallel, lower
from npucc.models.config_reader import Model
from npucc.parts import PartSpec, samplers
from npucc.targets.rngd import PRODUCTS, Tactics
from npucc.trials import EQUAL, Bench, Outcome, Trial, winner
from npucc.tuning import Cost, TunedCut, TunedPart, extend, key_of

#: Hints to try beside the usual one, the most promising first. Not among them: `ForMiscModel` and `ForVisionModel`,
#: whose products came out a fifth slower, and `NoConstraint`, whose search does not end in reasonable time.
HINTS = ("ForLlmModelComputeIOBalanced", "ForLlmModelIOBound", "Default")
#: Bounds on the number of layouts to try with the best hint.
SHAPES = (4, 1)
#: Products with weights per part of a layer to try beside the usual number.
CUTS = (2, 1)

#: From names of parts to those that shall be tuned.
Choose = Callable[[Collection[str]], Collection[str]]


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part that runs on the device in a step, `calls` times under this or other names, and its key in tables."""

    spec: PartSpec
    key: str
    calls: int


@dataclass(frozen=True, slots=True)
class PartReport:
    """What was found out about a part, without a table and at best; None of either if it did not compile.

    `known` is what a table said, so that nothing was tried.
    """

    name: str
    calls: int
    default: Cost | None
    best: Cost | None
    tactics: Tactics | None
    trials: tuple[Trial, ...] = ()
    known: bool = False

    @property
    def gain(self) -> int | None:
        """Cycles less per step."""
        if self.default is None or self.best is None:
            return None
        return self.calls * (self.default.cycles - self.best.cycles)

    @property
    def untried(self) -> tuple[Tactics, ...]:
        """Variants that were left when time ran out."""
        return tuple(trial.tactics for trial in self.trials if trial.outcome is Outcome.UNTRIED)


@dataclass(frozen=True, slots=True)
class CutReport:
    """Layers in parts of at most so many products: launches of a step, and its cycles if all of the parts compiled."""

    products: int
    launches: int
    cycles: int | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a search: the number of products taken, the cuts that were compared if any were, the parts."""

    products: int
    cuts: tuple[CutReport, ...]
    parts: tuple[PartReport, ...]

    @property
    def cycles(self) -> int:
        """Of a step's parts with the usual tactics, as far as they are known."""
        return sum(part.calls * part.default.cycles for part in self.parts if part.default is not None)

    @property
    def gain(self) -> int:
        """Cycles less per step by better tactics."""
        return sum(part.gain or 0 for part in self.parts)

    @property
    def cut_gain(self) -> int | None:
        """Cycles less per step by a better cut; None if the usual one or no other was measured."""
        cycles = {cut.products: cut.cycles for cut in self.cuts}
        usual, best = cycles.get(PRODUCTS), cycles.get(self.products)
        return None if usual is None or best is None or len(cycles) == 1 else usual - best


@dataclass
class Search:
    """The search for one step. The tables of the bench's target say what is known already; `table` is extended."""

    model: Model
    recipe: Recipe
    bench: Bench
    table: Path
    _defaults: dict[str, Trial] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def run(self, choose: Choose | None = None) -> Report:
        """Search until all is tried or the budget is spent. With `choose`, for some parts of the cut that builds take.

        Raises UsageError for a table that cannot be read, ResourceError where host or SDK fail.
        """
        extend(self.table)  # a folder that is missing or a damaged file should not cost an hour
        self.bench.cache.remove_abandoned()
        target = self.bench.target
        lowered = self._lower("the step", None)
        cuts: tuple[CutReport, ...] = ()
        if choose is None and target.max_products is None:
            lowered, cuts = self._best_cut(lowered)
        parts = step_parts(lowered, choose)
        self._compile_defaults(lowered, parts)
        parts.sort(key=self._dearness, reverse=True)
        by_name = {part.spec.name: part for part in parts}
        reports = in_parallel(
            lambda spec: self._tune(lowered, by_name[spec.name]), [part.spec for part in parts], target
        )
        return Report(lowered.traced.cut.products_per_part or PRODUCTS, cuts, tuple(reports))

    def _lower(self, what: str, products: int | None) -> Lowered:
        cut = self.bench.target.CUT
        if products is not None:
            cut = dataclasses.replace(cut, products_per_part=products, tuned_products=None)
        with self.bench.progress.step("trace", what):
            return lower(self.model, self.recipe, self.bench.target, cut)

    # -- cuts --------------------------------------------------------------------------------------------------------

    def _best_cut(self, usual: Lowered) -> tuple[Lowered, tuple[CutReport, ...]]:
        """The step with its layers cut in the best way that was measured, or in the one that a table knows."""
        target, layer = self.bench.target, usual.traced.layer
        known = target.tuned_cut(layer)
        if known is not None and known.untried == 0:
            return usual, ()
        ways = {n: self._lower(f"layers in parts of {n} products", n) for n in (PRODUCTS, *CUTS)}
        reports = {n: self._measure(n, way) for n, way in ways.items()}
        measured = [(report.cycles, report) for report in reports.values() if report.cycles is not None]
        if not measured:
            return usual, tuple(reports.values())
        fewest = min(cycles for cycles, _ in measured)
        cycles, best = min(
            (pair for pair in measured if pair[0] <= fewest * (1 + EQUAL)), key=lambda pair: pair[1].launches
        )
        entry = TunedCut(
            name=shape_of(usual),
            products_per_part=best.products,
            cycles=cycles,
            launches=best.launches,
            default=reports[PRODUCTS].cycles,
            compiler=target.compiler(),
            untried=sum(report.outcome is Outcome.UNTRIED for report in reports.values()),
        )
        extend(self.table, cuts={(key_of(layer), target.fusion): entry})
        return ways[best.products], tuple(reports.values())

    def _measure(self, products: int, lowered: Lowered) -> CutReport:
        """Of all parts of layers, with the usual tactics: what a better one saves, it saves in any cut."""
        names = {name for stage in lowered.traced.stages.values() for name in stage}
        parts = step_parts(lowered, names.intersection)
        self._compile_defaults(lowered, parts)
        trials = [self._defaults[part.key] for part in parts]
        launches = sum(part.calls for part in parts)
        costs = [trial.cost for trial in trials if trial.cost is not None]
        if len(costs) < len(parts):
            failed = any(trial.outcome is Outcome.FAILED for trial in trials)
            return CutReport(products, launches, None, Outcome.FAILED if failed else Outcome.UNTRIED)
        cycles = sum(part.calls * cost.cycles for part, cost in zip(parts, costs, strict=True))
        return CutReport(products, launches, cycles, Outcome.COMPILED)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _compile_defaults(self, lowered: Lowered, parts: Sequence[StepPart]) -> None:
        """Every part with the usual tactics, unless that was done, or a table has it."""
        inputs = samplers(lowered.traced)

        def make(spec: PartSpec) -> Trial:
            known = self.bench.target.tuned_part(spec.graph)
            if known is None or (known.default is None and known.untried):
                return self.bench.trial(spec, Tactics(), inputs)
            return Trial(Tactics(), Outcome.FAILED if known.default is None else Outcome.COMPILED, known.default)

        missing = [part for part in parts if part.key not in self._defaults]
        made = in_parallel(make, [part.spec for part in missing], self.bench.target)
        self._defaults |= {part.key: trial for part, trial in zip(missing, made, strict=True)}

    def _dearness(self, part: StepPart) -> float:
        """What a step's calls cost; a part that does not compile as usual needs a variant most of all."""
        default = self._defaults[part.key]
        return float("inf") if default.cost is None else part.calls * default.cost.cycles

    def _tune(self, lowered: Lowered, part: StepPart) -> PartReport:
        """Try variants of a part, and write the best into the table."""
        target, spec = self.bench.target, part.spec
        default = self._defaults[part.key]
        known = target.tuned_part(spec.graph)
        if known is not None and known.untried == 0:
            tactics = Tactics(known.tactic, known.max_shapes)
            return PartReport(spec.name, part.calls, known.default, known.cost, tactics, known=True)
        trials = [default]
        if known is not None and (tactics := Tactics(known.tactic, known.max_shapes)) != Tactics():
            trials.append(Trial(tactics, Outcome.COMPILED, known.cost))
        self._try_variants(spec, trials, lowered)
        best = winner(trials)
        if best is None:
            return PartReport(spec.name, part.calls, None, None, None, tuple(trials))
        found = PartReport(spec.name, part.calls, default.cost, best.cost, best.tactics, tuple(trials))
        if best.cost is not None and any(trial.outcome is not Outcome.UNTRIED for trial in trials[1:]):
            entry = TunedPart(
                name=f"{spec.name} of {shape_of(lowered)}",
                tactic=best.tactics.hint,
                max_shapes=best.tactics.max_shapes,
                cost=best.cost,
                default=default.cost,
                compiler=target.compiler(),
                untried=len(found.untried),
            )
            with self._writing:
                extend(self.table, parts={(part.key, target.fusion): entry})
        return found

    def _try_variants(self, spec: PartSpec, trials: list[Trial], lowered: Lowered) -> None:
        """All hints; then, with the best of them, bounds on the number of layouts."""
        inputs = samplers(lowered.traced)

        def attempt(tactics: Tactics) -> None:
            if all(trial.tactics != tactics for trial in trials):
                trials.append(self.bench.trial(spec, tactics, inputs, trials))

        for hint in HINTS:
            attempt(Tactics(hint))
        best = winner(trials)
        for shapes in SHAPES:
            attempt(Tactics(best.tactics.hint if best else Tactics().hint, shapes))


def step_parts(lowered: Lowered, choose: Choose | None = None) -> list[StepPart]:
    """The parts that a step starts on the device, in order; those of equal graphs once."""
    calls = step_launches(lowered.programs["train"])
    chosen = calls if choose is None else choose(calls)
    found: dict[str, StepPart] = {}
    for name in (name for name in calls if name in chosen):
        spec = lowered.traced.parts[name]
        key = key_of(spec.graph)
        before = found.get(key, StepPart(spec, key, 0))
        found[key] = dataclasses.replace(before, calls=before.calls + calls[name])
    return list(found.values())


def shape_of(lowered: Lowered) -> str:
    """The model's family and width and the length of a sequence, for people who read a table."""
    config = lowered.traced.model.config
    return f"{config.model_type} {config.hidden_size} s{lowered.traced.recipe.seq_len}"
