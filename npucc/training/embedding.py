"""What happens before the first layer: token vectors, position tables and the attention mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npubundle.model_config import ModelConfig
from npubundle.tensor import TensorType
from npucc.graph import Graph
from npucc.graph.capture import DTYPES, capture
from npucc.models.layers import inverse_frequencies
from npucc.passes import simplify
from npucc.targets import CutPolicy

#: Added to scores that must not count. Bounded: the largest negative number becomes NaN on some devices, and this one
#: fits f16.
MASKED = -30000.0


def embed(config: ModelConfig, seq_len: int, cut: CutPolicy) -> Graph:
    """`tokens i32[S]`, `table [V,H]` -> `x f32[S,H]`."""
    inputs = {
        "tokens": TensorType("i32", (seq_len,)),
        "table": TensorType(cut.products, (config.vocab_size, config.hidden_size)),
    }

    def function(tokens: torch.Tensor, table: torch.Tensor) -> Sequence[torch.Tensor]:
        return [table.index_select(0, tokens).to(torch.float32)]

    return simplify(capture("embed", function, inputs, ["x"]))


def embed_gradient(config: ModelConfig, seq_len: int, width: int) -> Graph:
    """`tokens i32[S]`, `start i32[]`, `dx f32[S,H]`, `grad f32[width,H]` -> `new_grad`: of the table's rows from start.

    A product with a matrix of zeros and ones adds the gradients of equal tokens in a fixed order, which a scatter does
    not.
    """

    def function(
        tokens: torch.Tensor, start: torch.Tensor, dx: torch.Tensor, grad: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        hit = torch.arange(width, dtype=torch.int32)[:, None] == (tokens - start)[None, :]  # (width, S)
        return [grad + hit.to(torch.float32) @ dx]

    inputs = {
        "tokens": TensorType("i32", (seq_len,)),
        "start": TensorType("i32", ()),
        "dx": TensorType("f32", (seq_len, config.hidden_size)),
        "grad": TensorType("f32", (width, config.hidden_size)),
    }
    return simplify(capture(f"embed.gradient.{width}", function, inputs, ["new_grad"]))


def tables(config: ModelConfig, seq_len: int, cut: CutPolicy) -> Graph:
    """`positions i32[S]`, `segments i32[S]` -> `cos f32[S,D]`, `sin f32[S,D]`, `mask f32[S,S]`, and `swap [D,D]`.

    `swap` is only there where the target wants it: x @ swap exchanges the halves of x.

    A token sees itself and earlier tokens of its own segment, and with a sliding window only the nearest ones, as in
    the picture for the segments 1 1 2 2 (. is 0, x is `MASKED`):

        . x x x
        . . x x
        x x . x
        x x . .

    Every row has at least its own token, so that softmax never meets a row without any.
    """
    window = config.sliding_window

    def function(positions: torch.Tensor, segments: torch.Tensor, speeds: torch.Tensor) -> Sequence[torch.Tensor]:
        angles = positions.to(torch.float32)[:, None] * speeds[None, :]  # (S, D/2)
        cos, sin = torch.cos(angles), torch.sin(angles)
        order = torch.arange(seq_len)
        seen = (order[:, None] >= order[None, :]) & (segments[:, None] == segments[None, :])
        if window is not None and window < seq_len:
            seen = seen & (positions[:, None] - positions[None, :] < window)
        mask = torch.where(seen, torch.zeros(()), torch.full((), MASKED))
        found = [torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1), mask]
        if cut.swap:
            axis = torch.arange(config.head_dim)
            opposite = torch.cat([axis[config.head_dim // 2 :], axis[: config.head_dim // 2]])
            found.append((axis[:, None] == opposite[None, :]).to(DTYPES[cut.products]))
        return found

    indices = TensorType("i32", (seq_len,))
    inputs = {"positions": indices, "segments": indices}
    constants = {"speeds": inverse_frequencies(config.rope_parameters, config.head_dim)}
    outputs = ["cos", "sin", "mask", *(["swap"] if cut.swap else [])]
    return simplify(capture("tables", function, inputs, outputs, constants))
