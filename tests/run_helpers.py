"""What the tests of runs share."""

import os
import pathlib
import signal

import jax

from deltares_jax import config as config_lib
from deltares_jax.training import checkpoint, loop, metrics


def train(config, folder, devices: int | None = 1):
    """Trains on that many devices; None: on those that the run finds itself."""
    given = None if devices is None else jax.devices()[:devices]
    return loop.train(config_lib.resolve(config), str(folder), devices=given)


def log(folder):
    """What the run made, without what the clock says: of its steps, and held out."""
    rows, held_out = metrics.read_rows(folder)
    clock = ("tokens_per_second", "seconds", "goodput")
    return {s: {k: v for k, v in r.items() if k not in clock} for s, r in rows.items()}, held_out


def losses(folder):
    return {step: row["loss"] for step, row in metrics.read_rows(folder)[0].items()}


def newest(folder: pathlib.Path):
    """The newest step of a run and what was saved beside its state; None for a new run."""
    reader = checkpoint.Checkpointer(folder)
    steps = reader.steps()
    return (steps[-1], reader.read_meta(steps[-1])) if steps else None


def saved(folder):
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


def stop_at(patch, step: int) -> None:
    """This process gets SIGTERM when a step's numbers are read."""
    real = metrics.Progress.update

    def update(progress, row, number, seconds):
        real(progress, row, number, seconds)
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(metrics.Progress, "update", update)
