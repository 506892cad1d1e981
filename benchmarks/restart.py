"""Stops a debug run at random moments and compares it with one that was left alone.

    python benchmarks/restart.py --stops=20 --seed=0

Each stop is kill -9 or SIGTERM, by chance while it starts and compiles, or after some steps. After
each the loss, learning rate and gradient norm of every step, every held-out loss and a hash of
every batch must be those of the uninterrupted run, to the last digit; else the exit code is 1.
Flags that are not known here go to the train command, for example --config.model.width=32.

    python benchmarks/restart.py --times=5 --config.model.width=512

How long a run stands still, on a warm compile cache: from kill -9 to the first step after the
restart, so many times, and how long a save holds up the steps.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from deltares_jax.training import checkpoint

STEPS = 60
ARGUMENTS = [
    "--config=configs/debug.py",
    f"--config.train.steps={STEPS}",
    "--config.train.accumulation=2",
    "--config.checkpoint.every=7",
    "--config.eval.every=10",
]

# The train command, which also writes down what every step was given.
RECORDED = """
import hashlib, os
from deltares_jax import command, train
from deltares_jax.data import pipeline

real = pipeline.train_batches

def recorded(rows, order, size, seen, *rest):
    with open(os.environ["BATCHES"], "a", buffering=1) as file:
        for number, batch in enumerate(real(rows, order, size, seen, *rest), seen // size + 1):
            digest = hashlib.sha256(b"".join(batch[k].tobytes() for k in sorted(batch)))
            file.write(f"{number} {digest.hexdigest()}\\n")
            yield batch

pipeline.train_batches = recorded
command.define_config_flag()
command.run(train.main, train.__doc__)
"""


def start(folder: pathlib.Path, more: list[str]) -> subprocess.Popen:
    env = {**os.environ, "BATCHES": str(folder / "batches")}
    log = (folder / "log").open("a")
    line = [sys.executable, "-c", RECORDED, *ARGUMENTS, f"--workdir={folder}/run", *more]
    return subprocess.Popen(line, stdout=log, stderr=log, env=env)


def lines(path: pathlib.Path) -> list[str]:
    """Whole lines of a file that may be growing."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def numbers(folder: pathlib.Path) -> dict[str, dict[int, object]]:
    """By step: what was trained, what was held out, which batch it was."""
    found: dict[str, dict[int, object]] = {"train": {}, "held out": {}, "batch": {}}
    for line in lines(folder / "run" / "metrics.jsonl"):
        if not line.endswith("}"):  # cut off by kill -9
            continue
        row = json.loads(line)
        if "eval_loss" in row:
            found["held out"][row["step"]] = row
        else:
            names = ("loss", "learning_rate", "grad_norm", "tokens_seen")
            found["train"][row["step"]] = [row[name] for name in names]
    for line in lines(folder / "batches"):
        number, digest = line.split()
        found["batch"][int(number)] = digest
    return found


def differences(folder: pathlib.Path, straight: dict[str, dict[int, object]]) -> list[str]:
    return [
        f"{kind} of step {step}"
        for kind, values in numbers(folder).items()
        for step, value in values.items()
        if value != straight[kind].get(step) and step <= STEPS
    ]


def steps_made(folder: pathlib.Path) -> int:
    return max(numbers(folder)["train"], default=0)


def checkpoints(folder: pathlib.Path) -> list[int]:
    there = (folder / "run" / "checkpoints").glob("*")
    return sorted(int(path.name) for path in there if path.name.isdigit())


def stop_somewhere(
    folder: pathlib.Path, more: list[str], chance: random.Random, whole: float
) -> tuple[str, int]:
    """Starts the run and stops it; the signal, and the exit code (0: it was done before)."""
    name = chance.choice(["SIGKILL", "SIGTERM"])
    early, before = chance.random() < 0.25, steps_made(folder)
    process = start(folder, more)
    if early:  # while it starts and compiles
        time.sleep(chance.uniform(0, whole / 2))
    else:
        target = before + chance.randint(1, STEPS // 3)
        while steps_made(folder) < target and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
    process.send_signal(getattr(signal, name))
    return name, process.wait()


def standstill(folder: pathlib.Path, more: list[str], stops: int) -> str:
    """Seconds from kill -9 to the next step, and those that a save takes from the steps."""
    log, waits = folder / "run" / "metrics.jsonl", []
    process = start(folder, more)
    for _ in range(stops):
        before = len(lines(log))
        while len(lines(log)) < before + 5:
            time.sleep(0.01)
            assert process.poll() is None, (folder / "log").read_text()
        process.kill()
        process.wait()
        began, before = time.monotonic(), len(lines(log))
        process = start(folder, more)
        while len(lines(log)) <= before:
            time.sleep(0.01)
            assert process.poll() is None, (folder / "log").read_text()
        waits.append(time.monotonic() - began)
    process.wait()
    (folder / "whole").mkdir()
    start(folder / "whole", [*more, "--config.checkpoint.keep=100"]).wait()
    run, steps = folder / "whole" / "run", checkpoints(folder / "whole")
    spent = checkpoint.Checkpointer(run).read_meta(steps[-1])["clock"]["save"]
    files = (run / "checkpoints" / str(steps[-1])).rglob("*")
    size = sum(path.stat().st_size for path in files if path.is_file())
    return (
        f"from kill -9 to the next step: median {statistics.median(waits):.1f} s of {stops} "
        f"({min(waits):.1f} to {max(waits):.1f})\n"
        f"a save of {size / 1e6:.1f} MB holds up the steps for "
        f"{1e3 * spent / (len(steps) - 1):.0f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=0, help="so many restarts are timed")
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options, more = parser.parse_known_args()
    chance = random.Random(options.seed)
    root = pathlib.Path(tempfile.mkdtemp())
    (root / "straight").mkdir()
    began = time.monotonic()
    if start(root / "straight", more).wait():
        print((root / "straight" / "log").read_text())
        return 1
    if options.times:
        (root / "stops").mkdir()
        print(standstill(root / "stops", more, options.times))
        return 0
    whole = time.monotonic() - began
    straight = numbers(root / "straight")
    assert sorted(straight["train"]) == list(range(1, STEPS + 1))
    assert sorted(straight["held out"]) == list(range(10, STEPS + 1, 10))

    wrong, stops, runs = [], 0, 0
    print("| run | signal | exit | steps made | goes on after | equal |\n|---|---|---|---|---|---|")
    while stops < options.stops:
        runs += 1
        folder = root / str(runs)
        folder.mkdir()
        code = -1
        while code and stops < options.stops:
            name, code = stop_somewhere(folder, more, chance, whole)
            if code == 0:
                break
            stops += 1
            bad = differences(folder, straight)
            # Before it listens to signals, SIGTERM ends it as any process.
            if code not in ((-9,) if name == "SIGKILL" else (143, 144, -15)):
                bad.append(f"exit code {code}")
            wrong += bad
            print(
                f"| {runs} | {name} | {code} | {steps_made(folder)} | "
                f"{(checkpoints(folder) or [0])[-1]} | {'no: ' + bad[0] if bad else 'yes'} |",
                flush=True,
            )
        if code:
            code = start(folder, more).wait()
        if code or numbers(folder) != straight:
            wrong += [*differences(folder, straight), f"the end of run {runs} (exit code {code})"]
    result = "; ".join(wrong) + " differ" if wrong else "all equal"
    counts = [len(straight[kind]) for kind in ("train", "held out", "batch")]
    print(f"\n{stops} stops in {runs} runs of", end=" ")
    print("{} steps, {} evaluations and {} batches: {}".format(*counts, result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
