"""A model small enough to trace in a second, and graphs evaluated by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from npubundle.recipe import Recipe
from npucc.graph import Graph
from npucc.graph.interpret import interpret
from npucc.models.config_reader import Model, parse_model
from npucc.targets import CutPolicy

#: No two dimensions are equal, so that a transposed or mixed up shape cannot pass unnoticed.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SEQ_LEN = 14
#: Three blocks of rows for 14 positions, three slices of 61 tokens (of 21, 21 and 19), blocks of 5, 5
#: and 4 queries.
CUT = CutPolicy(head_rows=6, head_slice=25, query_rows=5, repeat_products_within=0)


def config(**changes: Any) -> dict[str, Any]:
    """The `config.json` of the tiny model; a key changed to `...` is left out."""
    return {key: value for key, value in (CONFIG | changes).items() if value is not ...}


def model(**changes: Any) -> Model:
    return parse_model(config(**changes))


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"rank": 3, "alpha": 6.0, "seq_len": SEQ_LEN} | changes)


def random_inputs(graph: Graph, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Normally distributed float64 inputs by name, and small counts for integers; `given` comes first."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for value in graph.inputs:
        if value.type.dtype in {"i32", "i64"}:
            made = torch.randint(0, 3, value.type.shape, generator=generator, dtype=torch.int32)
        else:
            made = torch.randn(value.type.shape, generator=generator, dtype=torch.float64)
        values[value.name] = given.get(value.name, made)
    return values


def evaluate(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The graph's outputs by name, in float64."""
    results = interpret(graph, [inputs[value.name] for value in graph.inputs])
    return {name: result for (name, _), result in zip(graph.outputs, results, strict=True)}


def assert_equal_functions(before: Graph, after: Graph, inputs: Mapping[str, torch.Tensor] | None = None) -> None:
    """Fail unless both graphs give equal outputs, names and shapes included, on the same inputs."""
    values = inputs or random_inputs(before)
    expected, actual = evaluate(before, values), evaluate(after, values)
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-12)


def causal_tables(positions: int, head_dim: int, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs `cos`, `sin` and `mask` of a layer: any rotation, and the mask of one document."""
    generator = torch.Generator().manual_seed(7)
    angles = torch.rand(positions, head_dim // 2, generator=generator, dtype=torch.float64) * 6
    mask = torch.triu(torch.full((positions, positions), -30000.0, dtype=torch.float64), 1)
    cos, sin = torch.cos(angles), torch.sin(angles)
    return {"cos": torch.cat([cos, cos], -1), "sin": torch.cat([-sin, sin], -1), "mask": mask} | given
