"""Prepares data sets: parts of a source to shards, then all of them as one TFDS data set.

The folder holds array_record shards that TFDS reads without TensorFlow, a `manifest.json` that is
written last, `plan.json` (what was asked for), a copy of the tokenizer, and a note per part. It is
the same byte for byte however often the work was killed, and for any number of workers.
"""

import contextlib
import fcntl
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow_datasets as tfds

from deltares_jax.data import hub, packing, parts, progress, runners, sources, tokens
from deltares_jax.data import manifest as manifest_lib

PLAN = "plan.json"
_KEPT = "kept.json"  # numbers of the parts that count, among their notes


def prepare(
    source: sources.Source,
    tokenizer: tokens.Tokenizer,
    out: pathlib.Path,
    max_tokens: int = 0,
    runner: runners.Runner = runners.here,
) -> dict[str, Any]:
    """Prepares a source in a folder, going on with what is there; returns the manifest.

    Args:
      source: what to read.
      tokenizer: how to cut it into tokens.
      out: folder of the data set.
      max_tokens: whole documents are taken while the training text stays within it, and held-out
        files within a hundredth of it (but 2^20 tokens, if it is not less); 0: all.
      runner: does the work on the parts.

    Raises:
      ValueError: bad input, a folder that cannot be written or holds something else, or a source
        without text.
    """
    header = {
        "source": source.name,
        "revision": source.revision,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "max_tokens": max_tokens,
    }
    job = parts.Job(out, source, header, max_tokens)
    _holds_nothing_else(out)
    with _locked(out):
        for partial in out.rglob("*.partial"):  # of work that was killed
            partial.unlink()
        _same_plan(out, header, source)
        made = manifest_lib.read(out)
        if made is not None and not _faults(out, made):
            return made
        _undo(job)
        tokenizer.save(out)
        progress.note(f"preparing {source.name} under {out}", *source.notes)
        with contextlib.closing(_progress(job)) as shown:
            runner(job, source.parts, shown)
            kept = _settle(job, shown)
        return _finish(job, header, kept, tokenizer)


def _progress(job: parts.Job) -> progress.Progress:
    """Of the parts that are not done yet: what an earlier run did tells nothing of the rate."""
    notes = {part: parts.read_note(job, part) for part in job.source.parts}
    left = [part for part, note in notes.items() if note is None]
    made = sum(note["tokens"] for note in notes.values() if note)
    if len(left) < len(notes):
        progress.note(f"{len(notes) - len(left)} of {len(notes)} parts were done before")
    total = sum(map(parts.source_bytes, left))
    return progress.Progress(total, max(1, job.max_tokens - made) if job.max_tokens else 0)


def _holds_nothing_else(out: pathlib.Path) -> None:
    """Refuses a folder of somebody's own files."""
    if out.is_dir() and not (out / PLAN).exists():
        others = {path.name for path in out.iterdir() if path.suffix != ".partial"}
        others -= {".lock", parts.FOLDER}
        if others:
            raise ValueError(
                f"{out} holds other files ({sorted(others)[0]}); give a new folder to prepare in"
            )


@contextlib.contextmanager
def _locked(out: pathlib.Path) -> Iterator[None]:
    """Lets one process of this machine at a time work on a folder, which is made if need be."""
    try:
        (out / parts.FOLDER).mkdir(parents=True, exist_ok=True)
        file = (out / ".lock").open("a")
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f"waiting for another process that prepares {out}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield  # the file stays: whoever waits for it must not be alone with it


def _same_plan(out: pathlib.Path, header: dict[str, Any], source: sources.Source) -> None:
    """Refuses to mix two data sets in one folder."""
    files = [
        [part.number, file.name, file.size, *([w.sha256] if isinstance(w, hub.RemoteFile) else [])]
        for part in source.parts
        for file in part.files
        for w in [file.where]
    ]
    plan = {**header, "column": source.column, "files": files}
    path = out / PLAN
    begun = (out / manifest_lib.MANIFEST).exists() or any((out / parts.FOLDER).glob("*.json"))
    if not path.exists() or not begun:  # a plan that failed at once may be mended
        manifest_lib.write_json(path, plan)
        return
    try:
        before = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); prepare in another folder, or remove {out}"
        ) from None
    for key, value in plan.items():
        if before.get(key) != value:
            told = f"another {key} ({before.get(key)!r} there, {value!r} asked for)"
            raise ValueError(
                f"{out} was begun with {'other files' if key == 'files' else told}; prepare in "
                "another folder, or remove it"
            )


def _faults(out: pathlib.Path, manifest: dict[str, Any]) -> list[str]:
    """Lines on shards that are missing or damaged, by their checksums."""
    shards = [shard for split in manifest["shards"].values() for shard in split]
    faults = [fault for s in shards if (fault := parts.shard_fault(out / s["file"], s))]
    missing = [n for n in ("dataset_info.json", "features.json") if not (out / n).is_file()]
    faults += [f"{out / name} is missing" for name in missing]
    progress.note(*faults)
    return faults


