"""The sliced loss, its gradient and its scores against PyTorch's cross-entropy, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npubundle.model_config import ModelConfig
from npucc.errors import InternalError
from npucc.graph import Graph
from npucc.models.layers import rms_norm
from npucc.training import head, head_reference
from npucc.training.head import HeadShape
from tests.npucc.tiny import CUT, SEQ_LEN, evaluate, model

Tensor = torch.Tensor
#: (vocabulary, widest slice): one slice, slices that divide the vocabulary, slices that do not, slices of one token.
VOCABULARIES = [(61, 100), (61, 61), (60, 20), (60, 21), (61, 20), (7, 1)]


@dataclass(frozen=True)
class Batch:
    """What the head is given: hidden states, norm, output matrix, and supervised rows in blocks."""

    config: ModelConfig
    shape: HeadShape
    h: Tensor
    norm: Tensor
    matrix: Tensor
    rows: Tensor
    labels: Tensor
    weights: Tensor

    @property
    def used_blocks(self) -> int:
        return max(1, -(-int(self.weights.sum()) // self.shape.rows))

    def slice(self, number: int) -> tuple[Tensor, Tensor, int]:
        """Rows of the output matrix, the first token as the part reads it, and the width."""
        start, stop = self.shape.slices[number]
        return self.matrix[start:stop], torch.tensor(start, dtype=torch.int32), stop - start


def batch(vocabulary: int, width: int, supervised: int = SEQ_LEN, block: int = 6, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    config = model(vocab_size=vocabulary).config
    shape = head.head_shape(config, SEQ_LEN, rows=block, slice_width=width)
    places = shape.blocks * shape.rows

    def padded(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(places - len(values))]).view(shape.blocks, shape.rows)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return Batch(
        config,
        shape,
        h=normal(SEQ_LEN, config.hidden_size),
        norm=normal(config.hidden_size),
        matrix=normal(vocabulary, config.hidden_size),
        rows=padded(torch.randperm(SEQ_LEN, generator=generator)[:supervised].to(torch.int32)),
        labels=padded(torch.randint(0, vocabulary, (supervised,), generator=generator, dtype=torch.int32)),
        weights=padded(torch.ones(supervised, dtype=torch.float64)),
    )


_TRACED: dict[object, Graph] = {}


def part(b: Batch, trace: Callable[..., Graph], *width: int) -> Graph:
    """A part of the head, traced once for all batches of one shape."""
    key = (trace.__name__, b.config.vocab_size, b.shape, width)
    if key not in _TRACED:
        cut = () if trace.__name__.startswith("reference") else (CUT,)
        _TRACED[key] = trace(b.config, b.shape, *cut, *width)
    return _TRACED[key]


def label_rows(b: Batch, block: int) -> Tensor:
    """The rows of the output matrix that belong to the labels of a block."""
    return evaluate(head.label_rows(b.config, b.shape, "f32"), {"labels": b.labels, "table": b.matrix})["label_rows"][
        block
    ]


def online(b: Batch, block: int) -> dict[str, Tensor]:
    """Losses and gradient rows of a block, by the parts of the training program."""
    mine = {"h": b.h, "norm": b.norm, "rows": b.rows[block], "weights": b.weights[block]}
    values = mine | evaluate(part(b, head.begin), mine) | {"label_rows": label_rows(b, block)}
    for number in range(len(b.shape.slices)):
        weight, _, width = b.slice(number)
        results = evaluate(part(b, head.slice_step, width), values | {"weight": weight})
        values |= {name.removeprefix("new_"): value for name, value in results.items()}
    return evaluate(part(b, head.finish), values)


def two_passes(b: Batch, block: int) -> dict[str, Tensor]:
    """The same by the parts of the reference program."""
    mine = {"h": b.h, "norm": b.norm, "rows": b.rows[block], "labels": b.labels[block], "weights": b.weights[block]}
    values = mine | evaluate(part(b, head_reference.reference_begin), mine)
    for number in range(len(b.shape.slices)):
        weight, _, width = b.slice(number)
        values["lse"] = evaluate(part(b, head_reference.reference_lse, width), values | {"weight": weight})["new_lse"]
    for number in range(len(b.shape.slices)):
        weight, start, width = b.slice(number)
        results = evaluate(part(b, head_reference.reference_slice, width), values | {"weight": weight, "start": start})
        values |= {name.removeprefix("new_"): value for name, value in results.items()}
    return evaluate(part(b, head_reference.reference_finish), values)


def loss_and_gradient(
    b: Batch, of_block: Callable[[Batch, int], dict[str, Tensor]], stale: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The whole head: used blocks are computed, the others hold `stale` from earlier."""
    losses = torch.full(b.weights.shape, stale, dtype=torch.float64)
    d_rows = torch.full((*b.weights.shape, b.config.hidden_size), stale, dtype=torch.float64)
    for block in range(b.used_blocks):
        results = of_block(b, block)
        losses[block], d_rows[block] = results["losses"], results["d_rows"]
    ended = evaluate(part(b, head.end), {"losses": losses, "d_rows": d_rows, "rows": b.rows, "weights": b.weights})
    return ended["loss_sum"], ended["dh"]


