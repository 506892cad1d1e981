"""Rows of a prepared data set, by number: token streams cut in inputs and targets.

A row is T+1 tokens with stride T: T inputs and T targets, so every token but the stream's first is
a target exactly once.

T sequence.
"""

import pathlib
import resource
import sys
import weakref
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource

from deltares_jax.data.tokens import id_dtype
from deltares_jax.printing import one_line

Batch = dict[str, np.ndarray]
_NONE = np.zeros(0, np.int64)
_OTHER_FILES = 100  # that a run has open beside its shards, at least
_USUAL_LIMIT = 1024


class TokenStream:
    """The tokens of one split, addressed by position through all shards.

    Raises:
      ValueError: a shard is missing, has another length than the manifest says, or cannot be read.
    """

    def __init__(self, folder: pathlib.Path, split: str, manifest: dict[str, Any]):
        self._folder, self._split = folder, split
        self._record_tokens, self._vocab_size = manifest["record_tokens"], manifest["vocab_size"]
        shards = manifest["shards"][split]
        self._paths = [folder / shard["file"] for shard in shards]
        for shard, path in zip(shards, self._paths, strict=True):
            size = path.stat().st_size if path.exists() else 0
            if size != shard["size"]:
                raise self._damaged(f"{path} has {size} of {shard['size']} bytes")
        # Where each shard begins, in tokens of the stream and in records of the split.
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in shards)])
        self._first_record = np.cumsum([0, *(shard["records"] for shard in shards)])
        self._dtype = id_dtype(self._vocab_size)
        _allow_files(sum(len(stream._paths) for stream in _streams) + len(shards))
        _streams.add(self)
        try:
            self._records = ArrayRecordDataSource(list(map(str, self._paths)))
            known = len(self._records)
        except Exception as error:  # of array_record, which names no file
            raise self._damaged(_unreadable(self._paths) or one_line(error)) from error
        if known != self._first_record[-1]:
            raise self._damaged(f"{known} of {self._first_record[-1]} records are there")
        _ = self[len(self) - 1 : len(self)]  # the last record is there

    def _damaged(self, reason: str) -> ValueError:
        return ValueError(
            f"{self._folder}: split {self._split} is damaged ({reason}); give the prepare command "
            "again to repair it"
        )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        """Tokens [start, stop), clipped at the end of the text."""
        start, stop = span.start, min(span.stop, len(self))
        parts = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            begin, end = int(self._starts[shard]), min(int(self._starts[shard + 1]), stop)
            parts.append(self._of_shard(shard, start - begin, end - begin))
            start, shard = end, shard + 1
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if tokens.max() >= self._vocab_size:
            raise self._damaged(f"token {tokens.max()} in a vocabulary of {self._vocab_size}")
        return tokens

    def _of_shard(self, shard: int, start: int, stop: int) -> np.ndarray:
        size, base = self._record_tokens, int(self._first_record[shard])
        first, last = start // size, (stop - 1) // size
        try:
            # One by one: the interface for many starts threads.
            parts = [self._decoded(self._records[base + i]) for i in range(first, last + 1)]
        except Exception as error:  # of array_record
            raise self._damaged(f"{self._paths[shard]}: {one_line(error)}") from error
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return tokens[start - first * size : stop - first * size]

    def _decoded(self, example: bytes) -> np.ndarray:
        """The tokens of a record: a TFDS example of one feature ends in its bytes.

        The parsers of protobuf and TFDS take longer than all else that a row needs.
        """
        size = self._record_tokens * np.dtype(self._dtype).itemsize
        return np.frombuffer(example, self._dtype, offset=len(example) - size)


def _unreadable(paths: list[pathlib.Path]) -> str:
    """The first of some files that cannot be opened, and why."""
    for path in paths:
        try:
            len(ArrayRecordDataSource([str(path)]))
        except Exception as error:  # of array_record
            return f"{path}: {one_line(error)}"
    return ""


_streams: weakref.WeakSet[TokenStream] = weakref.WeakSet()


def _allow_files(count: int) -> None:
    """Raises this process's limit of open files: each shard that was read keeps one."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = sys.maxsize if most == resource.RLIM_INFINITY else most
    if count + _OTHER_FILES > hard:
        raise ValueError(
            f"{count} shards need {count + _OTHER_FILES} open files, {hard} are allowed: ulimit -n"
        )
    wanted = min(count + _USUAL_LIMIT, hard)
    if wanted > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class Rows:
    """Rows of T inputs and T targets over a stream of tokens, by number.

    Each is a dict of int32 `inputs`, `targets`, `positions`, `segments` and float32 `weights`, all
    [T]. The padding of the last row is a segment of its own with weight 0. With `document_masking`
    each document is a segment, positions restart with it (and at the row's start), and a target
    that begins a document has weight 0; without, the text of a row is one segment.
    """

    def __init__(self, stream: Any, seq_len: int, end_of_text: int, document_masking: bool = True):
        self._stream, self._T, self.end_of_text = stream, seq_len, end_of_text
        self._masking = document_masking
        self._index = np.arange(seq_len, dtype=np.int32)

    def __len__(self) -> int:
        return -(-(len(self._stream) - 1) // self._T)

    @property
    def num_targets(self) -> int:
        """Every token but the first, those that begin a document included."""
        return max(0, len(self._stream) - 1)

    def __getitem__(self, row: int) -> Batch:
        T = self._T
        chunk = self._stream[row * T : row * T + T + 1].astype(np.int32)
        real = chunk.size - 1
        if real < T:
            chunk = np.pad(chunk, (0, T - real), constant_values=self.end_of_text)
        inputs, targets = chunk[:-1], chunk[1:]
        ends = np.flatnonzero(inputs[:real] == self.end_of_text) if self._masking else _NONE
        begins = np.concatenate([[0], ends[ends + 1 < real] + 1, [real] if real < T else _NONE])
        lengths = np.append(begins[1:], T) - begins
        weights = np.ones(T, np.float32)
        weights[ends] = 0
        weights[real:] = 0
        return {
            "inputs": inputs,
            "targets": targets,
            "positions": self._index - np.repeat(begins.astype(np.int32), lengths),
            "segments": np.repeat(np.arange(1, len(begins) + 1, dtype=np.int32), lengths),
            "weights": weights,
        }
