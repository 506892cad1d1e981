"""Rows and batches: pure functions of a prepared data set, a seed and a position.

A row is T+1 tokens with stride T: T inputs and T targets, so every token but the corpus's first is
a target exactly once. Batch k of a run is rows `rows_seen` … `rows_seen + B − 1` of a seeded,
endless permutation; nothing else needs to be remembered.

B batch, T sequence.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
import tensorflow_datasets as tfds
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.data import prepare, sources, tokens

Batch = dict[str, np.ndarray]

_EPOCHS = 10**6  # a slice of an endless repeat overflows in grain


class TokenStream:
    """The tokens of one split, addressed by position.

    Raises:
      ValueError: the records cannot be read, or are fewer than the manifest says.
    """

    def __init__(self, folder: pathlib.Path, split: str, manifest: dict[str, Any]):
        self._record_tokens = manifest["record_tokens"]
        self._size = manifest["splits"][split]["tokens"]
        try:
            builder = tfds.builder_from_directory(str(folder))
            self._records: Sequence[dict[str, np.ndarray]] = builder.as_data_source(split=split)
            _ = self[self._size - 1 : self._size]  # the last record is there
        except Exception as error:  # of TFDS, protobuf or array_record
            raise ValueError(
                f"{folder}: split {split} is damaged ({error}); "
                "remove the folder to prepare it again"
            ) from error

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice) -> np.ndarray:
        """Tokens [start, stop), clipped at the end of the text."""
        size = self._record_tokens
        start, stop = span.start, min(span.stop, self._size)
        first, last = start // size, (stop - 1) // size
        parts = [self._records[i]["tokens"] for i in range(first, last + 1)]
        return np.concatenate(parts)[start - first * size : stop - first * size]


class Rows:
    """Rows of T inputs and T targets over a stream of tokens, by number.

    Each is a dict of int32 `inputs`, `targets`, `positions`, `segments` and float32 `weights`, all
    [T]. Positions restart with each document, and at the row's start. A target has weight 0 where
    it begins a document and in the padding of the last row, which is a segment of its own.
    """

    def __init__(self, stream: Any, seq_len: int, end_of_text: int):
        self._stream, self._T, self._end_of_text = stream, seq_len, end_of_text

    def __len__(self) -> int:
        return -(-(len(self._stream) - 1) // self._T)

    def __getitem__(self, row: int) -> Batch:
        T = self._T
        chunk = self._stream[row * T : row * T + T + 1].astype(np.int32)
        real = chunk.size - 1
        chunk = np.pad(chunk, (0, T + 1 - chunk.size), constant_values=self._end_of_text)
        inputs, targets = chunk[:-1], chunk[1:]
        index = np.arange(T)
        starts = np.zeros(T, bool)
        starts[1:] = inputs[:-1] == self._end_of_text
        starts[real + 1 :] = False
        if real < T:
            starts[real] = True  # the padding
        segments = np.cumsum(starts) + 1
        positions = index - np.maximum.accumulate(np.where(starts, index, 0))
        weights = (inputs != self._end_of_text) & (index < real)
        return {
            "inputs": inputs,
            "targets": targets,
            "positions": positions.astype(np.int32),
            "segments": segments.astype(np.int32),
            "weights": weights.astype(np.float32),
        }


class Dataset:
    """A prepared data set: its manifest, token streams and rows per split."""

    def __init__(self, folder: pathlib.Path, seq_len: int):
        manifest = prepare.read_manifest(folder)
        if manifest is None:
            raise ValueError(f"{folder} holds no prepared data set ({prepare.MANIFEST} is missing)")
        self.manifest: dict[str, Any] = manifest
        self.streams = {s: TokenStream(folder, s, manifest) for s in manifest["splits"]}
        self.rows = {
            split: Rows(stream, seq_len, manifest["end_of_text"])
            for split, stream in self.streams.items()
        }
        for split, rows in self.rows.items():
            if not len(rows):
                raise ValueError(f"{folder}: split {split} holds no row of data.seq_len={seq_len}")


def open_dataset(config: FrozenConfigDict) -> Dataset:
    """The data set that `config.data` names, prepared first if it is one that we can make alone.

    Raises:
      ValueError: the source is not prepared, or its vocabulary is larger than the model's.
    """
    data = config.data
    cache = pathlib.Path(data.dir).expanduser() if data.dir else config_lib.cache_folder() / "data"
    if data.source not in sources.SOURCES:
        raise ValueError(
            f"data.source={data.source!r} (tokenizer {data.tokenizer!r}) is not prepared under "
            f"{cache}: this version prepares {', '.join(sources.SOURCES)} by itself, so it needs "
            "that source's documents tokenised and packed there first; to train at once use "
            "--config=configs/debug.py"
        )
    tokenizer = tokens.get_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} must be at least {tokenizer.vocab_size}, "
            f"the vocabulary of data.tokenizer={data.tokenizer!r}"
        )
    return Dataset(prepare.prepare_py_stdlib(cache.absolute()), data.seq_len)


def train_batches(rows: Any, seed: int, batch_size: int, rows_seen: int) -> Iterator[Batch]:
    """Batches [B, T] from position `rows_seen` of the seeded permutation, a new order each epoch.

    Args:
      rows: `Rows`, or anything with a length and items.
      seed: of the permutation.
      batch_size: sequences over all devices.
      rows_seen: rows that the run has trained on before.
    """
    dataset = grain.MapDataset.source(rows).seed(seed).shuffle().repeat(_EPOCHS)
    batched = dataset[rows_seen:].batch(batch_size)
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(batched.to_iter_dataset(options))


def eval_batches(rows: Any, count: int, batch_size: int) -> Iterator[Batch]:
    """The first `count` rows in order, as batches of equal size; filled up with weight 0."""
    for start in range(0, count, batch_size):
        chosen = [rows[i] for i in range(start, min(start + batch_size, count))]
        filler = {**chosen[0], "weights": np.zeros_like(chosen[0]["weights"])}
        chosen += [filler] * (batch_size - len(chosen))
        yield {key: np.stack([row[key] for row in chosen]) for key in chosen[0]}
