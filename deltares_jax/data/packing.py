"""The packing of documents into fixed records without losing, repeating or reordering a token."""

import contextlib
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module

from deltares_jax.data import documents, tokens
from deltares_jax.printing import one_line

RECORD_TOKENS = 4096
_BATCH_BYTES = 1 << 21  # of text, tokenised at once


@dataclasses.dataclass
class Counts:
    """What went into the records of a split, and what was left out.

    Every document ends in one end-of-text token. Empty documents are left out, and so are skipped
    ones: records without text. Undecodable documents are kept, though not UTF-8: a tokenizer of
    text reads U+FFFD for the bad bytes. `sha256` is that of the token stream.
    """

    documents: int = 0
    empty_documents: int = 0
    undecodable_documents: int = 0
    skipped_documents: int = 0
    bytes: int = 0
    tokens: int = 0
    records: int = 0
    sha256: str = ""


def features(vocab_size: int) -> tfds.features.FeaturesDict:
    """What TFDS knows a record as."""
    record = tfds.features.Tensor(
        shape=(RECORD_TOKENS,),
        dtype=tokens.id_dtype(vocab_size),
        encoding=tfds.features.Encoding.BYTES,  # a varint per token is 20 times slower to read
    )
    return tfds.features.FeaturesDict({"tokens": record})


class ShardWriter:
    """Writes a stream of tokens as the records of one file.

    The last record is filled up with end-of-text; `counts.tokens` tells where the text ends.

    Raises:
      ValueError: the file cannot be written.
    """

    def __init__(self, path: pathlib.Path, tokenizer: tokens.Tokenizer):
        self.path, self.counts = path, Counts()
        self._end_of_text = tokenizer.end_of_text
        self._vocab_size = tokenizer.vocab_size
        self._dtype = tokens.id_dtype(tokenizer.vocab_size)
        self._features = features(tokenizer.vocab_size)
        self._digest = hashlib.sha256()
        self._pending: list[np.ndarray] = []
        self._size = 0
        self._file: Any = None

    def add(self, ids: np.ndarray) -> None:
        """Appends the tokens of a document, end-of-text included."""
        self._digest.update(ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes())
        self.counts.tokens += ids.size
        self._pending.append(ids)
        self._size += ids.size
        if self._size >= RECORD_TOKENS:
            stream = np.concatenate(self._pending)
            whole = stream.size // RECORD_TOKENS * RECORD_TOKENS
            self._write(stream[:whole])
            self._pending, self._size = [stream[whole:]], stream.size - whole

    def _write(self, stream: np.ndarray) -> None:
        with self._one_error():
            if self._file is None:
                self._file = array_record_module.ArrayRecordWriter(str(self.path), "group_size:1")
            for record in stream.reshape(-1, RECORD_TOKENS):
                self._file.write(self._features.serialize_example({"tokens": record}))
                self.counts.records += 1

    @contextlib.contextmanager
    def _one_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of array_record: RuntimeError, also of a full disk
            raise ValueError(f"{self.path.parent} cannot be written: {one_line(error)}") from error

    def close(self) -> Counts:
        """Ends the file; there is none where nothing was added."""
        if self._size:
            fill = np.full(RECORD_TOKENS - self._size, self._end_of_text, self._dtype)
            self._write(np.concatenate([*self._pending, fill]))
            self._size = 0
        if self._file is not None:
            with self._one_error():
                self._file.close()
        self.counts.sha256 = self._digest.hexdigest()
        return self.counts


def tokenized(
    stream: Iterable[documents.Document], tokenizer: tokens.Tokenizer
) -> Iterator[tuple[documents.Document, np.ndarray]]:
    """Each document with its token ids, end-of-text last; no ids where there is no text."""
    batch: list[documents.Document] = []
    size = 0
    for document in stream:
        batch.append(document)
        size += len(document.text or b"")
        if size >= _BATCH_BYTES:
            yield from _encode(batch, tokenizer)
            batch, size = [], 0
    yield from _encode(batch, tokenizer)


def _encode(
    batch: list[documents.Document], tokenizer: tokens.Tokenizer
) -> Iterator[tuple[documents.Document, np.ndarray]]:
    dtype = tokens.id_dtype(tokenizer.vocab_size)
    encoded = tokenizer.encode_batch([document.text or b"" for document in batch])
    for document, ids in zip(batch, encoded, strict=True):
        end = [tokenizer.end_of_text] if document.text else []
        yield document, np.append(ids, np.array(end, dtype)).astype(dtype, copy=False)


def count(counts: Counts, document: documents.Document) -> None:
    """Counts a document; its tokens are counted where they are written."""
    if document.text is None:
        counts.skipped_documents += 1
    elif not document.text:
        counts.empty_documents += 1
    else:
        counts.documents += 1
        counts.bytes += len(document.text)
        try:
            document.text.decode()
        except UnicodeDecodeError:
            counts.undecodable_documents += 1
