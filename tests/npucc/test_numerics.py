from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from npubundle.tensor import TensorType
from npucc.build import Lowered, build
from npucc.cache import Cache
from npucc.errors import NumericsError
from npucc.graph import Arg, Graph
from npucc.graph.capture import capture
from npucc.numerics import causal_mask, matrix, measure, normal, sample_inputs, uniform
from npucc.passes import simplify
from npucc.progress import Progress
from npucc.targets import cpu
from tests.npucc.faulty_targets import Array, FaultyTarget

X = TensorType("f32", (4, 5))
Bend = Callable[[list[Array]], list[Array]]


def product() -> Graph:
    traced = capture("product", lambda x, y: [x @ y.t(), x.argmax(1)], {"x": X, "y": X}, ["product", "best"])
    return simplify(traced)


def refused(bend: Bend) -> NumericsError:
    with pytest.raises(NumericsError) as caught:
        measure(product(), cpu.compile_part(product()), FaultyTarget(bend=bend), {})
    assert int(caught.value.exit_code) == 1
    return caught.value


def test_a_right_part_is_measured() -> None:
    found = measure(product(), cpu.compile_part(product()), cpu, {})
    assert [m.output for m in found] == ["product", "best"]
    assert 0 < found[0].relative < cpu.BOUND
    assert found[0].absolute > 0
    assert (found[1].relative, found[1].absolute) == (0.0, 0.0)


def with_nan(arrays: list[Array]) -> list[Array]:
    arrays[0][1, 2] = np.nan
    return arrays


def infinite(arrays: list[Array]) -> list[Array]:
    arrays[0][0, 0] = np.inf
    return arrays


def slightly_off(arrays: list[Array]) -> list[Array]:
    return [arrays[0] * np.float32(1 + 1e-4), arrays[1]]


def transposed_shape(arrays: list[Array]) -> list[Array]:
    return [arrays[0].reshape(2, 8), arrays[1]]


def other_integers(arrays: list[Array]) -> list[Array]:
    return [arrays[0], arrays[1] + 1]


@pytest.mark.parametrize(
    ("bend", "said"),
    [
        (with_nan, "differs from the float64 reference by nan"),
        (infinite, "differs from the float64 reference by inf"),
        (slightly_off, "by 0.0001 (relative, bound 2e-05)"),
        (lambda arrays: [arrays[0].astype(np.float16), arrays[1]], "is f16[4,4], the graph says f32[4,4]"),
        (transposed_shape, "is f32[2,8], the graph says f32[4,4]"),
    ],
)
def test_wrong_values_and_shapes_are_refused(bend: Bend, said: str) -> None:
    failure = refused(bend)
    assert said in failure.what
    assert failure.where == "part product, output product"


def test_wrong_integers_are_refused() -> None:
    assert refused(other_integers).what == "1 of all integers differ from the reference (bound 0)"


@pytest.mark.parametrize(("wrong", "passes"), [(1, True), (2, False)])
def test_a_target_that_rounds_may_choose_another_of_equal_values(wrong: int, passes: bool) -> None:
    def bend(arrays: list[Array]) -> list[Array]:
        arrays[1][:wrong] += 1
        return arrays

    target = FaultyTarget(bend=bend)
    target.TIES = 0.25  # of four
    part = cpu.compile_part(product())
    if passes:
        found = measure(product(), part, target, {})
        assert (found[1].relative, found[1].absolute, found[1].cosine) == (0.25, 1.0, 0.75)
    else:
        with pytest.raises(NumericsError, match=r"0\.5 of all integers differ"):
            measure(product(), part, target, {})


@pytest.mark.parametrize("bend", [lambda arrays: arrays[:1], lambda arrays: [*arrays, arrays[0]]])
def test_missing_and_surplus_outputs_are_refused(bend: Bend) -> None:
    assert "outputs, the graph has 2" in refused(bend).what


def test_nan_on_both_sides_is_no_agreement() -> None:
    graph = capture("root", lambda x: [torch.sqrt(x - 100.0)], {"x": X}, ["y"])
    with pytest.raises(NumericsError, match="by nan"):
        measure(graph, cpu.compile_part(graph), cpu, {})


def test_zeros_are_compared_absolutely() -> None:
    graph = capture("nothing", lambda x: [x - x], {"x": X}, ["y"])
    assert measure(graph, cpu.compile_part(graph), cpu, {})[0].relative == 0.0
    with pytest.raises(NumericsError):
        measure(graph, cpu.compile_part(graph), FaultyTarget(bend=lambda arrays: [arrays[0] + 1]), {})


def doubled_epsilon(graph: Graph) -> Graph:
    """A part that is off by a wrong constant: the 1e-6 of clipping taken for 0.1."""

    def change(arg: Arg) -> Arg:
        return 0.1 if arg == 1e-6 else arg

    nodes = tuple(dataclasses.replace(n, args=tuple(map(change, n.args))) for n in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes) if graph.name == "clip" else graph


def test_a_miscompiled_part_ends_the_build_and_leaves_no_entry(lowered: Lowered, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    wrong = FaultyTarget(spoil=doubled_epsilon)
    with pytest.raises(NumericsError, match="differs from the float64 reference") as caught:
        build(lowered.traced.model, lowered.traced.recipe, wrong, cache, Progress("quiet"))
    assert caught.value.where == "part clip, output scale"
    assert wrong.compiled[-1] == "clip"
    assert cache.get(lowered.identities["clip"]) is None
    assert cache.get(lowered.identities["adamw"]) is not None  # what was right stays


def test_inputs_depend_on_name_and_type_alone() -> None:
    first = sample_inputs(product(), {})
    again = sample_inputs(dataclasses.replace(product(), name="other"), {})
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["x"], first["y"])


def test_samplers_give_the_range_they_promise() -> None:
    random = np.random.default_rng(0)
    wide = TensorType("f32", (300, 400))
    whole = uniform(2, 5)(TensorType("i32", (1000,)), random)
    assert (whole.min(), whole.max(), whole.dtype.name) == (2, 4, "int32")
    assert uniform(0, 3)(TensorType("i64", (9,)), random).dtype == np.int64
    real = uniform(-1, 1)(wide, random)
    assert real.dtype == np.float32
    assert -1 <= real.min() < -0.99
    assert 0.99 < real.max() <= 1
    assert normal(3.0)(wide, random).std() == pytest.approx(3.0, rel=0.02)
    assert matrix(wide, random).std() == pytest.approx(400**-0.5, rel=0.02)
    mask = causal_mask(TensorType("f32", (3, 3)), random)
    assert (mask == 0).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_large_weights_are_drawn_in_part_only() -> None:
    large = normal()(TensorType("f32", (3000, 3000)), np.random.default_rng(0))
    assert large.shape == (3000, 3000)
    assert large.std() == pytest.approx(1.0, rel=0.01)
