from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npubundle.tensor import TensorType
from npucc.graph import Graph, Node, Ref, Value
from npucc.passes import simplify
from npucc.passes.partition import Halves, partition
from npucc.training import layer
from tests.npucc import tiny
from tests.npucc.passes.random_graphs import Sample, samples
from tests.npucc.tiny import SEQ_LEN, causal_tables, evaluate, random_inputs

#: What backward may never compute again, said here once more.
EXPENSIVE = {"aten.mm.default", "aten.bmm.default", "aten._softmax.default"}
LAYOUTS = {"aten.view.default", "aten.permute.default", "aten.expand.default"}
#: (changes to the model, LoRA targets)
LAYERS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("q", "v")),
    ({}, ("q", "k", "v", "o", "gate", "up", "down")),
    ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}, ("down",)),
    ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}, ("o",)),
]


def halves_of(joint: Graph) -> Halves:
    return partition(joint, tangents={"dy"}, forward_outputs={"y"})


def run_halves(halves: Halves, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of both halves, backward fed with nothing but the joint inputs and what forward saved."""
    forward = evaluate(halves.forward, inputs)
    saved = {name: forward.pop(name) for name in halves.saved}
    return forward | evaluate(halves.backward, inputs | saved)


def downstream(graph: Graph, sources: set[str]) -> set[str]:
    found = set(sources)
    for node in graph.nodes:
        if found & set(node.refs()):
            found.add(node.name)
    return found


@pytest.fixture(scope="module", params=LAYERS, ids=lambda case: "-".join(case[1]))
def joint(request: pytest.FixtureRequest) -> Graph:
    changes, targets = request.param
    return simplify(layer.joint(tiny.model(**changes), tiny.recipe(targets=targets), tiny.CUT))


@pytest.fixture(scope="module")
def halves(joint: Graph) -> Halves:
    return halves_of(joint)


def test_two_halves_compute_what_the_joint_graph_computes(joint: Graph, halves: Halves) -> None:
    cos = next(value.type for value in joint.inputs if value.name == "cos")
    inputs = random_inputs(joint, **causal_tables(SEQ_LEN, cos.shape[1]))
    expected, actual = evaluate(joint, inputs), run_halves(halves, inputs)
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-12, atol=1e-13)


def test_backward_computes_no_product_of_forward_again(joint: Graph, halves: Halves) -> None:
    of_gradient = downstream(halves.backward, {"dy"})
    again = [n.op for n in halves.backward.nodes if n.name not in of_gradient and n.op in EXPENSIVE]
    assert again == []
    both = [n.op for n in (*halves.forward.nodes, *halves.backward.nodes) if n.op in EXPENSIVE]
    assert len(both) == len([n for n in joint.nodes if n.op in EXPENSIVE])


def test_scores_are_computed_again_where_the_target_wants_it(joint: Graph, halves: Halves) -> None:
    """With the head dimension as the limit; values stay the same, and no probabilities are kept."""
    cos = next(value.type for value in joint.inputs if value.name == "cos")
    lean = partition(joint, tangents={"dy"}, forward_outputs={"y"}, repeat_products_within=cos.shape[1])
    inputs = random_inputs(joint, **causal_tables(SEQ_LEN, cos.shape[1]))
    expected, actual = evaluate(joint, inputs), run_halves(lean, inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-12, atol=1e-13)
    probabilities = [n for n in joint.nodes if n.op == "aten._softmax.default"]
    assert len(probabilities) == len([n for n in lean.backward.nodes if n.op == "aten._softmax.default"]) > 0
    kept, before = (sum(kind.nbytes for kind in found.forward.output_types) for found in (lean, halves))
    assert kept <= before - sum(n.type.nbytes for n in probabilities)


def test_nothing_is_saved_in_two_layouts(halves: Halves) -> None:
    def origin(name: str) -> str:
        while name in halves.forward.producers and halves.forward.producers[name].op in LAYOUTS:
            name = next(halves.forward.producers[name].refs())
        return name

    values = dict(halves.forward.outputs)
    origins = [origin(values[name]) for name in halves.saved]
    assert len(set(origins)) == len(origins)
    assert not set(origins) & {value.name for value in halves.forward.inputs}


def test_no_transposed_copy_is_saved(halves: Halves) -> None:
    values = dict(halves.forward.outputs)
    assert [n for n in halves.saved if halves.forward.producers[values[n]].op == "aten.permute.default"] == []


def test_forward_knows_nothing_of_gradients(joint: Graph, halves: Halves) -> None:
    assert "dy" not in {value.name for value in halves.forward.inputs}
    assert halves.forward.outputs[0][0] == "y"
    assert halves.backward.outputs[0][0] == "dx"
    assert [name for name, _ in halves.backward.outputs] == [name for name, _ in joint.outputs if name != "y"]


@pytest.mark.parametrize(("changes", "targets"), LAYERS)
def test_frozen_weights_cause_no_gradient_work(changes: dict[str, Any], targets: tuple[str, ...]) -> None:
    model, recipe = tiny.model(**changes), tiny.recipe(targets=targets)
    graph = simplify(layer.joint(model, recipe, tiny.CUT))
    frozen = {t.shape for t in model.architecture.layer_tensors(model.config)}
    frozen |= {shape[::-1] for shape in frozen if len(shape) == 2}
    matrices = [n for n in graph.nodes if n.op == "aten.mm.default"]
    assert [n.name for n in matrices if n.type.shape in frozen] == []
    # Forward has a product per module and two per adapter; backward one per module for dx, two per adapter for dx and
    # two for the gradients of A and B: nothing else multiplies matrices.
    modules = sum(t.module is not None for t in model.architecture.layer_tensors(model.config))
    assert len(matrices) == 2 * modules + 6 * len(targets)
    assert [name for name, _ in graph.outputs if name not in {"y", "dx"}] == [
        f"d_{target}.lora_{side}"
        for target in ("q", "k", "v", "o", "gate", "up", "down")
        if target in targets
        for side in "AB"
    ]


@st.composite
def joint_graphs(draw: st.DrawFn) -> Sample:
    """A random graph as forward, and a backward that reads some of its values together with a tangent `dy`."""
    sample = draw(samples(max_steps=9))
    forward = simplify(sample.graph)
    names = [n.name for n in forward.nodes] or ["a"]
    read = draw(st.lists(st.sampled_from([*names, "a"]), min_size=1, max_size=4, unique=True))
    backward = [
        Node(f"g{i}", "aten.mul.Tensor", (Ref(name), Ref("dy")), (), forward.types[name]) for i, name in enumerate(read)
    ]
    outputs = tuple((f"d{i}", node.name) for i, node in enumerate(backward))
    graph = dataclasses.replace(
        forward,
        inputs=(*forward.inputs, Value("dy", TensorType("f32", ()))),
        nodes=(*forward.nodes, *backward),
        outputs=(("y", forward.outputs[-1][1]), *outputs),
    )
    return Sample(graph, sample.inputs | {"dy": torch.tensor(0.75, dtype=torch.float64)})


def smallest_cut(graph: Graph) -> int:
    """The least number of bytes to keep so that backward computes no product again, by trying every choice."""
    backward = downstream(graph, {"dy"})
    forward = [n for n in graph.nodes if n.name not in backward]
    read = {name for n in graph.nodes if n.name in backward for name in n.refs() if name not in backward}

    def suffices(kept: set[str]) -> bool:
        pending = [name for name in read if name not in kept]
        seen = set(pending)
        while pending:
            node = graph.producers.get(pending.pop())
            if node is None:
                continue
            if node.op in EXPENSIVE:
                return False
            fresh = [name for name in node.refs() if name not in kept and name not in seen]
            seen.update(fresh)
            pending += fresh
        return True

    choices = itertools.chain.from_iterable(itertools.combinations(forward, size) for size in range(len(forward) + 1))
    return min(sum(n.type.nbytes for n in chosen) for chosen in choices if suffices({n.name for n in chosen}))


@settings(max_examples=60, deadline=None)
@given(sample=joint_graphs())
def test_as_few_bytes_are_saved_as_can_be(sample: Sample) -> None:
    halves = halves_of(sample.graph)
    kept = dict(zip([name for name, _ in halves.forward.outputs], halves.forward.output_types, strict=True))
    assert sum(kept[name].nbytes for name in halves.saved) == smallest_cut(sample.graph)
    expected, actual = evaluate(sample.graph, sample.inputs), run_halves(halves, sample.inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-12, atol=1e-13)
