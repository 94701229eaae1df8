from __future__ import annotations

import pytest
import torch

from npucc.training.embedding import MASKED, embed, tables
from tests.npucc.tiny import CUT, evaluate, model


def mask_of(segments: list[int], positions: list[int] | None = None, window: int | None = None) -> list[str]:
    """The mask as a picture: . where a row sees a column, x where it does not."""
    config = model(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=window).config
    places = positions or list(range(len(segments)))
    inputs = {
        "positions": torch.tensor(places, dtype=torch.int32),
        "segments": torch.tensor(segments, dtype=torch.int32),
    }
    mask = evaluate(tables(config, len(segments), CUT), inputs)["mask"]
    assert set(mask.flatten().tolist()) <= {0.0, MASKED}
    return ["".join("." if seen else "x" for seen in row) for row in (mask == 0).tolist()]


def test_documents_see_themselves_and_nothing_later() -> None:
    assert mask_of([1, 1, 2, 2]) == [".xxx", "..xx", "xx.x", "xx.."]


def test_padding_sees_padding_so_that_no_row_is_empty() -> None:
    assert mask_of([1, 1, 0, 0], [0, 1, 0, 0]) == [".xxx", "..xx", "xx.x", "xx.."]


def test_a_window_counts_positions_of_the_document() -> None:
    assert mask_of([1] * 5, window=2) == [".xxxx", "..xxx", "x..xx", "xx..x", "xxx.."]
    assert mask_of([1, 1, 1, 2, 2], [0, 1, 2, 0, 1], window=2) == [".xxxx", "..xxx", "x..xx", "xxx.x", "xxx.."]


@pytest.mark.parametrize("window", [5, 6, 4096, None])
def test_a_window_as_long_as_the_sequence_is_none(window: int | None) -> None:
    assert mask_of([1] * 5, window=window) == mask_of([1] * 5)


def test_the_masked_value_survives_half_precision() -> None:
    assert torch.tensor(MASKED, dtype=torch.float16).item() == MASKED
    assert torch.softmax(torch.tensor([0.0, MASKED]), 0).tolist() == [1.0, 0.0]


def test_tokens_become_rows_of_the_table() -> None:
    config = model().config
    graph = embed(config, 4, CUT)
    table = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.float64)
    tokens = torch.tensor([60, 0, 3, 3], dtype=torch.int32)
    assert torch.equal(evaluate(graph, {"tokens": tokens, "table": table})["x"], table[[60, 0, 3, 3]])
