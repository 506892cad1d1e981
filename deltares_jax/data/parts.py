"""The work on one part of a source: its files to shards, and a note of what they hold.

A part is done when its note is there; shards and note are renamed into place whole, so whatever
kills the work leaves nothing that looks done. The result depends on the part alone.
"""

import dataclasses
import json
import os
import pathlib
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from deltares_jax.data import documents, hub, packing, sources, tokens

FOLDER = "parts"
_HELD_OUT_TOKENS = 1 << 20  # 512 rows of 2048
Advance = Callable[[int, int], None]  # bytes of the source, tokens


@dataclasses.dataclass(frozen=True)
class Job:
    """What the work on every part of a data set shares; `out` holds the tokenizer's copy."""

    out: pathlib.Path
    source: sources.Source
    tokenizer: dict[str, Any]  # as the manifest has it
    max_tokens: int  # of training text; 0: all

    def limit(self, split: str) -> int:
        """Tokens of a split at most; 0: none. Held-out files are read for evaluation alone."""
        if split == sources.SPLITS[0]:
            return self.max_tokens
        return min(self.max_tokens, max(self.max_tokens // 100, _HELD_OUT_TOKENS))

    def folder(self) -> pathlib.Path:
        """Where shards and notes are until all are there."""
        return self.out / FOLDER


def source_bytes(part: sources.Part) -> int:
    """Bytes to go through; those of the hub twice, once to download and once to read."""
    return sum(file.size * (1 + isinstance(file.where, hub.RemoteFile)) for file in part.files)


def main_split(part: sources.Part) -> str:
    """The split that a limit of tokens counts."""
    return part.split or sources.SPLITS[0]


def note_path(job: Job, part: sources.Part) -> pathlib.Path:
    """Where the note of a part is."""
    return job.folder() / f"{part.number:05}.json"


def shard_name(part: sources.Part, split: str) -> str:
    """File name of the shard of a part until the data set is complete."""
    return f"{part.number:05}-{split}.array_record"


def read_note(job: Job, part: sources.Part) -> dict[str, Any] | None:
    """What a part that is done holds, or None.

    Raises:
      ValueError: the note is damaged.
    """
    path = note_path(job, part)
    return read_json(path) if path.exists() else None


def read_json(path: pathlib.Path) -> Any:
    """What a file of the preparation holds.

    Raises:
      ValueError: it is damaged.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); remove the file and give the same command again"
        ) from None


def finished(job: Job, part: sources.Part, limit: int) -> dict[str, Any] | None:
    """The note of a part that is done and fits the limit, or None; damaged shards do not count."""
    note = read_note(job, part)
    if note is None or not fits(note, limit):
        return None
    for shard in note["shards"].values():
        fault = shard_fault(job.folder() / shard["file"], shard)
        if fault:
            print(f"{fault}; its part is prepared again", file=sys.stderr)
            return None
    return note


def files_read(part: sources.Part, note: dict[str, Any]) -> int:
    """How many files of a part were read: of small ones, each a document, those before the cut."""
    kinds = ("documents", "empty_documents", "skipped_documents")
    taken = sum(count[kind] for count in note["counts"].values() for kind in kinds)
    return taken if len(part.files) > 1 else 1


def fits(note: dict[str, Any], limit: int) -> bool:
    """Whether a part that was done is what a limit asks for."""
    whole = not note["cut"] and (not limit or note["tokens"] <= limit)
    return whole or (note["cut"] and note["limit"] == limit)


def shard_fault(path: pathlib.Path, shard: dict[str, Any]) -> str:
    """What is wrong with a shard by its length and checksum; empty where nothing is."""
    if not path.exists():
        return f"{path} is missing"
    if path.stat().st_size != shard["size"]:
        return f"{path} is damaged: {path.stat().st_size} of {shard['size']} bytes"
    if hub.file_sha256(path) != shard["sha256"]:
        return f"{path} is damaged: its sha256 is not that of the manifest"
    return ""


def work(job: Job, part: sources.Part, limit: int, advance: Advance) -> dict[str, Any]:
    """Prepares a part and returns its note.

    Args:
      job: what is shared.
      part: what to read.
      limit: stops before the first document that would bring the main split over so many tokens;
        0 reads everything.
      advance: is told bytes of the source and tokens as they are done.

    Raises:
      ValueError: a file cannot be fetched or is damaged.
    """
    note = finished(job, part, limit)
    if note is not None:
        return note
    tokenizer = tokens.load(job.out, job.tokenizer)
    partial = f"{uuid.uuid4().hex}.partial"  # a pipeline may try a part twice at once
    writers = {
        split: packing.ShardWriter(job.folder() / f"{shard_name(part, split)}.{partial}", tokenizer)
        for split in ([part.split] if part.split else sources.SPLITS)
    }
    main = writers[main_split(part)].counts
    cut = False
    stream = _documents(job, part, lambda count: advance(count, 0))
    for document, ids in packing.tokenized(stream, tokenizer):
        writer = writers[job.source.split(part, document.name)]
        cut = bool(limit) and writer.counts is main and main.tokens + ids.size > limit
        if cut:
            break
        packing.count(writer.counts, document)
        if ids.size:
            writer.add(ids)
            advance(0, ids.size)
    counts = {split: writer.close() for split, writer in writers.items()}
    note = {
        "tokens": main.tokens,
        "limit": limit if cut else 0,
        "cut": cut,
        "counts": {split: dataclasses.asdict(count) for split, count in counts.items()},
        "shards": {
            split: _publish(job, part, split, writers[split])
            for split, count in counts.items()
            if count.records
        },
    }
    target = note_path(job, part)
    partial_note = target.with_name(f"{target.name}.{partial}")
    partial_note.write_text(json.dumps(note))
    partial_note.replace(target)
    for file in part.files:
        _local(job, file).unlink(missing_ok=True)
    return note


def _publish(
    job: Job, part: sources.Part, split: str, writer: packing.ShardWriter
) -> dict[str, Any]:
    target = job.folder() / shard_name(part, split)
    with writer.path.open("rb+") as file:
        os.fsync(file.fileno())
    writer.path.replace(target)
    return {
        "file": target.name,
        "tokens": writer.counts.tokens,
        "records": writer.counts.records,
        "size": target.stat().st_size,
        "sha256": hub.file_sha256(target),
    }


def _local(job: Job, file: sources.File) -> pathlib.Path:
    """Where a file of the hub is kept while it is read."""
    return job.folder() / file.name.replace("/", "--")


def _documents(
    job: Job, part: sources.Part, advance: Callable[[int], None]
) -> Iterator[documents.Document]:
    for file in part.files:
        if isinstance(file.where, hub.RemoteFile):
            path = _local(job, file)
            hub.download(file.where, path, advance)
        else:
            path = file.where
        stream = documents.read(path, file.name, job.source.column, job.source.id_column)
        try:
            yield from documents.count_bytes(stream, advance)
        except ValueError:
            if path != file.where:  # the next attempt must not find it again
                path.unlink()
            raise
