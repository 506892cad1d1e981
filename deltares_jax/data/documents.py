"""Documents in files: text (one document a file), JSON lines, parquet."""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from deltares_jax.printing import one_line

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_TEXT_TYPES = {  # of Arrow
    f"{prefix}{kind}" for kind in ("string", "binary") for prefix in ("", "large_")
} | {"string_view", "binary_view"}
_BATCH_ROWS = 1024


class Document(NamedTuple):
    """One document.

    Attributes:
      name: tells it from all others of its source; decides the split.
      text: its bytes; None where the record holds no text.
      position: bytes of the file that were read so far.
    """

    name: str
    text: bytes | None
    position: int


def read(path: pathlib.Path, name: str, column: str, id_column: str = "") -> Iterator[Document]:
    """The documents of a file in order.

    Args:
      path: where the file is.
      name: what it is called in its source, with its suffix.
      column: the key or column that holds the text.
      id_column: the one that names documents; file and number of the record do where it is empty
        or not there.

    Raises:
      ValueError: the file is damaged, or has no such column.
    """
    size = path.stat().st_size
    if name.endswith(".parquet"):
        return _parquet(path, name, size, column, id_column)
    if name.endswith(SUFFIXES[1:4]):
        return _json_lines(path, name, column)
    return iter([Document(name, path.read_bytes(), size)])


def _parquet(
    path: pathlib.Path, name: str, size: int, column: str, id_column: str
) -> Iterator[Document]:
    try:
        with pq.ParquetFile(path) as file:
            known = file.schema_arrow.names
            if column not in known:
                raise _no_column(name, column, known)
            id_column = id_column if id_column in known else ""
            columns = [column, *([id_column] if id_column else [])]
            rows, number = max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                # As bytes: Arrow does not check that text is UTF-8 before it fails to decode it.
                texts = _as_bytes(batch.column(column), name, column)
                names = batch.column(id_column).to_pylist() if id_column else [None] * len(texts)
                for text, given in zip(texts, names, strict=True):
                    number += 1
                    label = f"{name}#{number}" if given is None else str(given)
                    yield Document(label, text, size * number // rows)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{name} is damaged ({one_line(error)}); get the file {path} again"
        ) from error


def _as_bytes(column: Any, name: str, label: str) -> list[bytes | None]:
    if str(column.type) not in _TEXT_TYPES:
        raise ValueError(f"{name}: --column={label!r} holds {column.type}, not text")
    return column.cast(pa.large_binary()).to_pylist()


def _json_lines(path: pathlib.Path, name: str, column: str) -> Iterator[Document]:
    seen: set[str] = set()
    found = False
    with path.open("rb") as raw:
        try:
            lines = _decompressed(raw, name)
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                record = _record(line)
                if not found:
                    seen |= record.keys()
                    found = column in record
                text = record.get(column)
                content = _text_bytes(text) if isinstance(text, str) else None
                yield Document(f"{name}#{number}", content, raw.tell())
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{name} is damaged ({one_line(error)}); get the file {path} again"
            ) from error
    if seen and not found:
        raise _no_column(name, column, sorted(seen))


def _record(line: bytes) -> dict[str, Any]:
    """The record of a line; bytes that are not UTF-8 stay in its texts as surrogates."""
    try:
        record = json.loads(line.decode("utf-8-sig", "surrogateescape"))
    except (ValueError, RecursionError):  # the latter by a line of brackets
        return {}
    return record if isinstance(record, dict) else {}


def _text_bytes(text: str) -> bytes:
    """A text as it was written; a lone surrogate that JSON spells is no UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _decompressed(raw: Any, name: str) -> Any:
    kind = {"gz": "gzip", "zst": "zstd"}.get(name.rpartition(".")[2])
    if kind is None:
        return raw
    import io

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw), kind))


def _no_column(name: str, column: str, names: list[str]) -> ValueError:
    return ValueError(f"{name} has no --column={column!r}; it has {', '.join(names)}")


def count_bytes(
    documents: Iterator[Document], advance: Callable[[int], None]
) -> Iterator[Document]:
    """Passes documents on and tells how many bytes of the file each took."""
    before = 0
    for document in documents:
        advance(document.position - before)
        before = document.position
        yield document
