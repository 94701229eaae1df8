"""Graphs cut into parts: together the parts are the graph, and each is of a kind that compilers take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from npucc.graph import Graph, Ref
from npucc.models.config_reader import Model
from npucc.parts import trace
from npucc.passes import simplify
from npucc.passes.intervals import cut_into_parts
from npucc.passes.partition import Halves, partition
from npucc.targets import CutPolicy
from npucc.training import layer
from tests.npucc import tiny
from tests.npucc.tiny import SEQ_LEN, causal_tables, evaluate, random_inputs

CUT = CutPolicy(
    head_rows=1 << 20, head_slice=25, query_rows=1 << 20, repeat_products_within=128, products="bf16", swap=True,
    products_per_part=3, own_memory=True,
)  # fmt: skip
#: (changes to the model, LoRA targets)
LAYERS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("q", "v")),
    ({}, ("q", "k", "v", "o", "gate", "up", "down")),
    ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}, ("o",)),
]
LAYOUTS = {"aten.view.default", "aten.permute.default", "aten._to_copy.default"}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as it was traced, its halves, and the names of its weights."""

    joint: Graph
    halves: Halves
    weights: set[str]
    _cuts: dict[int, tuple[list[Graph], list[Graph]]] = dataclasses.field(default_factory=dict)

    def cut(self, products: int) -> tuple[list[Graph], list[Graph]]:
        """Parts of forward and of backward, made once: a cut takes seconds."""
        if products not in self._cuts:
            self._cuts[products] = self.cut_again(products)
        return self._cuts[products]

    def cut_again(self, products: int) -> tuple[list[Graph], list[Graph]]:
        """Newly made."""
        forward = cut_into_parts(self.halves.forward, self.weights, products, prefix="f")
        return forward, cut_into_parts(self.halves.backward, self.weights, products, prefix="b", late={"dy"})


@pytest.fixture(scope="module", params=LAYERS, ids=lambda case: "-".join(case[1]))
def traced_layer(request: pytest.FixtureRequest) -> Layer:
    changes, targets = request.param
    return traced(tiny.model(**changes), targets)


def traced(model: Model, targets: tuple[str, ...]) -> Layer:
    joint = simplify(layer.joint(model, tiny.recipe(targets=targets), CUT))
    halves = partition(joint, tangents={"dy"}, forward_outputs={"y"}, repeat_products_within=CUT.repeat_products_within)
    return Layer(joint, halves, matrices(model))


def matrices(model: Model) -> set[str]:
    return {t.name for t in model.architecture.layer_tensors(model.config) if t.module}


