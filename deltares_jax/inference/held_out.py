"""Held-out loss: sum of losses over count of targets, whatever the batch and the mesh.

B batch, T sequence.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from deltares_jax.data import pipeline
from deltares_jax.data.rows import Batch, Rows
from deltares_jax.inference.scorer import Scorer
from deltares_jax.inference.trained import Trained


@dataclasses.dataclass
class HeldOut:
    """Sums over the targets of a set, in float64; losses in nats.

    Attributes:
      asked: tokens of text that the budget covers; fewer than it allows where the text ends.
      position_loss_T: by position of the input in its document (in its row, without
        `data.document_masking`, and where a row cuts the document).
      position_tokens_T: targets, likewise.
      document_loss: by document of the target, in the order of the text.
      document_tokens: targets, likewise.
    """

    asked: int
    position_loss_T: np.ndarray
    position_tokens_T: np.ndarray
    document_loss: np.ndarray
    document_tokens: np.ndarray

    @property
    def tokens(self) -> int:
        """Targets; the first token of a document is none where tokens see their document alone."""
        return int(self.position_tokens_T.sum())

    @property
    def mean(self) -> float:
        """Nats per token."""
        return float(self.position_loss_T.sum() / self.tokens)

    @property
    def perplexity(self) -> float:
        """Its exponential; infinite where that is too large for a number."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.mean))


class _Targets(NamedTuple):
    """Of a batch, flat: which targets count, the input's position, and the target's document."""

    counts: np.ndarray
    position: np.ndarray
    document: np.ndarray


def _batches(rows: Rows, asked: int, T: int, batch_size: int) -> Iterator[tuple[_Targets, Batch]]:
    """Batches; targets beyond the budget do not count."""
    document, left = 0, asked
    for batch in pipeline.eval_batches(rows, -(-asked // T), batch_size):
        flat = {key: value.reshape(-1) for key, value in batch.items()}
        documents = document + np.cumsum(flat["inputs"] == rows.end_of_text)
        counts = (flat["weights"] > 0) & (np.arange(documents.size) < left)
        yield _Targets(counts, flat["positions"], documents), batch
        document, left = documents[-1], left - documents.size


def _grown(total: np.ndarray, part: np.ndarray) -> np.ndarray:
    """The sum of two arrays, the first as long as the second at least."""
    total = np.pad(total, (0, max(0, part.size - total.size)))
    total[: part.size] += part
    return total


def evaluate(trained: Trained, scorer: Scorer, rows: Rows, tokens: int, batch_size: int) -> HeldOut:
    """Evaluates on the first tokens of a set.

    Args:
      trained: the model.
      scorer: of the model.
      rows: of the set.
      tokens: of text, whose successors are the targets; 0 is all.
      batch_size: rows at a time at most, a multiple of `Trained.parts`.

    Raises:
      ValueError: none of them has a target.
    """
    T, there = trained.config.data.seq_len, rows.num_targets
    asked = min(tokens or there, there)
    batch_size = min(batch_size, trained.batch_size(max(1, -(-asked // T))))
    sums = HeldOut(asked, np.zeros(T), np.zeros(T), np.zeros(0), np.zeros(0))
    for targets, loss_BT, _ in scorer(_batches(rows, asked, T, batch_size)):
        loss = loss_BT.reshape(-1).astype(np.float64)[targets.counts]
        position, document = targets.position[targets.counts], targets.document[targets.counts]
        sums.position_loss_T += np.bincount(position, loss, T)
        sums.position_tokens_T += np.bincount(position, minlength=T)
        sums.document_loss = _grown(sums.document_loss, np.bincount(document, loss))
        sums.document_tokens = _grown(sums.document_tokens, np.bincount(document))
    if not sums.tokens:
        raise ValueError(f"none of the first {asked} tokens has a next one in its document")
    return sums
