"""Batches: pure functions of rows, a seed and a position.

Batch k of a run is rows `rows_seen` … `rows_seen + B − 1` of a seeded, endless permutation; nothing
else needs to be remembered, and any number of processes cuts the same batch among itself.

B batch, T sequence.
"""

import fractions
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from deltares_jax.data.processes import end_with_parent
from deltares_jax.data.rows import Batch
from deltares_jax.data.rows import Rows as Rows  # beside the batches that are made of them

_ENDLESS = 1 << 60  # rows
_MOST_ROWS = 1 << 32  # what grain's permutation takes


class Order:
    """Which row of which source comes at a position of a run.

    Each source is permuted anew in each of its epochs; sources are interleaved so that everywhere
    each has its share, to within a row or two.

    Args:
      sizes: rows of each source.
      weights: their shares of the rows.
      seed: of the permutations.
      repeat: a new epoch of a source once it is used up; else the end is where the first source
        would begin a second one.

    Raises:
      ValueError: a source has too many rows to be permuted.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, repeat: bool = True
    ):
        self._sizes, self._weights, self._seed = list(sizes), whole_weights(weights), seed
        if max(sizes) > _MOST_ROWS:
            raise ValueError(
                f"a source of {max(sizes):,} rows cannot be shuffled, {_MOST_ROWS:,} can; use a "
                "larger data.seq_len, or several sources in data.mixture"
            )
        self._length = _ENDLESS
        if not repeat:
            whole = sum(self._weights)
            guess = min(s * whole // w for s, w in zip(sizes, self._weights, strict=True))
            self._length = guess + len(self._weights)
            while any(n > s for n, s in zip(self.seen(self._length), self._sizes, strict=True)):
                self._length -= 1

    def __len__(self) -> int:
        return self._length

    def seen(self, position: int) -> list[int]:
        """How many of the first `position` rows each source gave."""
        counts, rest = [], sum(self._weights)
        for weight in self._weights:  # each takes its share of what the ones before leave
            left = position * (rest - weight) // rest
            counts.append(position - left)
            position, rest = left, rest - weight
        return counts

    def __getitem__(self, position: int) -> tuple[int, int]:
        """(source, its row) at a position."""
        source, number = 0, position
        if len(self._sizes) > 1:
            before, after = self.seen(position), self.seen(position + 1)
            source = next(i for i, count in enumerate(after) if count > before[i])
            number = before[source]
        epoch, place = divmod(number, self._sizes[source])
        seed = _epoch_seed(self._seed, source, epoch)
        size = self._sizes[source]
        return source, grain.experimental.index_shuffle(place, size - 1, seed, rounds=4)


@functools.lru_cache(maxsize=1024)
def _epoch_seed(seed: int, source: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, source, epoch]).generate_state(1)[0])


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Weights as the smallest whole numbers of the same proportions, to six digits."""
    exact = [fractions.Fraction(f"{weight:.6g}") for weight in weights]
    scale = np.lcm.reduce([f.denominator for f in exact])
    whole = [int(f * int(scale)) for f in exact]
    return [number // int(np.gcd.reduce(whole)) for number in whole]


class _Batches:
    """One process's parts of the batches from a position on, by number."""

    def __init__(
        self, sources: Sequence[Any], order: Order, rows_seen: int, batch_size: int, own: range
    ):
        self._sources, self._order = list(sources), order
        self._rows_seen, self._batch_size, self._own = rows_seen, batch_size, own

    def __len__(self) -> int:  # the same on every process
        return max(0, len(self._order) - self._rows_seen) // self._batch_size

    def __getitem__(self, number: Any) -> Batch:
        first = self._rows_seen + int(number) * self._batch_size
        places = [self._order[first + place] for place in self._own]
        return _stacked([self._sources[source][row] for source, row in places])


def _stacked(rows: Sequence[Batch]) -> Batch:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def train_batches(
    sources: Sequence[Any],
    order: Order,
    batch_size: int,
    rows_seen: int,
    process: int = 0,
    processes: int = 1,
    workers: int = 0,
) -> grain.DatasetIterator[Batch]:
    """Batches [B / processes, T] from position `rows_seen`: this process's part of each.

    Args:
      sources: `Rows` of each source, or anything with items.
      order: in which their rows come.
      batch_size: sequences over all devices.
      rows_seen: rows that the run has trained on before.
      process: which part of a batch, in order.
      processes: how many there are.
      workers: processes that read ahead; threads of this one when 0.

    Raises:
      ValueError: the batch cannot be cut in equal parts.
    """
    share = _share(batch_size, processes)
    places = range(process * share, (process + 1) * share)
    own = _Batches(sources, order, rows_seen, batch_size, places)
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    batches = grain.MapDataset.source(own).to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain passes them on, and there are none in a notebook
        # Through a pipe: shared memory would outlive us, and containers have little of it.
        piped = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
        batches = grain.experimental.WithOptionsIterDataset(batches, piped)
        readers = grain.MultiprocessingOptions(num_workers=workers)
        batches = batches.mp_prefetch(readers, end_with_parent)
    return iter(batches)


def _share(batch_size: int, processes: int) -> int:
    if batch_size % processes:
        raise ValueError(
            f"a batch of {batch_size} sequences must be a multiple of the {processes} processes "
            "that read it"
        )
    return batch_size // processes


def eval_batches(
    rows: Any, count: int, batch_size: int, process: int = 0, processes: int = 1
) -> Iterator[Batch]:
    """The first `count` rows in order, as batches of equal size; filled up with weight 0.

    Args:
      rows: of an evaluation set.
      count: how many of them.
      batch_size: sequences over all devices.
      process: which part of each batch is wanted, in order.
      processes: how many parts there are.
    """
    share = _share(batch_size, processes)
    for start in range(process * share, -(-count // batch_size) * batch_size, batch_size):
        chosen = [rows[i] for i in range(start, min(start + share, count))]
        first = chosen[0] if chosen else rows[0]
        filler = {**first, "weights": np.zeros_like(first["weights"])}
        yield _stacked(chosen + [filler] * (share - len(chosen)))
