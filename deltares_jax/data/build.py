"""Prepares data sets: parts of a source to shards, then all of them as one TFDS data set.

The folder holds array_record shards that TFDS reads without TensorFlow, a `manifest.json` that is
written last, `plan.json` (what was asked for), a copy of the tokenizer, and a note per part. It is
the same byte for byte however often the work was killed, and for any number of workers.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow_datasets as tfds

from deltares_jax.data import manifest as manifest_lib
from deltares_jax.data import packing, parts, progress, sources, tokens

PLAN = "plan.json"
Runner = Callable[[parts.Job, Sequence[sources.Part], progress.Progress], None]


def prepare(
    source: sources.Source,
    tokenizer: tokens.Tokenizer,
    out: pathlib.Path,
    max_tokens: int = 0,
    runner: Runner | None = None,
) -> dict[str, Any]:
    """Prepares a source in a folder, going on with what is there; returns the manifest.

    Args:
      source: what to read.
      tokenizer: how to cut it into tokens.
      out: folder of the data set.
      max_tokens: whole documents are taken while each split stays within it; 0: all.
      runner: does the work on parts; in this process when None.

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
    with _locked(out):
        _same_plan(out, header, source)
        made = manifest_lib.read(out)
        if made is not None and not _faults(out, made):
            return made
        _undo(job)
        tokenizer.save(out)
        progress.note(f"preparing {source.name} under {out}", *source.notes)
        total = sum(map(parts.source_bytes, source.parts))
        with contextlib.closing(progress.Progress(total, max_tokens)) as shown:
            (runner or here)(job, source.parts, shown)
            kept = _settle(job, shown)
        return _finish(job, header, kept, tokenizer)


@contextlib.contextmanager
def _locked(out: pathlib.Path) -> Iterator[None]:
    """Lets one process of this machine at a time work on a folder, which is made if need be."""
    try:
        (out / parts.FOLDER).mkdir(parents=True, exist_ok=True)
        lock = out / ".lock"
        file = lock.open("a")
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror}") from None
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        lock.unlink(missing_ok=True)


