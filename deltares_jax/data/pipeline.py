"""Batches: pure functions of rows, a seed and a position.

Batch k of a run is rows `rows_seen` … `rows_seen + B − 1` of a seeded, endless permutation; nothing
else needs to be remembered, and any number of processes cuts the same batch among itself.

B batch, T sequence.
"""

import fractions
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from deltares_jax.data.rows import Batch
from deltares_jax.data.rows import Rows as Rows  # beside the batches that are made of them

_EPOCHS = 10**6  # a slice of an endless repeat overflows in grain
_SEEDS = 2**32


def train_rows(
    sources: Sequence[Any], weights: Sequence[float], seed: int, repeat: bool = True
) -> grain.MapDataset:
    """The rows of a run in the order of training.

    Args:
      sources: `Rows` of each source, or anything with a length and items.
      weights: their shares of the rows.
      seed: of the permutations.
      repeat: a new permutation of a source once it is used up; else the end is where the first
        source ends.
    """
    shuffled = [
        grain.MapDataset.source(rows).seed((seed + number) % _SEEDS).shuffle()
        for number, rows in enumerate(sources)
    ]
    if repeat:
        shuffled = [rows.repeat(_EPOCHS) for rows in shuffled]
    if len(shuffled) == 1:
        return shuffled[0]
    return grain.MapDataset.mix(shuffled, whole_weights(weights))


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Weights as the smallest whole numbers of the same proportions, to six digits."""
    exact = [fractions.Fraction(f"{weight:.6g}") for weight in weights]
    scale = np.lcm.reduce([f.denominator for f in exact])
    whole = [int(f * int(scale)) for f in exact]
    return [number // int(np.gcd.reduce(whole)) for number in whole]


def train_batches(
    rows: grain.MapDataset,
    batch_size: int,
    rows_seen: int,
    process: int = 0,
    processes: int = 1,
    workers: int = 0,
) -> Iterator[Batch]:
    """Batches [B / processes, T] from position `rows_seen`: this process's part of each.

    Args:
      rows: from `train_rows`.
      batch_size: sequences over all devices.
      rows_seen: rows that the run has trained on before.
      process: which part of a batch, in order.
      processes: how many there are.
      workers: processes that read ahead; threads of this one when 0.

    Raises:
      ValueError: the batch cannot be cut in equal parts.
    """
    share = _share(batch_size, processes)
    whole = max(0, len(rows) - rows_seen) // batch_size * batch_size  # as many on each process
    own = rows[rows_seen : rows_seen + whole].batch(share)[process::processes]
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    batches = own.to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain passes them on, and there are none in a notebook
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
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
        chosen += [filler] * (share - len(chosen))
        yield {key: np.stack([row[key] for row in chosen]) for key in chosen[0]}
