"""Does a compiled part compute what its graph says? Asked for every part of every build.

The part runs through its target's own executor on inputs that depend only on the graph, and each floating-point output
x is compared with the float64 interpretation r of the canonical graph: ‖x − r‖ / ‖r‖ must stay below the target's
bound.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from npubundle.tensor import TensorType
from npucc.errors import NumericsError
from npucc.graph import Graph, Value
from npucc.targets import CompiledPart, Target

#: Raise it whenever the check asks for more than before: entries of a cache are then checked again.
NUMERICS_VERSION = 2

Array = npt.NDArray[Any]
#: Makes one input of a part: its type and a generator that depends on the part and the input's name.
Sampler = Callable[[TensorType, np.random.Generator], Array]


@dataclass(frozen=True, slots=True)
class Measured:
    """Errors of one output: relative in the Euclidean norm, the largest absolute one, and the cosine with float64.

    Of integers, the relative error is the share of those that differ.
    """

    output: str
    relative: float
    absolute: float
    cosine: float

    def within(self, bound: float) -> bool:
        """Whether the relative error is at most `bound`. A NaN is not."""
        return self.relative <= bound


_PIECE = 4_194_301
#: NumPy's names of dtypes, and ours.
_WHOLE = {"i32", "i64", "bool"}
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int64": "i64"}


def normal(scale: float = 1.0) -> Sampler:
    """Normally distributed values; integers are small counts."""

    def sample(kind: TensorType, random: np.random.Generator) -> Array:
        if kind.dtype in {"i32", "i64"}:
            return random.integers(0, 2, kind.shape).astype(np.int32 if kind.dtype == "i32" else np.int64)
        # Large weights repeat a piece of prime length: the check needs no more variety, and drawing it would take
        # longest.
        drawn = random.standard_normal(min(kind.elements, _PIECE), dtype=np.float32) * np.float32(scale)
        return np.resize(drawn, kind.shape)

    return sample


def uniform(low: float, high: float) -> Sampler:
    """Evenly distributed values, whole ones for integer inputs (`high` excluded)."""

    def sample(kind: TensorType, random: np.random.Generator) -> Array:
        if kind.dtype in {"i32", "i64"}:
            return random.integers(int(low), int(high), kind.shape).astype(
                np.int32 if kind.dtype == "i32" else np.int64
            )
        return random.uniform(low, high, kind.shape).astype(np.float32)

    return sample


def matrix(kind: TensorType, random: np.random.Generator) -> Array:
    """A weight matrix whose product keeps the size of its input."""
    return normal(kind.shape[-1] ** -0.5)(kind, random)


def causal_mask(kind: TensorType, random: np.random.Generator) -> Array:
    """What the `tables` part gives for one long document."""
    del random
    return np.triu(np.full(kind.shape, -30000.0, dtype=np.float32), 1)


def sample_inputs(graph: Graph, samplers: Mapping[str, Sampler]) -> dict[str, Array]:
    """Inputs for `graph`: by the sampler of the input's name, else a `matrix` or `normal`; the same on every host."""
    inputs: dict[str, Array] = {}
    for value in graph.inputs:
        seed = hashlib.sha256(f"{value.name}:{value.type}".encode()).digest()
        random = np.random.Generator(np.random.PCG64(int.from_bytes(seed[:8], "little")))
        sampler = samplers.get(value.name, normal())
        sample = sampler(value.type, random)
        inputs[value.name] = _rounded(sample) if value.type.dtype == "bf16" else sample
    return inputs


def _rounded(values: Array) -> Array:
    """The same as f32 that bf16 can hold: what a part's bf16 inputs are in a check. Rounds down, which is no matter."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def measure(
    graph: Graph, part: CompiledPart, target: Target, samplers: Mapping[str, Sampler], bounds: Target | None = None
) -> list[Measured]:
    """Run the part and its float64 reference. Raises NumericsError where they differ by more than the bound.

    The bound is that of `bounds`, for a graph that was made for another target than the one that runs it.
    """
    limits = bounds or target
    found = errors(graph, part, target, samplers)
    for error, kind in zip(found, graph.output_types, strict=True):
        if not error.within(bound_of(kind, limits)):
            where = f"part {graph.name}, output {error.output}"
            remedy = (
                f"the part is not fit for training; `npucc diagnose --part {graph.name}` finds the first wrong node"
            )
            if kind.dtype in _WHOLE:
                what = f"{error.relative:.3g} of all integers differ from the reference (bound {limits.TIES:.3g})"
                raise NumericsError(what, where=where, remedy=remedy)
            by = f"{error.relative:.3g} (relative, bound {bound_of(kind, limits):.3g})"
            raise NumericsError(f"differs from the float64 reference by {by}", where=where, remedy=remedy)
    return found


#: Of bf16, with its 8 bits of mantissa, at most.
_ROUNDING = 2.0**-8


def bound_of(kind: TensorType, target: Target) -> float:
    """The relative error that an output of this type may have: at least what rounding it costs."""
    if kind.dtype in _WHOLE:
        return target.TIES
    return max(target.BOUND, _ROUNDING) if kind.dtype == "bf16" else target.BOUND


def part_bound(graph: Graph, target: Target) -> float:
    """The relative error that no floating-point output of a part exceeds."""
    kinds = [kind for kind in graph.output_types if kind.dtype not in _WHOLE]
    return max((bound_of(kind, target) for kind in kinds), default=target.BOUND)


def errors(graph: Graph, part: CompiledPart, target: Target, samplers: Mapping[str, Sampler]) -> list[Measured]:
    """Run the part and its float64 reference, and compare. Raises NumericsError for results of another type."""
    import torch

    from npucc.graph.interpret import interpret

    inputs = sample_inputs(graph, samplers)
    results = target.execute(part, graph, inputs)
    if len(results) != len(graph.outputs):
        what = f"gives {len(results)} outputs, the graph has {len(graph.outputs)}"
        raise NumericsError(what, where=f"part {graph.name}")
    with torch.no_grad():
        references = interpret(graph, [torch.from_numpy(inputs[v.name]) for v in graph.inputs])
    measured = []
    for (name, _), kind, result, reference in zip(graph.outputs, graph.output_types, results, references, strict=True):
        where = f"part {graph.name}, output {name}"
        measured.append(_compared(where, Value(name, kind), np.asarray(result), reference.numpy()))
    return measured


def _compared(where: str, output: Value, result: Array, reference: Array) -> Measured:
    found = f"{_DTYPES.get(result.dtype.name, result.dtype.name)}[{','.join(map(str, result.shape))}]"
    if found != str(output.type).replace("bf16", "f32"):
        raise NumericsError(f"is {found}, the graph says {output.type}", where=where)
    if output.type.dtype in _WHOLE:
        others = float(np.mean(result != reference))
        most = float(np.abs(result.astype(np.float64) - reference).max(initial=0.0))
        return Measured(output.name, float(f"{others:.2e}"), most, 1.0 - others)
    exact = result.astype(np.float64)
    difference = exact - reference
    size, length = float(np.linalg.norm(reference)), float(np.linalg.norm(exact))
    absolute = float(np.abs(difference).max(initial=0.0))
    error = float(np.linalg.norm(difference))
    relative = error / size if size > 0 else error
    cosine = float(np.vdot(exact, reference)) / (size * length) if size > 0 and length > 0 else float(size == length)
    # Few digits: more would differ between two runs on one machine with another number of threads.
    return Measured(output.name, float(f"{relative:.2e}"), float(f"{absolute:.2e}"), float(f"{cosine:.6g}"))
