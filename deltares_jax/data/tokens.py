"""Tokenizers: bytes, and any `tokenizer.json` by path or hub id.

They encode documents without adding tokens; a document that spells a special token gets the tokens
of its letters. End-of-text is appended by whoever packs documents.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from deltares_jax import config as config_lib
from deltares_jax.data import hub
from deltares_jax.printing import one_line

BYTE = "byte"
FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What packing and decoding need.

    `name` is as the user gave it, `sha256` that of the definition, `vocab_size` one more than the
    largest id.
    """

    name: str
    sha256: str
    end_of_text: int
    vocab_size: int

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Token ids of each document, without end-of-text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; undecodable bytes become U+FFFD."""

    def save(self, folder: pathlib.Path) -> None:
        """Writes what `load` needs."""


class ByteTokenizer:
    """One token a byte, and an end-of-text token that no byte can spell."""

    name = BYTE
    sha256 = hashlib.sha256(BYTE.encode()).hexdigest()
    end_of_text = 256
    vocab_size = 257

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids [bytes] of a document, without end-of-text; any bytes are valid."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Token ids of each document."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; end-of-text becomes a line, undecodable bytes U+FFFD."""
        parts = bytearray()
        for token in ids:
            parts += b"\n" if token == self.end_of_text else bytes([token])
        return parts.decode("utf-8", errors="replace")

    def save(self, folder: pathlib.Path) -> None:
        """Nothing: bytes need no definition."""


class FileTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library.

    Args:
      path: of the file.
      name: as the user gave it.
      end_of_text: the token's id; found in the tokenizer's own files when None.

    Raises:
      ValueError: the file cannot be read, or defines no end-of-text token.
    """

    def __init__(self, path: pathlib.Path, name: str, end_of_text: int | None = None):
        import tokenizers  # only runs with such a tokenizer need it

        try:
            definition = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_str(definition.decode())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"data.tokenizer={name!r}: {path} cannot be read as a tokenizer.json "
                f"({one_line(error)})"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # text never makes a special token
        self._definition = definition
        self.name = name
        self.sha256 = hashlib.sha256(definition).hexdigest()
        self.end_of_text = self._find_end_of_text(path) if end_of_text is None else end_of_text
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        marker = self._tokenizer.id_to_token(self.end_of_text) or ""
        if self.end_of_text in self._encode([marker])[0]:
            raise ValueError(
                f"data.tokenizer={name!r}: a document that spells {marker} would end there; mark "
                f'the token as "special": true in {FILE}'
            )

    def _find_end_of_text(self, path: pathlib.Path) -> int:
        found = self._tokenizer.token_to_id(_END_OF_TEXT)
        if found is None:
            token = _eos_token(self.name, path)
            found = self._tokenizer.token_to_id(token) if token else None
        if found is None:
            raise ValueError(
                f"data.tokenizer={self.name!r} has no end-of-text token: neither {_END_OF_TEXT} in "
                f"{FILE} nor an eos_token of {FILE} in {_CONFIG}; name one as eos_token there"
            )
        return found

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"data.tokenizer={self.name!r} cannot encode the text: {one_line(error)}"
            ) from None
        return [encoding.ids for encoding in encodings]

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Token ids of each document; bytes that are not UTF-8 are read as U+FFFD."""
        ids = self._encode([text.decode("utf-8", errors="replace") for text in texts])
        return [np.array(document, id_dtype(self.vocab_size)) for document in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens as they are spelt."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, folder: pathlib.Path) -> None:
        """Writes the definition beside the data that it made."""
        (folder / FILE).write_bytes(self._definition)


def id_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The type that token ids are recorded in."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def _eos_token(name: str, path: pathlib.Path) -> str | None:
    config = path.with_name(_CONFIG)
    if not config.exists() and not pathlib.Path(name).expanduser().exists():
        config = hub.model_file(name, _CONFIG, path.parent)
    if not config.exists():
        return None
    try:
        token = json.loads(config.read_text()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{config} is damaged: {error}") from None
    return token.get("content") if isinstance(token, dict) else token


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `byte`, a file or folder, or a hub id.

    Raises:
      ValueError: there is none of that name.
    """
    if name == BYTE:
        return ByteTokenizer()
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        if not (path / FILE).is_file():
            raise ValueError(f"data.tokenizer={name!r}: the folder holds no {FILE}")
        return FileTokenizer(path / FILE, name)
    if path.is_file():
        return FileTokenizer(path, name)
    if not hub.is_repository(name):
        raise ValueError(
            f"data.tokenizer={name!r} is neither {BYTE!r}, nor a file or folder, nor a hub id of "
            "the form OWNER/NAME"
        )
    folder = config_lib.cache_folder() / "tokenizers" / name
    return FileTokenizer(hub.model_file(name, FILE, folder), name)


def load(folder: pathlib.Path, manifest: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a prepared data set was made with, from the copy beside its records."""
    if manifest["tokenizer"] == BYTE:
        return ByteTokenizer()
    return FileTokenizer(folder / FILE, manifest["tokenizer"], manifest["end_of_text"])
