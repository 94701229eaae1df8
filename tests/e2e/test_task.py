"""Training makes the model better at something: the task of `benchmarks/task.py`, in short."""

from __future__ import annotations

import itertools
from pathlib import Path

import language_task
import numpy as np
import pytest
from numpy.typing import NDArray

from npurt import Pack, TrainConfig
from npurt.data import IGNORED
from tests.e2e.bundles import Built
from tests.e2e.comparison import opened

SEQ_LEN, HELD, STEPS = 128, 24, 60


def test_accuracy_on_held_out_texts_rises(smollm2_bundle: Built, smollm2_dir: Path, tmp_path: Path) -> None:
    files = language_task.write(tmp_path, held_rows=HELD)
    choices = language_task.load_choices(files, smollm2_dir, SEQ_LEN)
    config = TrainConfig(steps=STEPS, lr=1e-3, template="plain")
    with opened(smollm2_bundle, smollm2_dir, config) as (trainer, _):
        before = language_task.accuracy(trainer.logprobs, choices, files.answers)
        for _ in trainer.fit(files.train):
            pass
        after = language_task.accuracy(trainer.logprobs, choices, files.answers)
    assert before < 0.4, "too easy a task to show anything"
    assert after > before + 0.25


def test_rows_are_determined_by_the_package_and_share_no_text() -> None:
    train, held = language_task.rows()
    assert (train, held) == language_task.rows()
    assert len(train) > 2000
    assert len(held) > 200
    texts = [row.text for row in (*train, *held)]
    assert len(set(texts)) == len(texts), "a text with two languages has no right answer"
    for part in (train, held):
        assert {row.language for row in part} == set(language_task.LANGUAGES.values())
    first = train[0]
    assert first.as_json("Czech") == f'{{"prompt": "Text: {first.text}\\nLanguage:", "response": " Czech"}}'


def test_accuracy_adds_up_the_tokens_of_each_answer(smollm2_dir: Path, tmp_path: Path) -> None:
    files = language_task.write(tmp_path, held_rows=3)
    choices = language_task.load_choices(files, smollm2_dir, SEQ_LEN)
    languages = len(language_task.LANGUAGES)
    wrong = (files.answers[2] + 1) % languages
    liked = {row * languages + answer for row, answer in enumerate([*files.answers[:2], wrong])}
    documents = itertools.count()

    def logprobs(pack: Pack) -> NDArray[np.float32]:
        scores = np.where(pack.labels == IGNORED, np.nan, -2.0).astype(np.float32)
        for segment in range(1, int(pack.segments.max()) + 1):
            if next(documents) in liked:
                scores[pack.segments == segment] /= 100
        return scores

    assert language_task.accuracy(logprobs, choices, files.answers) == pytest.approx(2 / 3)
