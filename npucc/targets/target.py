"""What the compiler asks of a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy.typing as npt

from npubundle.part import Estimate
from npucc.errors import UsageError
from npucc.graph import Graph


@dataclass(frozen=True, slots=True)
class CutPolicy:
    """How large things may be.

    head_rows -- supervised rows per block of the head; None for one block that holds all.
    head_slice -- tokens of the vocabulary per slice of the head.
    query_rows -- rows of attention computed at a time.
    repeat_products_within -- backward computes batched products over at most so many terms again, and softmax with
        them, instead of reading what forward would have had to write.
    repeat_after_softmax -- the product of attention's probabilities and values is one of those products.
    products -- dtype in which weights lie, and to which the factors of products are rounded. Sums, norms, LoRA matrices
        and all gradients between layers are f32.
    swap -- rotary embedding by a product with a matrix.
    products_per_part -- parts of a layer multiply with at most so many weights; None for whole layers.
    tuned_products -- that number for a layer's joint graph, where a tuning table knows it.
    update_block -- weights that an optimizer part updates at a time in full fine-tuning.
    own_memory -- the target has memory of its own: what picks rows of tables runs on the host, and its results move.
    """

    head_rows: int | None
    head_slice: int
    query_rows: int
    repeat_products_within: int
    repeat_after_softmax: bool = True
    products: str = "f32"
    swap: bool = False
    products_per_part: int | None = None
    own_memory: bool = False
    update_block: int = 1 << 19
    tuned_products: Callable[[Graph], int | None] | None = None


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """A part's payload; for a device, also the graph that its executor runs, and the compiler's estimate.

    `seconds` is what the compilation took, where that is worth remembering.
    """

    payload: bytes
    graph: bytes | None = None
    estimate: Estimate | None = None
    seconds: float | None = None


class Target(Protocol):
    """A module of `npucc.targets`, or an object of a class there.

    Compilation is a pure function of the graph, the options and the toolchain. It is called from up to `jobs` threads.
    """

    NAME: str
    MEDIA_TYPE: str
    BOUND: float
    #: Share of integers that may differ: of equally large values, rounding chooses the first.
    TIES: float
    MEMORY: int
    jobs: int

    @property
    def GRAPH_MEDIA_TYPE(self) -> str | None:  # noqa: N802 -- a constant of most targets
        """Of the graphs beside the payloads, for a target that keeps them."""

    @property
    def CUT(self) -> CutPolicy:  # noqa: N802 -- a constant of most targets
        """How large things may be."""

    def toolchain(self) -> dict[str, str]:
        """Name and version of everything that can change the bytes."""

    def requirements(self) -> Mapping[str, str]:
        """What a host needs to run a part."""

    def options(self, graph: Graph) -> dict[str, str]:
        """What else than the graph and the toolchain decides the bytes of a part."""

    def bundle_options(self) -> dict[str, str]:
        """What a runtime has to know of the whole bundle."""

    def compile_part(self, graph: Graph) -> CompiledPart:
        """Compile a part."""

    def imported(self, graph: Graph) -> CompiledPart:
        """A part that `execute` runs and no device: as the target's compiler understands the graph."""

    def execute(
        self, part: CompiledPart, graph: Graph, inputs: Mapping[str, npt.NDArray[Any]]
    ) -> Sequence[npt.NDArray[Any]]:
        """Run a part on the build host. What is bf16 in the graph is f32 here, rounded to bf16."""

    def close(self) -> None:
        """End what the target started."""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What a user may say of a target; a target ignores what does not concern it.

    `jobs` parts are compiled at once. `max_products`, `tactic` and `max_shapes` are for compilers that search, and hold
    for all parts, whatever tuning tables say. `tables` are files of such tables beside the one that comes with npucc;
    None for no table at all. `verify` chooses which form of a graph is checked, where a compiler has two.
    """

    fusion: int | None = None
    jobs: int = 1
    max_products: int | None = None
    tactic: str | None = None
    max_shapes: int | None = None
    verify: str = "imported"
    tables: tuple[Path, ...] | None = ()


def find(name: str, options: TargetOptions | None = None) -> Target:
    """The target of this name. Raises UsageError that lists the known ones."""
    options = options or TargetOptions()
    if name not in (known := {"cpu": _cpu, "rngd": _rngd}):
        raise UsageError(f"unknown target {name!r}", remedy=f"targets of this release: {', '.join(known)}")
    return known[name](options)


def _cpu(options: TargetOptions) -> Target:
    from npucc.targets import cpu

    if options.fusion is not None:
        raise UsageError("the cpu target has no fusion", remedy="leave --fusion out")
    return cast("Target", cpu)


def _rngd(options: TargetOptions) -> Target:
    from npucc.targets.rngd import FUSIONS, HINT, RngdTarget, Tactics
    from npucc.tuning import Tuning

    fusion = max(FUSIONS) if options.fusion is None else options.fusion
    if fusion not in FUSIONS:
        raise UsageError(f"fusion is {fusion}", remedy=f"a card's programs use {', '.join(map(str, FUSIONS))} elements")
    by_hand = options.tactic is not None or options.max_shapes is not None
    tactics = Tactics(options.tactic or HINT, options.max_shapes) if by_hand else None
    tuning = Tuning() if options.tables is None else Tuning.load(options.tables)
    return RngdTarget(fusion, options.jobs, tactics, options.max_products, options.verify, tuning=tuning)