def run(parts: list[Graph], known: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All values after the parts ran in order, each fed by name."""
    values = dict(known)
    for part in parts:
        values |= evaluate(part, values)
    return values


def source(graph: Graph, name: str) -> str:
    """What a value is another layout or dtype of."""
    node = graph.producers.get(name)
    if node is None or node.op not in LAYOUTS:
        return name
    operand = node.args[0]
    assert isinstance(operand, Ref)
    return source(graph, operand.name)


def multiplied_weights(graph: Graph, weights: set[str]) -> set[str]:
    """The weights that the graph multiplies with, forward or backward."""
    products = [node for node in graph.nodes if node.op == "aten.mm.default"]
    return {source(graph, name) for node in products for name in node.refs()} & weights


def weight_products(graph: Graph, weights: set[str]) -> int:
    products = [node for node in graph.nodes if node.op == "aten.mm.default"]
    return sum(any(source(graph, name) in weights for name in node.refs()) for node in products)


@pytest.mark.parametrize("products", [1, 3, 100])
def test_parts_in_order_compute_what_the_whole_does(traced_layer: Layer, products: int) -> None:
    joint = traced_layer.joint
    half, D = joint.types["swap"].shape[0] // 2, joint.types["swap"].shape[0]
    swap = torch.roll(torch.eye(D, dtype=torch.float64), half, 0)
    inputs = random_inputs(joint, **causal_tables(SEQ_LEN, D), swap=swap)
    forward, backward = traced_layer.cut(products)
    assert len(forward) > 1
    assert len(backward) > 1
    values = run([*forward, *backward], inputs)
    for name, expected in evaluate(joint, inputs).items():
        torch.testing.assert_close(values[name], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("products", [1, 3])
def test_every_value_that_crosses_has_one_name(traced_layer: Layer, products: int) -> None:
    forward, backward = traced_layer.cut(products)
    for whole, parts in ((traced_layer.halves.forward, forward), (traced_layer.halves.backward, backward)):
        known = {value.name: value.type for value in whole.inputs}
        made: list[str] = []
        for part in parts:
            assert {v.name: v.type for v in part.inputs}.items() <= known.items(), part.name
            assert part.outputs, part.name
            assert len({value for _, value in part.outputs}) == len(part.outputs), part.name
            named = {name: kind for (name, _), kind in zip(part.outputs, part.output_types, strict=True)}
            assert known.keys().isdisjoint(named)
            known |= named
            made += named
        read = {value.name for part in parts for value in part.inputs}
        outputs = {name for name, _ in whole.outputs}
        assert outputs <= set(made)
        assert set(made) - outputs <= read  # nothing is handed on that nobody reads
        assert [part.name for part in parts] == [f"{whole.name}.{number}" for number in range(len(parts))]


def test_what_is_kept_for_backward_in_a_narrower_type_crosses_in_no_wider_one() -> None:
    """Gate and up are rounded where they are made, though only backward reads them so."""
    model = tiny.model()
    inner = model.config.intermediate_size
    forward, _ = traced(model, ("q", "v")).cut(3)
    for part in forward:
        kinds = [kind for kind in part.output_types if kind.shape == (SEQ_LEN, inner)]
        assert {kind.dtype for kind in kinds} <= {"bf16"}, part.name


@pytest.mark.parametrize("products", [1, 3])
def test_no_part_multiplies_with_more_weights_or_kinds_of_factors_than_it_may(
    traced_layer: Layer, products: int
) -> None:
    halves, weights = traced_layer.halves, traced_layer.weights
    for whole, parts in zip((halves.forward, halves.backward), traced_layer.cut(products), strict=True):
        counts = [weight_products(part, weights) for part in parts]
        assert max(len(multiplied_weights(part, weights)) for part in parts) <= products
        assert sum(counts) == weight_products(whole, weights)  # none is made twice, or hidden behind another name
        for part, count in zip(parts, counts, strict=True):
            batched = any(node.op == "aten.bmm.default" for node in part.nodes)
            assert not (batched and count), part.name


def test_products_with_weights_in_one_part_do_not_feed_one_another(traced_layer: Layer) -> None:
    for part in (part for parts in traced_layer.cut(3) for part in parts):
        downstream: set[str] = set()
        for node in part.nodes:
            product = node.op == "aten.mm.default" and any(
                source(part, name) in traced_layer.weights for name in node.refs()
            )
            fed = any(name in downstream for name in node.refs())
            assert not (product and fed), (part.name, node.name)
            if product or fed:
                downstream.add(node.name)


def test_turned_weights_and_casts_to_wider_types_do_not_cross(traced_layer: Layer) -> None:
    wanted = {name for name, _ in traced_layer.joint.outputs}
    for part in (part for parts in traced_layer.cut(3) for part in parts):
        inputs = {value.name for value in part.inputs}
        for name, value in part.outputs:
            read = source(part, value)
            narrower = part.types[value].nbytes < part.types[read].nbytes
            assert name in wanted or read not in inputs or narrower, (part.name, name)


def test_equal_graphs_are_cut_equally(traced_layer: Layer) -> None:
    assert traced_layer.cut_again(3) == traced_layer.cut(3)


def test_a_traced_step_names_the_parts_of_each_pass_in_order() -> None:
    model, recipe = tiny.model(), tiny.recipe()
    traced = trace(model, recipe, CUT)
    inputs = random_inputs(simplify(traced.layer))
    values = dict(inputs)
    for stage in ("layer.forward.save", "layer.backward.save"):
        assert len(traced.stages[stage]) > 1
        values = run([traced.parts[name].graph for name in traced.stages[stage]], values)
    for name, expected in evaluate(traced.layer, inputs).items():
        torch.testing.assert_close(values[name], expected, rtol=1e-9, atol=1e-11)
    assert set(traced.saved) <= {
        v.name for n in traced.stages["layer.backward.save"] for v in traced.parts[n].graph.inputs
    }
    assert "y" not in traced.saved
