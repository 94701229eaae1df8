"""The layers of every family against transformers: values, gradients, packing, sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.func import functional_call

from npucc.graph import Graph
from npucc.graph.interpret import interpret
from npucc.models.layers import rms_norm
from npucc.passes import simplify
from npucc.training import embedding, layer
from tests.npucc import tiny
from tests.npucc.tiny import SEQ_LEN, recipe
from tests.npucc.transformers_models import pair, weights

EVERY = ("q", "k", "v", "o", "gate", "up", "down")
#: Every ratio of heads to key/value heads, and head dimensions that are not hidden / heads.
SHAPES: list[dict[str, Any]] = [
    {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": None},
    {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4},
    {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
    {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 6},
    {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8},
]
LAYOUT = {
    "positions": torch.tensor([*range(9), *range(5)], dtype=torch.int32),
    "segments": torch.tensor([1] * 9 + [2] * 5, dtype=torch.int32),
}


def run(graph: Graph, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of a graph by name, in f32 as transformers computes them."""
    results = interpret(graph, [values[value.name] for value in graph.inputs], widen=False)
    return {name: result for (name, _), result in zip(graph.outputs, results, strict=True)}


def hidden_states(ours: Any, theirs: Any, tokens: torch.Tensor, layout: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What npucc's graphs make of tokens, up to and with the final norm."""
    settings = recipe(targets=("q",), seq_len=len(tokens))
    joint = simplify(layer.joint(ours, settings, tiny.CUT))
    tables = run(embedding.tables(ours.config, len(tokens), tiny.CUT), layout)
    x = theirs.state_dict()["model.embed_tokens.weight"][tokens]
    for index in range(ours.config.num_hidden_layers):
        values = {value.name: torch.zeros(value.type.shape) for value in joint.inputs}  # no adapter, no gradient
        x = run(joint, values | weights(ours, theirs, index) | tables | {"x": x})["y"]
    return rms_norm(x, theirs.state_dict()["model.norm.weight"], ours.config.rms_norm_eps)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
def test_hidden_states_are_those_of_transformers(model_type: str, shape: dict[str, Any]) -> None:
    ours, theirs = pair(model_type, **shape)
    tokens = torch.arange(SEQ_LEN) * 7 % 61
    layout = {"positions": torch.arange(SEQ_LEN, dtype=torch.int32), "segments": torch.ones(SEQ_LEN, dtype=torch.int32)}
    expected = theirs.model(tokens[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden_states(ours, theirs, tokens, layout), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [1, 3, 8, 13, 14, 100, None])
def test_a_sliding_window_is_that_of_transformers(window: int | None) -> None:
    ours, theirs = pair("mistral", sliding_window=window)
    tokens = torch.arange(SEQ_LEN) * 5 % 61
    layout = {"positions": torch.arange(SEQ_LEN, dtype=torch.int32), "segments": torch.ones(SEQ_LEN, dtype=torch.int32)}
    expected = theirs.model(tokens[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden_states(ours, theirs, tokens, layout), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("model_type", "window"), [("llama", ...), ("mistral", 4), ("mistral", None)])
def test_packed_documents_do_not_see_each_other(model_type: str, window: Any) -> None:
    ours, theirs = pair(model_type, sliding_window=window)
    tokens = torch.arange(SEQ_LEN) * 11 % 61
    expected = torch.cat([theirs.model(part[None]).last_hidden_state[0] for part in (tokens[:9], tokens[9:])])
    torch.testing.assert_close(hidden_states(ours, theirs, tokens, LAYOUT), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
def test_gradients_are_those_of_autograd(shape: dict[str, Any]) -> None:
    """With W + s·B·A in the place of every W, transformers' layer has the same gradients for A, B and its input."""
    ours, theirs = pair(**shape)
    settings = recipe(targets=EVERY)
    joint = simplify(layer.joint(ours, settings, tiny.CUT))
    generator = torch.Generator().manual_seed(5)
    values = {value.name: torch.randn(value.type.shape, generator=generator) * 0.3 for value in joint.inputs}
    tables = run(embedding.tables(ours.config, SEQ_LEN, tiny.CUT), LAYOUT)
    values |= weights(ours, theirs, 0) | tables
    found = run(joint, values)

    trained = [name for name in values if ".lora_" in name]
    leaves = {name: values[name].clone().requires_grad_() for name in ("x", *trained)}
    adapted = {
        t.tensor: values[t.name] + settings.scaling * leaves[f"{t.name}.lora_B"] @ leaves[f"{t.name}.lora_A"]
        if t.module
        else values[t.name]
        for t in ours.architecture.layer_tensors(ours.config)
    }
    half = ours.config.head_dim // 2
    sin = torch.cat([-tables["sin"][:, :half], tables["sin"][:, half:]], -1)
    arguments = {"attention_mask": tables["mask"][None, None], "position_embeddings": (tables["cos"][None], sin[None])}
    y = functional_call(theirs.model.layers[0], adapted, (leaves["x"][None],), arguments)[0]
    torch.testing.assert_close(found["y"], y.detach(), rtol=5e-5, atol=5e-5)
    gradients = torch.autograd.grad(y, list(leaves.values()), values["dy"])
    for name, expected in zip(leaves, gradients, strict=True):
        actual = found["dx" if name == "x" else layer.gradient_name(name)]
        error = (actual - expected).norm() / expected.norm()
        assert error < 2e-5, name
