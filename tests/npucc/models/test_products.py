"""Products with rounded factors and f32 sums, and the layer pieces made of them."""

from __future__ import annotations

import pytest
import torch

from npubundle.tensor import TensorType
from npucc.graph.capture import capture
from npucc.models.architecture import Tables
from npucc.models.layers import causal_attention, gated
from npucc.models.products import linear, rounded

BF16 = torch.bfloat16
S, H, N = 6, 64, 5


def samples(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def test_rounded_keeps_what_needs_no_rounding() -> None:
    (x,) = samples((S, H))
    assert rounded(x, torch.float32) is x
    near = rounded(x, BF16)
    assert near.dtype == torch.float32
    assert torch.equal(near, x.to(BF16).to(torch.float32))
    assert not torch.equal(near, x)


def test_sums_of_a_product_are_not_rounded() -> None:
    """The values and both gradients are those of float64 on rounded factors, to f32's accuracy."""
    x, weight, d = samples((S, H), (N, H), (S, N))
    y = linear(x, weight, BF16)
    assert y.dtype == torch.float32
    d_x, d_weight = torch.autograd.grad(y, (x, weight), d)
    near_x, near_weight, near_d = (rounded(t, BF16).to(torch.float64) for t in (x, weight, d))
    expected = (near_x @ near_weight.t(), near_d @ near_weight, near_d.t() @ near_x)
    for found, exact in zip((y, d_x, d_weight), expected, strict=True):
        torch.testing.assert_close(found, exact.to(torch.float32), rtol=1e-5, atol=1e-5)


def test_a_whole_input_counts_beyond_its_rounding() -> None:
    x, weight = samples((S, H), (N, H))
    exact = x.to(torch.float64) @ rounded(weight, BF16).to(torch.float64).t()
    found = [linear(x, weight, BF16, whole=whole).detach() for whole in (False, True)]
    error = [float((y - exact.detach()).abs().max()) for y in found]
    assert error[1] < error[0] / 50


def test_a_product_in_f32_is_nothing_but_a_product() -> None:
    kinds = {"x": TensorType("f32", (S, H)), "w": TensorType("f32", (N, H))}
    graphs = [
        capture("product", lambda x, w, p=product: [p(x, w)], kinds, ["y"])
        for product in (lambda x, w: linear(x, w, torch.float32, whole=True), lambda x, w: x @ w.t())
    ]
    assert [node.op for node in graphs[0].nodes] == [node.op for node in graphs[1].nodes]


def attention(dtype: torch.dtype, keys: torch.dtype) -> torch.Tensor:
    """A weighted sum of attention's results, with a common part in all keys, as models have."""
    q, k, v = samples((2, 3, S, 32), (2, S, 32), (2, S, 32))
    k = k + 30 * torch.ones(32)
    mask = torch.full((S, S), -1e30).triu(1)
    tables = Tables(mask, mask, mask, S, dtype=dtype)
    return causal_attention(rounded(q, BF16).to(dtype), k.to(keys), v.to(dtype), tables)


def test_wide_keys_count_in_full() -> None:
    """What rounding the keys does to the scores is gone: little more is left than rounding the results."""
    exact = attention(torch.float64, torch.float64).detach()
    found = {keys: attention(BF16, keys).detach() for keys in (BF16, torch.float32)}
    error = {keys: float((y - exact).norm() / exact.norm()) for keys, y in found.items()}
    assert error[torch.float32] < 5e-3
    assert error[BF16] > 4 * error[torch.float32]


@pytest.mark.parametrize("keys", [BF16, torch.float32])
def test_gradients_of_attention_with_rounded_factors(keys: torch.dtype) -> None:
    q, k, v, d = samples((2, 3, S, 32), (2, S, 32), (2, S, 32), (2, 3, S, 32), seed=1)
    mask = torch.full((S, S), -1e30).triu(1)
    tables = Tables(mask, mask, mask, S)
    narrow = causal_attention(q.to(BF16), k.to(keys), v.to(BF16), tables)
    found = torch.autograd.grad(narrow, (q, k, v), d.to(BF16))
    expected = torch.autograd.grad(causal_attention(q, k, v, tables), (q, k, v), d)
    for near, exact in zip(found, expected, strict=True):
        assert float(torch.nn.functional.cosine_similarity(near.flatten(), exact.flatten(), 0)) > 0.9999


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gated_and_its_gradients(dtype: torch.dtype) -> None:
    gate, up, d = samples((S, H), (S, H), (S, H))
    y = gated(gate, up, dtype)
    torch.testing.assert_close(y, torch.nn.functional.silu(gate) * up)
    near = [rounded(t, dtype).detach().requires_grad_() for t in (gate, up)]
    expected = torch.autograd.grad(torch.nn.functional.silu(near[0]) * near[1], near, d)
    for found, exact in zip(torch.autograd.grad(y, (gate, up), d), expected, strict=True):
        torch.testing.assert_close(found, exact)