def _same_plan(out: pathlib.Path, header: dict[str, Any], source: sources.Source) -> None:
    """Refuses to mix two data sets in one folder."""
    files = [[part.number, file.name, file.size] for part in source.parts for file in part.files]
    plan = {**header, "column": source.column, "files": files}
    path = out / PLAN
    if not path.exists():
        others = {p.name for p in out.iterdir()} - {".lock", parts.FOLDER}
        if others:
            raise ValueError(
                f"{out} holds other files ({sorted(others)[0]}); give a new folder to prepare in"
            )
        manifest_lib.write_json(path, plan)
        return
    before = json.loads(path.read_text())
    for key, value in plan.items():
        if before.get(key) != value:
            told = "" if key == "files" else f" ({before.get(key)!r} there, {value!r} asked for)"
            raise ValueError(
                f"{out} was begun with another {key}{told}; prepare in another folder, or remove it"
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
    kept = job.out / parts.FOLDER / "kept.json"
    numbers = json.loads(kept.read_text()) if kept.exists() else []
    chosen = [part for part in job.source.parts if part.number in numbers]
    for name, (_, final) in _final_names(job, chosen).items():
        if (job.out / final).exists():
            (job.out / final).replace(job.folder() / name)
    for partial in job.out.rglob("*.partial"):
        partial.unlink()


def here(job: parts.Job, todo: Sequence[sources.Part], shown: progress.Progress) -> None:
    """Works on one part after the other in this process."""
    for part in todo:
        if not _enough(job, part):
            parts.work(job, part, job.limit, shown.advance)


def _enough(job: parts.Job, part: sources.Part) -> bool:
    """Whether the parts before one already hold all the tokens that are asked for."""
    if not job.limit:
        return False
    left = job.limit
    for other in job.source.parts:
        if other.number >= part.number:
            return False
        if parts.main_split(other) != parts.main_split(part):
            continue
        note = parts.read_note(job, other)
        if note is None:
            return False
        left -= note["tokens"]
        if left <= 0 or note["cut"]:
            return True
    return False


def pool(workers: int) -> Runner:
    """Works on several parts at once, in processes; the cores are shared out among them."""

    def run(job: parts.Job, todo: Sequence[sources.Part], shown: progress.Progress) -> None:
        count = min(workers, len(todo))
        threads = max(1, workers // count)
        if count == 1:
            _threads(threads)
            return here(job, todo, shown)
        context = multiprocessing.get_context("spawn")
        counters = context.Array("q", 2)
        executor = concurrent.futures.ProcessPoolExecutor(
            count, context, initializer=_start_worker, initargs=(counters, threads)
        )
        waiting = list(todo)
        running: set[concurrent.futures.Future[None]] = set()
        try:
            while waiting or running:
                while waiting and len(running) < count:
                    part = waiting.pop(0)
                    if not _enough(job, part):
                        running.add(executor.submit(_work_in_pool, job, part))
                done, running = concurrent.futures.wait(
                    running, 0.5, concurrent.futures.FIRST_COMPLETED
                )
                shown.set(counters[0], counters[1])
                for future in done:
                    future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise ValueError(
                "a worker was killed (out of memory?); give the command again, with fewer --workers"
            ) from None
        finally:
            if running:
                for child in multiprocessing.active_children():
                    child.terminate()
            executor.shutdown(cancel_futures=True)
        return None

    return run


_counters: Any = None


def _threads(count: int) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(count)  # of the tokenizers library


def _start_worker(counters: Any, threads: int) -> None:
    global _counters
    _counters = counters
    _threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, too, and ends us

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        multiprocessing.connection.wait([parent.sentinel])  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work_in_pool(job: parts.Job, part: sources.Part) -> None:
    def advance(source_bytes: int, made: int) -> None:
        with _counters.get_lock():
            _counters[0] += source_bytes
            _counters[1] += made

    parts.work(job, part, job.limit, advance)


def beam(runner: str, options: Sequence[str]) -> Runner:
    """Works on the parts as a Beam pipeline; its workers must see the output folder."""
    try:
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError:
        raise ValueError("--beam_runner needs Beam: pip install 'deltares-jax[beam]'") from None

    def run(job: parts.Job, todo: Sequence[sources.Part], shown: progress.Progress) -> None:
        work = functools.partial(_work_in_beam, job)
        with apache_beam.Pipeline(runner=runner, options=PipelineOptions(options)) as pipeline:
            created = pipeline | apache_beam.Create(todo) | apache_beam.Reshuffle()
            _ = created | apache_beam.Map(work)

    return run


def _work_in_beam(job: parts.Job, part: sources.Part) -> None:
    parts.work(job, part, job.limit, lambda source_bytes, made: None)


def _settle(job: parts.Job, shown: progress.Progress) -> list[sources.Part]:
    """The parts that count; the last of each split is cut to what the ones before leave it."""
    if not job.limit:
        return list(job.source.parts)
    kept = []
    left = dict.fromkeys(sources.SPLITS, job.limit)
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


def _finish(
    job: parts.Job,
    header: dict[str, Any],
    kept: Sequence[sources.Part],
    tokenizer: tokens.Tokenizer,
) -> dict[str, Any]:
    """Records the shards with TFDS and in the manifest."""
    notes = [note for part in kept if (note := parts.read_note(job, part))]
    listed = sum(len(part.files) for part in job.source.parts)
    header = {**header, "files_read": sum(len(p.files) for p in kept), "files_listed": listed}
    if not any(note["shards"] for note in notes):
        limit = f" within --max_tokens={job.limit}" if job.limit else ""
        skipped = sum(c["skipped_documents"] for note in notes for c in note["counts"].values())
        raise ValueError(
            f"{job.source.name}: {listed} files hold no text{limit}; {skipped} records without text "
            f"in {job.source.column!r} were skipped"
        )
    manifest_lib.write_json(job.folder() / "kept.json", [part.number for part in kept])
    names = _final_names(job, kept)
    by_name = {shard["file"]: shard for note in notes for shard in note["shards"].values()}
    shards: dict[str, list[dict[str, Any]]] = {}
    for name, (split, final) in names.items():
        shards.setdefault(split, []).append({**by_name[name], "file": final})
        (job.folder() / name).replace(job.out / final)
    for part in set(job.source.parts) - set(kept):  # beyond max_tokens
        for stray in job.folder().glob(f"{part.number:05}*"):
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
