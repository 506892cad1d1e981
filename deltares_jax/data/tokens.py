"""Tokenizers, and the packing of documents into fixed records without losing a token."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

RECORD_TOKENS = 4096


class ByteTokenizer:
    """One token a byte, and an end-of-text token that no byte can spell."""

    name = "byte"
    end_of_text = 256
    vocab_size = 257

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids [bytes] of a document, without end-of-text; any bytes are valid."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; end-of-text becomes a line, undecodable bytes U+FFFD."""
        parts = bytearray()
        for token in ids:
            parts += b"\n" if token == self.end_of_text else bytes([token])
        return parts.decode("utf-8", errors="replace")


def get_tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer that `data.tokenizer` names.

    Raises:
      ValueError: there is none of that name.
    """
    if name != "byte":
        raise ValueError(f"data.tokenizer={name!r} is not available; available: byte")
    return ByteTokenizer()


@dataclasses.dataclass
class Counts:
    """What went into the records of a split, and what was left out.

    Every document ends in one end-of-text token, so tokens = bytes + documents for bytes as tokens.
    sha256 is that of the token stream.
    """

    documents: int = 0
    empty_documents: int = 0
    bytes: int = 0
    tokens: int = 0
    records: int = 0
    sha256: str = ""


def pack(
    documents: Iterable[tuple[str, bytes]], tokenizer: ByteTokenizer, counts: Counts
) -> Iterator[np.ndarray]:
    """Cuts the documents' tokens, each followed by end-of-text, into records of equal length.

    The last record is filled up with end-of-text; `counts.tokens` tells where the text ends. Empty
    documents are left out and counted.
    """
    digest, pending, size = hashlib.sha256(), [], 0
    for _, text in documents:
        if not text:
            counts.empty_documents += 1
            continue
        ids = np.append(tokenizer.encode(text), np.uint16(tokenizer.end_of_text))
        digest.update(ids.tobytes())
        counts.documents += 1
        counts.bytes += len(text)
        counts.tokens += ids.size
        pending.append(ids)
        size += ids.size
        if size >= RECORD_TOKENS:
            stream = np.concatenate(pending)
            whole = stream.size // RECORD_TOKENS * RECORD_TOKENS
            for record in stream[:whole].reshape(-1, RECORD_TOKENS):
                counts.records += 1
                yield record
            pending, size = [stream[whole:]], stream.size - whole
    if size:
        counts.records += 1
        rest = np.concatenate(pending)
        fill = np.full(RECORD_TOKENS - size, tokenizer.end_of_text, np.uint16)
        yield np.concatenate([rest, fill])
    counts.sha256 = digest.hexdigest()
