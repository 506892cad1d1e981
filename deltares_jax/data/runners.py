"""Who does the work on the parts: this process, several, or a Beam pipeline."""

import concurrent.futures
import functools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from deltares_jax.data import parts, processes, progress, sources

# Tokens that a byte of any input gives at least; so few more files are begun than are needed.
_GUESS = 1 / 8
_Done = dict[int, dict[str, Any]]  # notes by the number of the part
Runner = Callable[[parts.Job, Sequence[sources.Part], progress.Progress], None]


def here(job: parts.Job, todo: Sequence[sources.Part], shown: progress.Progress) -> None:
    """Works on one part after the other in this process."""
    done: _Done = {}
    for part in todo:
        limit = _limits(job, done).get(part.number)
        if limit is not None:
            parts.work(job, part, limit, shown.advance)


def _limits(job: parts.Job, done: _Done, tokens_per_byte: float = 0) -> dict[int, int]:
    """How many tokens each part may give after the parts before it; 0 is no limit.

    Without the parts that come after all tokens that are wanted. Parts that are not done count by
    their size; the notes of those that are go into `done`.
    """
    if not job.max_tokens:
        return {part.number: 0 for part in job.source.parts}
    limits = {}
    left = {split: job.limit(split) for split in sources.SPLITS}
    for part in job.source.parts:
        split = parts.main_split(part)
        if left[split] <= 0:
            continue
        limits[part.number] = left[split]
        if part.number not in done and (note := parts.read_note(job, part)):
            done[part.number] = note
        size = sum(file.size for file in part.files)
        guess = {"tokens": int(size * tokens_per_byte), "cut": False}
        note = done.get(part.number, guess)
        left[split] = 0 if note["cut"] else left[split] - note["tokens"]
    return limits


def pool(workers: int) -> Runner:
    """Works on several parts at once, in processes; the cores are shared out among them."""

    def run(job: parts.Job, todo: Sequence[sources.Part], shown: progress.Progress) -> None:
        done: _Done = {}
        count = min(workers, len(_limits(job, done, _GUESS)))
        if count == 1:
            return here(job, todo, shown)
        threads = max(1, workers // count)
        context = multiprocessing.get_context("spawn")
        counters = context.Array("q", 2)
        executor = concurrent.futures.ProcessPoolExecutor(
            count, context, initializer=_start_worker, initargs=(counters, threads)
        )
        waiting = list(todo)
        running: set[concurrent.futures.Future[None]] = set()
        try:
            while True:
                needed = _limits(job, done, _GUESS)
                wanted = [part for part in waiting if part.number in needed]
                if not wanted and not running:
                    break
                limits = _limits(job, done)
                for part in wanted[: count - len(running)]:
                    waiting.remove(part)
                    if part.number in limits:  # no part before it has just given all
                        running.add(executor.submit(_work_in_pool, job, part, limits[part.number]))
                ended, running = concurrent.futures.wait(
                    running, 0.5, concurrent.futures.FIRST_COMPLETED
                )
                shown.set(counters[0], counters[1])
                for future in ended:
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


def set_threads(count: int) -> None:
    """Sets how many cores the tokenizers library uses; it asks once, before its first work."""
    os.environ["RAYON_NUM_THREADS"] = str(count)


def _start_worker(counters: Any, threads: int) -> None:
    global _counters
    _counters = counters
    set_threads(threads)
    processes.end_with_parent()


def _work_in_pool(job: parts.Job, part: sources.Part, limit: int) -> None:
    def advance(source_bytes: int, made: int) -> None:
        with _counters.get_lock():
            _counters[0] += source_bytes
            _counters[1] += made

    parts.work(job, part, limit, advance)


def beam(runner: str, options: Sequence[str]) -> Runner:
    """Works on the parts as a Beam pipeline; its workers must see the output folder."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # the import tells of clients that are not there
    try:
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions

        given = PipelineOptions(options)
        unknown = set(given.get_all_options(drop_default=True, retain_unknown_options=True))
        unknown -= set(given.get_all_options(drop_default=True))
        unknown |= {option for option in options if not option.startswith("--")}
    except ImportError:
        raise ValueError("--beam_runner needs Beam: pip install 'deltares-jax[beam]'") from None
    finally:
        logging.set_verbosity(verbosity)
    if unknown:
        raise ValueError(f"--beam_options: Beam knows no {', '.join(sorted(unknown))}")

    def run(job: parts.Job, todo: Sequence[sources.Part], shown: progress.Progress) -> None:
        work = functools.partial(_work_in_beam, job)
        with apache_beam.Pipeline(runner=runner, options=given) as pipeline:
            created = pipeline | apache_beam.Create(todo) | apache_beam.Reshuffle()
            _ = created | "prepare" >> apache_beam.Map(work)  # else errors quote the whole job

    return run


def _work_in_beam(job: parts.Job, part: sources.Part) -> None:
    limit = job.limit(parts.main_split(part))
    parts.work(job, part, limit, lambda source_bytes, made: None)
