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

Runner = Callable[[parts.Job, Sequence[sources.Part], progress.Progress], None]


def here(job: parts.Job, todo: Sequence[sources.Part], shown: progress.Progress) -> None:
    """Works on one part after the other in this process."""
    for part in todo:
        if not _enough(job, part):
            parts.work(job, part, job.limit(parts.main_split(part)), shown.advance)


def _enough(job: parts.Job, part: sources.Part) -> bool:
    """Whether the parts before one already hold all the tokens that are asked for."""
    if not job.max_tokens:
        return False
    left = job.limit(parts.main_split(part))
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


def _work_in_pool(job: parts.Job, part: sources.Part) -> None:
    def advance(source_bytes: int, made: int) -> None:
        with _counters.get_lock():
            _counters[0] += source_bytes
            _counters[1] += made

    parts.work(job, part, job.limit(parts.main_split(part)), advance)


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
