"""Count tables over tokens: the loss that a model must pass to have learnt anything.

Losses are means of negative log-likelihood in nats per target, over targets of weight 1.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

MAX_VOCAB = 4096  # a bigram table is V × V
MAX_TOKENS = 1 << 28  # counting is done at the end of a run, while the user waits
_CHUNK = 1 << 22


def bigram_counts(stream: Any, vocab_size: int, end_of_text: int) -> np.ndarray:
    """Counts [V, V] of (token, next token) inside documents of a stream."""
    counts = np.zeros(vocab_size * vocab_size, np.int64)
    for start in range(0, len(stream) - 1, _CHUNK):
        chunk = stream[start : start + _CHUNK + 1].astype(np.int64)
        first, second = chunk[:-1], chunk[1:]
        inside = first != end_of_text
        pairs = first[inside] * vocab_size + second[inside]
        counts += np.bincount(pairs, minlength=counts.size)
    return counts.reshape(vocab_size, vocab_size)


def _mean_loss(log_probs: np.ndarray, batches: Iterable[dict[str, np.ndarray]]) -> float:
    """Loss of a table [V, V] over batches as the model gets them."""
    total = weight = 0.0
    for batch in batches:
        losses = -log_probs[batch["inputs"], batch["targets"]]
        total += float(np.sum(losses * batch["weights"], dtype=np.float64))
        weight += float(np.sum(batch["weights"], dtype=np.float64))
    return total / weight


def bigram_loss(counts: np.ndarray, batches: Iterable[dict[str, np.ndarray]]) -> float:
    """Mean loss of the add-one bigram table."""
    smoothed = counts + 1.0
    return _mean_loss(np.log(smoothed / smoothed.sum(axis=1, keepdims=True)), batches)


def unigram_loss(counts: np.ndarray, batches: Iterable[dict[str, np.ndarray]]) -> float:
    """Mean loss of the add-one unigram table."""
    smoothed = counts.sum(axis=0) + 1.0
    return _mean_loss(np.log(np.tile(smoothed / smoothed.sum(), (len(counts), 1))), batches)