def _final_names(job: parts.Job, kept: Sequence[sources.Part]) -> dict[str, tuple[str, str]]:
    """{name of a shard among the parts: (split, its name in the data set)}, in order."""
    names = {}
    data_set = job.source.name.partition("/")[0]
    for split in sources.SPLITS:
        has = [p for p in kept if split in (parts.read_note(job, p) or {"shards": {}})["shards"]]
        for i, part in enumerate(has):
            final = f"{data_set}-{split}.array_record-{i:05}-of-{len(has):05}"
            names[parts.shard_name(part, split)] = (split, final)
    return names


def _undo(job: parts.Job) -> None:
    """Takes a data set apart again whose completion was interrupted, or that is damaged."""
    (job.out / manifest_lib.MANIFEST).unlink(missing_ok=True)
    kept = job.folder() / _KEPT
    numbers = parts.read_json(kept) if kept.exists() else []
    chosen = [part for part in job.source.parts if part.number in numbers]
    for name, (_, final) in _final_names(job, chosen).items():
        if (job.out / final).exists():
            (job.out / final).replace(job.folder() / name)


def _settle(job: parts.Job, shown: progress.Progress) -> list[sources.Part]:
    """The parts that count; the last of each split is cut to what the ones before leave it."""
    if not job.max_tokens:
        return list(job.source.parts)
    kept = []
    left = {split: job.limit(split) for split in sources.SPLITS}
    for part in job.source.parts:
        split = parts.main_split(part)
        if left[split] <= 0:
            continue
        note = parts.read_note(job, part)
        if note is None or not parts.fits(note, left[split]):
            note = parts.work(job, part, left[split], shown.advance)
        kept.append(part)
        left[split] = 0 if note["cut"] else left[split] - note["tokens"]
    return kept


def _note(job: parts.Job, part: sources.Part) -> dict[str, Any]:
    note = parts.read_note(job, part)
    if note is None:
        raise ValueError(
            f"{job.folder()} lacks what came of {part.files[0].name}; every worker must see that "
            "folder, then give the command again"
        )
    return note


def _finish(
    job: parts.Job,
    header: dict[str, Any],
    kept: Sequence[sources.Part],
    tokenizer: tokens.Tokenizer,
) -> dict[str, Any]:
    """Records the shards with TFDS and in the manifest."""
    notes = [_note(job, part) for part in kept]
    listed = sum(len(part.files) for part in job.source.parts)
    read = sum(parts.files_read(part, note) for part, note in zip(kept, notes, strict=True))
    cut = [
        part.files[0].name
        for part, note in zip(kept, notes, strict=True)
        if note["cut"] and len(part.files) == 1
    ]
    header = {**header, "files_listed": listed, "files_read": read, "files_in_part": cut}
    if not any(note["shards"] for note in notes):
        limit = f" within --max_tokens={job.max_tokens}" if job.max_tokens else ""
        skipped = sum(c["skipped_documents"] for note in notes for c in note["counts"].values())
        raise ValueError(
            f"{job.source.name}: {listed} files hold no text{limit}; {skipped} records without "
            f"text in {job.source.column!r} were skipped"
        )
    kept_file = job.folder() / _KEPT
    manifest_lib.write_json(kept_file, [part.number for part in kept])
    names = _final_names(job, kept)
    by_name = {shard["file"]: shard for note in notes for shard in note["shards"].values()}
    shards: dict[str, list[dict[str, Any]]] = {}
    for name, (split, final) in names.items():
        shards.setdefault(split, []).append({**by_name[name], "file": final})
        (job.folder() / name).replace(job.out / final)
    wanted = {kept_file.name, *(parts.note_path(job, part).name for part in kept)}
    for stray in job.folder().iterdir():  # of parts beyond max_tokens, or of work that was killed
        if stray.name not in wanted:
            stray.unlink()
    _record(job, shards, tokenizer.vocab_size)
    made = manifest_lib.make(header, notes, shards)
    manifest_lib.write_json(job.out / manifest_lib.MANIFEST, made)
    return made


def _record(job: parts.Job, shards: dict[str, list[dict[str, Any]]], vocab_size: int) -> None:
    infos = []
    for split, rows in shards.items():
        template = tfds.core.ShardedFileTemplate(
            data_dir=job.out,
            dataset_name=job.source.name.partition("/")[0],
            split=split,
            filetype_suffix="array_record",
        )
        infos.append(
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=[row["records"] for row in rows],
                num_bytes=sum(row["size"] for row in rows),
                filename_template=template,
            )
        )
    tfds.folder_dataset.write_metadata(
        data_dir=str(job.out),
        features=packing.features(vocab_size),
        split_infos=infos,
        version="1.0.0",
        check_data=False,
    )
