"""Who does the work on the parts: this process, several, or a Beam pipeline."""

import concurrent.futures
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from deltares_jax.data import parts, progress, sources

# Tokens that a byte of any input gives at least; so few more files are begun than are needed.
_GUESS = 1 / 8
_Done = dict[int, dict[str, Any]]  # notes by the number of the part
Runner = Callable[[parts.Job, Sequence[sources.Part], progress.Progress], None]


def here(job: parts.Job, todo: Sequence[sources.Part], shown: progress.Progress) -> None:
    """Works on one part after the other in this process."""
    done: _Done = {}
    for part in todo:
        limit = _limit(job, part, done)
        if limit is not None:
            parts.work(job, part, limit, shown.advance)


def _limit(
    job: parts.Job, part: sources.Part, done: _Done, tokens_per_byte: float = 0
) -> int | None:
    """How many tokens a part may give after the parts before it; 0 is no limit.

    None where they give all that are wanted. Parts that are not done count by their size; the notes
    of those that are go into `done`.
    """
    if not job.max_tokens:
        return 0
    split = parts.main_split(part)
    left = job.limit(split)
    for other in job.source.parts[: part.number]:
        if parts.main_split(other) == split:
            if other.number not in done and (note := parts.read_note(job, other)):
                done[other.number] = note
            size = sum(file.size for file in other.files)
            guess = {"tokens": int(size * tokens_per_byte), "cut": False}
            note = done.get(other.number, guess)
            left -= note["tokens"]
            if left <= 0 or note["cut"]:
                return None
    return left


def pool(workers: int) -> Runner:
    """Works on several parts at once, in processes; the cores are shared out among them."""

    def run(job: parts.Job, todo: Sequence[sources.Part], shown: progress.Progress) -> None:
        done: _Done = {}
        count = min(workers, sum(_limit(job, part, done, _GUESS) is not None for part in todo))
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
                wanted = [p for p in waiting if _limit(job, p, done, _GUESS) is not None]
                if not wanted and not running:
                    break
                for part in wanted[: count - len(running)]:
                    waiting.remove(part)
                    limit = _limit(job, part, done) or 0
                    running.add(executor.submit(_work_in_pool, job, part, limit))
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, too, and ends us

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        multiprocessing.connection.wait([parent.sentinel])  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work_in_pool(job: parts.Job, part: sources.Part, limit: int) -> None:
    def advance(source_bytes: int, made: int) -> None:
        with _counters.get_lock():
            _counters[0] += source_bytes
            _counters[1] += made

    parts.work(job, part, limit, advance)


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
    limit = job.limit(parts.main_split(part))
    parts.work(job, part, limit, lambda source_bytes, made: None)
