"""Count tables, against dictionaries."""

import itertools
import math

import numpy as np
import pytest

from deltares_jax.data import ngram, pipeline
from deltares_jax.data.rows import Rows

# --- count tables


@pytest.fixture
def numbers() -> np.ndarray:
    """301 tokens of 5, with 4 as end-of-text, none of them an empty document."""
    drawn = np.random.default_rng(0).choice(5, 600, p=[0.4, 0.3, 0.1, 0.1, 0.1])
    kept = [drawn[0]] + [b for a, b in itertools.pairwise(drawn) if a != 4 or b != 4]
    return np.array(kept[:301], np.uint16)


def pairs_of(stream: np.ndarray) -> dict[tuple[int, int], int]:
    pairs: dict[tuple[int, int], int] = {}
    values = stream.tolist()
    for first, second in itertools.pairwise(values):
        if first != 4:
            pairs[first, second] = pairs.get((first, second), 0) + 1
    return pairs


@pytest.mark.parametrize("size", [2, 7, 8, 9, 14, 15, 301])
def test_bigram_counts_across_chunks(monkeypatch, numbers, size):
    monkeypatch.setattr(ngram, "_CHUNK", 7)
    counts = ngram.bigram_counts(numbers[:size], 5, 4)
    assert counts.shape == (5, 5)
    expected = pairs_of(numbers[:size])
    assert {(int(a), int(b)): counts[a, b] for a, b in np.argwhere(counts)} == expected


def test_table_losses_by_dictionary(numbers):
    train, held_out = numbers[:200], numbers[200:]
    pairs = pairs_of(train)
    totals = {a: sum(pairs.get((a, b), 0) + 1 for b in range(5)) for a in range(5)}
    follows = {b: sum(pairs.get((a, b), 0) for a in range(5)) + 1 for b in range(5)}
    bigram, unigram = [], []
    values = held_out[: 13 * 6 + 1].tolist()  # the targets of 13 rows of 6
    for first, second in itertools.pairwise(values):
        if first != 4:
            bigram.append(-math.log((pairs.get((first, second), 0) + 1) / totals[first]))
            unigram.append(-math.log(follows[second] / sum(follows.values())))
    counts = ngram.bigram_counts(train, 5, 4)
    rows = Rows(held_out, 6, 4)
    for batch_size in (1, 4):  # the last batch is filled up
        batches = list(pipeline.eval_batches(rows, 13, batch_size))
        bigram_loss = ngram.bigram_loss(counts, batches)
        assert bigram_loss == pytest.approx(sum(bigram) / len(bigram), rel=1e-9)
        unigram_loss = ngram.unigram_loss(counts, batches)
        assert unigram_loss == pytest.approx(sum(unigram) / len(unigram), rel=1e-9)

    changed = [
        {**b, "targets": np.where(b["weights"] == 0, (b["targets"] + 1) % 5, b["targets"])}
        for b in batches
    ]
    assert any((a["targets"] != b["targets"]).any() for a, b in zip(batches, changed, strict=True))
    assert ngram.bigram_loss(counts, changed) == bigram_loss
