"""Log-likelihoods of continuations: requests as windows, windows as batches of few lengths.

B batch, T sequence.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from deltares_jax.data.rows import Batch

_SHORTEST = 16  # lengths halve from the longest down to this one
# Yields (tag, losses [B, T], whether the target is the likeliest [B, T]) of tagged batches.
ScoreBatches = Callable[[Iterable[tuple[Any, Batch]]], Iterator[tuple[Any, np.ndarray, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class Window:
    """A row of a request: tokens, of which the last `scored` are targets to be summed."""

    request: int
    tokens: Sequence[int]
    scored: int


@dataclasses.dataclass
class Counts:
    """What was asked and what had to be cut.

    Attributes:
      requests: all of them.
      cut: those whose context lost tokens at its start.
      cut_tokens: that they lost together.
      split: those whose continuation is longer than a window.
      shortened: those that may generate less than their task allows.
    """

    requests: int = 0
    cut: int = 0
    cut_tokens: int = 0
    split: int = 0
    shortened: int = 0


def windows(
    request: int, context: Sequence[int], continuation: Sequence[int], length: int
) -> list[Window]:
    """Rows that score each token of a continuation once, with as much before it as there is room.

    A row has `length` inputs at most. What does not fit is cut at the start of the context. A
    continuation that is longer than that is scored in several rows, each from the last token of
    the one before; the last of them goes back as far as fits.

    Args:
      request: its number.
      context: token ids, one at least.
      continuation: token ids.
      length: of a row.
    """
    tokens, found = [*context, *continuation], []
    done = len(context)
    while done < len(tokens):
        scored = min(length, len(tokens) - done)
        done += scored
        found.append(Window(request, tokens[max(0, done - length - 1) : done], scored))
    return found


def lengths(longest: int, multiple: int) -> list[int]:
    """The row lengths that programs are made for, ascending: halves of the longest."""
    found, size = [longest], longest
    while size > max(_SHORTEST, multiple):
        size = -(-size // 2)
        found.append(-(-size // multiple) * multiple)
    return sorted(set(found))


def _batch(rows: Sequence[Window], batch_size: int, length: int) -> tuple[np.ndarray, Batch]:
    """The targets to be summed, [B, T], and the batch; what fills it up is not among them."""
    chunk = np.zeros((batch_size, length + 1), np.int32)
    scored_BT = np.zeros((batch_size, length), bool)
    for row, window in enumerate(rows):
        size = len(window.tokens)
        chunk[row, :size] = window.tokens
        scored_BT[row, size - 1 - window.scored : size - 1] = True
    positions_BT = np.broadcast_to(np.arange(length, dtype=np.int32), (batch_size, length))
    return scored_BT, {
        "inputs": chunk[:, :-1],
        "targets": chunk[:, 1:],
        "positions": positions_BT,
        "segments": np.ones((batch_size, length), np.int32),
    }


def score(
    score_batches: ScoreBatches,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    longest: int,
    batch_size: int,
    multiple: int = 1,
) -> tuple[list[tuple[float, bool]], Counts]:
    """The log-likelihood of each continuation in nats, and whether greedy decoding would give it.

    Args:
      score_batches: by the model, see `Scorer`.
      requests: (context, continuation) in token ids; a context has one at least.
      longest: inputs of a row at most.
      batch_size: rows of a batch.
      multiple: of which a row's length must be one.

    Returns:
      Sums over exactly the tokens of the continuation, (0.0, True) for an empty one, in the order
      of the requests; and what had to be cut.
    """
    counts, rows = Counts(len(requests)), []
    for number, (context, continuation) in enumerate(requests):
        own = windows(number, context, continuation, longest)
        over = len(context) + len(continuation) - 1 - longest
        counts.split += len(own) > 1
        if len(own) == 1 and over > 0:
            counts.cut += 1
            counts.cut_tokens += over
        rows += own
    rows.sort(key=lambda window: -len(window.tokens))  # what needs most memory comes first
    sizes = lengths(longest, multiple)

    def batches() -> Iterator[tuple[Any, Batch]]:
        for first in range(0, len(rows), batch_size):
            part = rows[first : first + batch_size]
            length = next(n for n in sizes if n >= len(part[0].tokens) - 1)
            scored_BT, batch = _batch(part, batch_size, length)
            yield (part, scored_BT), batch

    sums, greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
    for (part, scored_BT), loss_BT, likeliest_BT in score_batches(batches()):
        for row, window in enumerate(part):
            own_T = scored_BT[row]
            sums[window.request] -= loss_BT[row, own_T].astype(np.float64).sum()
            greedy[window.request] &= bool(likeliest_BT[row, own_T].all())
    return list(zip(sums.tolist(), greedy.tolist(), strict=True)), counts
