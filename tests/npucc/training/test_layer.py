from __future__ import annotations

import pytest
import torch

from npucc.passes import simplify
from npucc.training.layer import adapters, gradient_name, joint
from tests.npucc import tiny
from tests.npucc.tiny import SEQ_LEN, causal_tables, evaluate, model, random_inputs, recipe


def test_adapters_come_in_the_order_of_the_block_with_peft_names() -> None:
    found = adapters(model(), recipe(targets=("q", "v", "down")))
    assert [a.target for a in found] == ["q", "v", "down"]
    assert [(name, tensor, str(kind)) for a in found for name, tensor, kind in a.matrices] == [
        ("q.lora_A", "self_attn.q_proj.lora_A.weight", "f32[3,36]"),
        ("q.lora_B", "self_attn.q_proj.lora_B.weight", "f32[24,3]"),
        ("v.lora_A", "self_attn.v_proj.lora_A.weight", "f32[3,36]"),
        ("v.lora_B", "self_attn.v_proj.lora_B.weight", "f32[8,3]"),
        ("down.lora_A", "mlp.down_proj.lora_A.weight", "f32[3,44]"),
        ("down.lora_B", "mlp.down_proj.lora_B.weight", "f32[36,3]"),
    ]


@pytest.mark.parametrize("target", ["q", "v", "gate"])
def test_a_branch_adds_the_scaled_product_of_its_matrices(target: str) -> None:
    """With W and A, B the layer does what it does with W + alpha/rank · B·A alone."""
    ours, settings = model(), recipe(targets=(target,), rank=4, alpha=6.0)
    graph = simplify(joint(ours, settings, tiny.CUT))
    with_branch = random_inputs(graph, **causal_tables(SEQ_LEN, ours.config.head_dim))
    a, b = with_branch[f"{target}.lora_A"], with_branch[f"{target}.lora_B"]
    merged = with_branch | {target: with_branch[target] + 1.5 * b @ a, f"{target}.lora_B": torch.zeros_like(b)}
    torch.testing.assert_close(evaluate(graph, with_branch)["y"], evaluate(graph, merged)["y"], rtol=1e-10, atol=1e-10)


def test_only_the_input_and_the_branches_have_gradients() -> None:
    graph = joint(model(), recipe(targets=("k", "up")), tiny.CUT)
    names = ["k.lora_A", "k.lora_B", "up.lora_A", "up.lora_B"]
    assert [name for name, _ in graph.outputs] == ["y", "dx", *map(gradient_name, names)]
    types = dict(zip([name for name, _ in graph.outputs], graph.output_types, strict=True))
    for name in names:
        assert types[gradient_name(name)] == graph.types[name]


def test_gradients_are_slopes() -> None:
    """Central differences of dy·y along a random direction."""
    graph = simplify(joint(model(), recipe(), tiny.CUT))
    inputs = {name: value * 0.3 for name, value in random_inputs(graph).items()} | causal_tables(SEQ_LEN, 4)
    found = evaluate(graph, inputs)
    generator = torch.Generator().manual_seed(3)
    for name, output in [("x", "dx"), *((n, gradient_name(n)) for n in inputs if ".lora_" in n)]:
        direction = torch.randn(inputs[name].shape, generator=generator, dtype=torch.float64)
        step = 1e-5
        ahead, behind = (
            (evaluate(graph, inputs | {name: inputs[name] + sign * step * direction})["y"] * inputs["dy"]).sum()
            for sign in (1, -1)
        )
        slope = (ahead - behind) / (2 * step)
        torch.testing.assert_close((found[output] * direction).sum(), slope, rtol=1e-6, atol=1e-7)