def expected_of(b: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the losses, and its gradient, by PyTorch."""
    h = b.h.clone().requires_grad_()
    logits = rms_norm(h, b.norm, b.config.rms_norm_eps) @ b.matrix.t()
    used = b.weights.flatten() > 0
    rows, labels = b.rows.flatten()[used].long(), b.labels.flatten()[used].long()
    loss = torch.nn.functional.cross_entropy(logits[rows], labels, reduction="sum")
    return loss.detach(), torch.autograd.grad(loss, h)[0]


def assert_right(b: Batch, of_block: Callable[[Batch, int], dict[str, Tensor]], stale: float = 0.0) -> None:
    for actual, expected in zip(loss_and_gradient(b, of_block, stale), expected_of(b), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("vocabulary", "width"), VOCABULARIES)
@pytest.mark.parametrize("of_block", [online, two_passes])
def test_loss_and_gradient_are_those_of_cross_entropy(
    vocabulary: int, width: int, of_block: Callable[[Batch, int], dict[str, Tensor]]
) -> None:
    assert_right(batch(vocabulary, width), of_block)


@pytest.mark.parametrize("supervised", [1, 5, 6, 7, 13])
@pytest.mark.parametrize("stale", [0.0, float("nan"), float("inf"), float("-inf")])
def test_unused_rows_count_for_nothing_whatever_they_hold(supervised: int, stale: float) -> None:
    assert_right(batch(61, 25, supervised), online, stale)


def apart(b: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss and gradient as a target with memory of its own computes them, and what `places` told it."""
    cut = dataclasses.replace(CUT, own_memory=True)
    found = online(b, 0)
    placed = evaluate(head.places(b.shape), {"rows": b.rows, "weights": b.weights})
    values = {"losses": found["losses"][None], "d_rows": found["d_rows"][None]} | placed
    ended = evaluate(head.end(b.config, b.shape, cut), values)
    return ended["loss_sum"], ended["dh"], placed


@pytest.mark.parametrize("supervised", [0, 1, 5, 13, SEQ_LEN])
def test_places_put_gradients_where_the_product_puts_them(supervised: int) -> None:
    b = batch(61, 25, supervised, block=SEQ_LEN)
    loss, gradient, placed = apart(b)
    assert placed["slots"].dtype == torch.int32
    named = b.rows.flatten()[:supervised].tolist()
    assert placed["used"].tolist() == [float(position in named) for position in range(SEQ_LEN)]
    assert all(placed["slots"][position] == slot for slot, position in enumerate(named))
    assert all(0 <= slot < b.shape.rows for slot in placed["slots"].tolist())
    for found, expected in zip((loss, gradient), loss_and_gradient(b, online), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_places_know_position_zero_from_padding() -> None:
    b = batch(61, 25, supervised=3, block=SEQ_LEN)
    for rows in ([5, 0, 2], [5, 1, 2]):  # padding points at row 0 in both
        b.rows[0, :3] = torch.tensor(rows, dtype=torch.int32)
        _, gradient, placed = apart(b)
        assert placed["used"][0].item() == float(0 in rows)
        assert gradient[0].any().item() == (0 in rows)
        torch.testing.assert_close(gradient, loss_and_gradient(b, online)[1], rtol=1e-12, atol=1e-13)


def test_a_target_with_memory_of_its_own_takes_one_block() -> None:
    b = batch(61, 25)
    assert b.shape.blocks > 1
    with pytest.raises(InternalError, match="one block"):
        head.end(b.config, b.shape, dataclasses.replace(CUT, own_memory=True))


def test_without_supervised_rows_loss_and_gradient_are_exactly_zero() -> None:
    loss, gradient = loss_and_gradient(batch(61, 25, supervised=0), online, float("nan"))
    assert loss.item() == 0.0
    assert not gradient.any()


def test_a_row_that_is_not_supervised_has_exactly_no_gradient() -> None:
    b = batch(61, 25, supervised=5)
    _, gradient = loss_and_gradient(b, online)
    silent = [row for row in range(SEQ_LEN) if row not in b.rows.flatten()[:5].tolist()]
    assert not gradient[silent].any()


def test_row_zero_may_be_supervised_while_padding_points_at_it() -> None:
    b = batch(61, 25, supervised=7)
    b.rows[0, 0] = 0
    b.rows[1, 0] = 3
    kept = [row for row in range(1, SEQ_LEN) if row != 3]
    b.rows[0, 1:] = torch.tensor(kept[: b.shape.rows - 1], dtype=torch.int32)
    assert_right(b, online)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_large_and_small_logits_neither_overflow_nor_vanish(scale: float) -> None:
    b = batch(61, 20)
    b.matrix.mul_(scale)
    assert_right(b, online)
    assert_right(b, two_passes)


@settings(max_examples=10, deadline=None)
@given(
    vocabulary=st.integers(2, 40),
    width=st.integers(1, 45),
    supervised=st.integers(0, SEQ_LEN),
    block=st.integers(1, 20),
)
def test_two_passes_give_what_one_gives(vocabulary: int, width: int, supervised: int, block: int) -> None:
    b = batch(vocabulary, width, supervised, block)
    for one, two in zip(loss_and_gradient(b, online), loss_and_gradient(b, two_passes), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)


@settings(max_examples=200, deadline=None)
@given(vocabulary=st.integers(1, 500), width=st.integers(1, 600), rows=st.integers(1, 40))
def test_slices_tile_the_vocabulary_and_blocks_hold_every_position(vocabulary: int, width: int, rows: int) -> None:
    shape = head.head_shape(model(vocab_size=vocabulary).config, SEQ_LEN, rows=rows, slice_width=width)
    assert [start for start, _ in shape.slices] == [0, *(stop for _, stop in shape.slices[:-1])]
    assert shape.slices[-1][1] == vocabulary
    widths = [stop - start for start, stop in shape.slices]
    assert max(widths) <= width
    assert len(set(widths)) <= 2
    assert shape.rows <= min(rows, SEQ_LEN)
    assert (shape.blocks - 1) * shape.rows < SEQ_LEN <= shape.blocks * shape.rows


@pytest.mark.parametrize("seq_len", [2, 128, 256, 512, 1000])
def test_a_target_may_have_all_rows_in_one_block(seq_len: int) -> None:
    shape = head.head_shape(model().config, seq_len, rows=None, slice_width=25)
    assert (shape.blocks, shape.rows) == (1, seq_len)


def score(b: Batch, block: int) -> dict[str, Tensor]:
    mine = {"h": b.h, "norm": b.norm, "rows": b.rows[block]}
    values = mine | evaluate(part(b, head.score_begin), mine) | {"label_rows": label_rows(b, block)}
    for number in range(len(b.shape.slices)):
        weight, start, width = b.slice(number)
        results = evaluate(part(b, head.score_slice, width), values | {"weight": weight, "start": start})
        values |= {name.removeprefix("new_"): value for name, value in results.items()}
    return evaluate(part(b, head.score_finish), values)


@pytest.mark.parametrize(("vocabulary", "width"), VOCABULARIES)
def test_scores_are_log_probabilities_and_the_most_likely_token(vocabulary: int, width: int) -> None:
    b = batch(vocabulary, width)
    logits = rms_norm(b.h, b.norm, b.config.rms_norm_eps) @ b.matrix.t()
    for block in range(b.shape.blocks):
        found = score(b, block)
        expected = torch.log_softmax(logits[b.rows[block].long()], -1)
        picked = expected.gather(1, b.labels[block][:, None].long())[:, 0]
        torch.testing.assert_close(found["logprobs"], picked, rtol=1e-10, atol=1e-11)
        assert found["predictions"].dtype == torch.int32
        assert found["predictions"].tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("width", [61, 25, 3])
def test_the_first_of_equally_likely_tokens_is_predicted(width: int) -> None:
    b = batch(61, width)
    b.h[:, 1:] = 0  # one product per logit, so that equal ones are equal to the last bit
    b.matrix.fill_(0.5)
    assert score(b, 0)["predictions"].tolist() == [0] * b.shape.rows
    likelier = 0.75 if rms_norm(b.h, b.norm, 0.0)[b.rows[0, 0], 0] > 0 else 0.25
    b.matrix[[7, 30, 31, 60]] = likelier  # in several slices
    assert score(b, 0)["predictions"][0].item() == 7


@pytest.mark.parametrize(("vocabulary", "width"), VOCABULARIES)
def test_slices_of_logits_join_to_all_logits(vocabulary: int, width: int) -> None:
    b = batch(vocabulary, width)
    x = rms_norm(b.h, b.norm, b.config.rms_norm_eps)[b.rows[0].long()]
    pieces = []
    for number in range(len(b.shape.slices)):
        weight, _, wide = b.slice(number)
        pieces.append(evaluate(part(b, head.logits_slice, wide), {"x": x, "weight": weight})["logits"])
    torch.testing.assert_close(torch.cat(pieces), b.matrix @ x.t())
