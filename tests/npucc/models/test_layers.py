from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from npucc.graph.interpret import interpret
from npucc.models.architecture import Tables
from npucc.models.config_reader import parse_model
from npucc.models.layers import causal_attention, gated, inverse_frequencies, rms_norm, rotate, rotate_rows
from npucc.training import embedding
from tests.npucc import tiny
from tests.npucc.tiny import config

#: Both spellings of each kind; the short original context puts frequencies into all three ranges of `llama3`.
ROPES: dict[str, dict[str, Any]] = {
    "absent": {},
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "default-old": {"rope_scaling": None, "rope_theta": 100000.0},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "linear-old": {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 5000.0},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        }
    },
    "llama3-old": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rope_theta": 500000.0,
    },
}  # fmt: skip
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 7, 50, 127, 2047], dtype=torch.int32)


def both(rope: dict[str, Any], head_dim: int = 32) -> tuple[Any, Any]:
    """The model as npucc reads it, and transformers' rotary embedding."""
    document = config(head_dim=head_dim, max_position_embeddings=4096, **rope)
    return parse_model(document), LlamaRotaryEmbedding(AutoConfig.for_model(**document))


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("head_dim", [4, 32, 128])
def test_frequencies_are_those_of_transformers_to_the_last_bit(kind: str, head_dim: int) -> None:
    model, theirs = both(ROPES[kind], head_dim)
    ours = inverse_frequencies(model.config.rope_parameters, head_dim)
    assert ours.dtype == np.float32
    assert np.array_equal(ours, theirs.inv_freq.numpy())


def test_scaling_changes_frequencies_in_all_three_ranges() -> None:
    """The comparison above is worth something only if `llama3` keeps, slows and interpolates some of them."""
    plain = inverse_frequencies(both(ROPES["default-old"] | {"rope_theta": 10000.0})[0].config.rope_parameters, 32)
    scaled = inverse_frequencies(both(ROPES["llama3"])[0].config.rope_parameters, 32)
    ratio = plain / scaled
    assert (ratio == 1.0).any()
    assert np.isclose(ratio, 8.0).any()
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


@pytest.mark.parametrize("kind", ROPES)
def test_tables_are_those_of_transformers(kind: str) -> None:
    model, theirs = both(ROPES[kind])
    graph = embedding.tables(model.config, len(POSITIONS), tiny.CUT)
    cos, sin, _ = interpret(graph, [POSITIONS, torch.ones_like(POSITIONS)], widen=False)
    expected_cos, expected_sin = theirs(torch.zeros(1, len(POSITIONS), 1), POSITIONS[None].to(torch.int64))
    half = model.config.head_dim // 2
    assert torch.equal(cos, expected_cos[0])
    assert torch.equal(sin[:, half:], expected_sin[0, :, half:])
    assert torch.equal(sin[:, :half], -expected_sin[0, :, :half])  # the sign of the rotation is in the table


def test_rotation_is_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(1)
    x, angles = torch.randn(3, 5, 8, generator=generator), torch.randn(5, 4, generator=generator)
    cos, sin = torch.cos(angles), torch.sin(angles)
    tables = Tables(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1), torch.zeros(5, 5), 5)
    expected, _ = apply_rotary_pos_emb(
        x[None], x[None], torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
    )
    torch.testing.assert_close(rotate(x, tables), expected[0])


def turned(S: int, D: int, swap: torch.Tensor | None) -> Tables:
    angles = torch.randn(S, D // 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    cos, sin = torch.cos(angles), torch.sin(angles)
    return Tables(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1), torch.zeros(S, S), S, swap)


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_rotation_by_a_product_is_rotation(heads: tuple[int, ...], scale: float) -> None:
    S, D = 5, tiny.CONFIG["head_dim"]
    cut = dataclasses.replace(tiny.CUT, swap=True)
    graph = embedding.tables(tiny.model().config, S, cut)
    assert [name for name, _ in graph.outputs] == ["cos", "sin", "mask", "swap"]
    places = torch.arange(S, dtype=torch.int32)
    swap = tiny.evaluate(graph, {"positions": places, "segments": torch.ones_like(places)})["swap"].to(torch.float64)
    assert torch.equal(torch.arange(D, dtype=torch.float64) @ swap, torch.arange(D).roll(D // 2).to(torch.float64))
    tables = turned(S, D, swap)
    x = torch.randn(S, *heads, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected = rotate(x.movedim(0, -2), tables, scale).movedim(-2, 0)
    assert torch.equal(rotate_rows(x, tables, scale), expected)


def test_rotation_by_a_product_rounds_what_is_swapped_and_nothing_else() -> None:
    S, D = 5, 4
    swap = torch.roll(torch.eye(D), D // 2, 0).to(torch.bfloat16)
    tables = turned(S, D, swap)
    x = torch.randn(S, 3, D, generator=torch.Generator().manual_seed(5))
    swapped = torch.roll(x.to(torch.bfloat16).to(torch.float64), D // 2, -1)
    exact = x.to(torch.float64) * tables.cos[:, None] + swapped * tables.sin[:, None]
    torch.testing.assert_close(rotate_rows(x, tables), exact, rtol=0, atol=1e-6)


def test_tables_without_a_swap_rotate_no_rows() -> None:
    with pytest.raises(ValueError, match="no swap"):
        rotate_rows(torch.zeros(5, 4), turned(5, 4, None))


def test_norm_and_activation_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(4, 6, generator=generator), torch.randn(6, generator=generator)
    theirs = LlamaRMSNorm(6, eps=1e-3)
    theirs.weight.data.copy_(weight)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), theirs(x).detach())
    torch.testing.assert_close(gated(x, x + 1, torch.float32), torch.nn.functional.silu(x) * (x + 1))


@pytest.mark.parametrize("query_rows", [1, 3, 5, 6, 99])
def test_attention_in_blocks_is_that_of_pytorch(query_rows: int) -> None:
    """Values and gradients, for two documents in one sequence."""
    generator = torch.Generator().manual_seed(3)

    def sample(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    q, k, v, d = sample(2, 3, 6, 4), sample(2, 6, 4), sample(2, 6, 4), sample(2, 3, 6, 4)
    documents = torch.tensor([1, 1, 2, 2, 2, 2])
    seen = torch.ones(6, 6).tril().bool() & (documents[:, None] == documents)
    mask = torch.where(seen, 0.0, embedding.MASKED).to(torch.float64)  # softmax is in the mask's dtype
    ours = causal_attention(q, k, v, Tables(mask, mask, mask, query_rows))
    keys, values = (x[:, None].expand(2, 3, 6, 4) for x in (k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=1.0)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, (q, k, v), d), torch.autograd.grad(theirs, (q, k, v), d), strict=True
    ):
        torch.testing.assert_close(mine, other)
