"""Variants of a part, compiled under a limit of time, checked and cached as a build does."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from npucc.build import remember
from npucc.cache import Cache, Entry, Identity
from npucc.errors import CompilerError, ResourceError
from npucc.numerics import Sampler, measure
from npucc.parts import PartSpec
from npucc.progress import Progress
from npucc.targets import CompiledPart
from npucc.targets.rngd import OutOfMemoryError, RngdTarget, Tactics
from npucc.tuning import Cost
from npucc.workers.pool import OutOfTimeError, StoppedError

#: A variant may take so many times as long as the quickest one of its part...
PATIENCE = 4.0
#: ...and so many seconds in any case.
SHORTEST = 60.0
#: Cycles that differ by less are equal: no cost model is that exact.
EQUAL = 0.01
#: Of equal variants the usual one stays, unless another takes less than this part of its time, and so many seconds
#: less: the host may have been busy, and another tactic is another part key.
QUICKER, SECONDS_LESS = 0.8, 10.0


class Budget:
    """Seconds for a whole search."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds that remain; not above 0 when time is up."""
        return self._end - self._clock()


class Outcome(enum.Enum):
    """What became of a variant: `stopped` takes too long beside others of its part, `untried` is beyond the budget."""

    COMPILED = "compiled"
    FAILED = "failed"
    STOPPED = "stopped"
    UNTRIED = "untried"


@dataclass(frozen=True, slots=True)
class Trial:
    """A variant of a part. `cost` is there if it compiled; `text` says what happened if not."""

    tactics: Tactics
    outcome: Outcome
    cost: Cost | None = None
    text: str = ""


def winner(trials: Sequence[Trial]) -> Trial | None:
    """The fewest cycles; of what is equal by them the shortest compilation. None if nothing compiled.

    A time that nobody took counts as none at all: nothing says that another is quicker.
    """
    compiled = [(trial, trial.cost) for trial in trials if trial.cost is not None]
    if not compiled:
        return None
    fewest = min(cost.cycles for _, cost in compiled)

    def seconds(pair: tuple[Trial, Cost]) -> float:
        trial, taken = pair[0], pair[1].seconds or 0.0
        return min(QUICKER * taken, taken - SECONDS_LESS) if trial.tactics == Tactics() else taken

    return min((pair for pair in compiled if pair[1].cycles <= fewest * (1 + EQUAL)), key=seconds)[0]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where variants are tried."""

    target: RngdTarget
    cache: Cache
    progress: Progress
    budget: Budget

    def identity(self, spec: PartSpec, tactics: Tactics) -> Identity:
        """What a build would find this variant by."""
        options = self.target.options_with(tactics)
        return Identity.of(spec.name, spec.graph, self.target.NAME, options, self.target.toolchain())

    def trial(
        self, spec: PartSpec, tactics: Tactics, inputs: Mapping[str, Sampler], before: Sequence[Trial] = ()
    ) -> Trial:
        """Compile a variant, unless the cache has it. `before` are the part's trials so far.

        What the compiler or the check refuses is an outcome. Raises ResourceError where host or SDK fail, and
        StoppedError when the search was ended.
        """
        identity = self.identity(spec, tactics)
        known = self.cache.get(identity)
        if known is not None:
            self.progress.cached("tune", f"{spec.name} {tactics}")
            return _compiled(tactics, known.part)
        if self.budget.left <= 0:
            return Trial(tactics, Outcome.UNTRIED)
        try:
            with self.progress.step("tune", f"{spec.name} {tactics}"):
                part = self.target.compile_with(spec.graph, tactics, self._limit(before))
                entry = Entry(part, tuple(measure(spec.graph, part, self.target, inputs)))
        except OutOfTimeError as late:
            beside_others = self.budget.left > 0 and any(trial.cost is not None for trial in before)
            return Trial(tactics, Outcome.STOPPED if beside_others else Outcome.UNTRIED, text=late.what)
        except CompilerError as failure:
            if isinstance(failure, StoppedError) or _is_the_hosts(failure):
                raise
            return Trial(tactics, Outcome.FAILED, text=failure.what)
        remember(self.cache, identity, entry, self.progress)
        return _compiled(tactics, part)

    def _limit(self, before: Sequence[Trial]) -> float:
        """Seconds for a variant. Without any measure of its part, half of what is left, for the sake of the others."""
        times = [trial.cost.seconds for trial in before if trial.cost is not None and trial.cost.seconds is not None]
        return min(self.budget.left, max(SHORTEST, PATIENCE * min(times))) if times else self.budget.left / 2


def _compiled(tactics: Tactics, part: CompiledPart) -> Trial:
    cycles = 0 if part.estimate is None else part.estimate.cycles
    return Trial(tactics, Outcome.COMPILED, Cost(cycles, part.seconds))


def _is_the_hosts(failure: CompilerError) -> bool:
    """Whether another variant would fail as well."""
    return isinstance(failure, ResourceError) and not isinstance(failure, OutOfMemoryError)
