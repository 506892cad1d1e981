"""What a run reports: metrics.jsonl, TensorBoard, W&B, and the progress line."""

import importlib.util
import json
import pathlib
import secrets
import sys
import time
from typing import Any

from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.printing import human_count, human_time, one_line, say
from deltares_jax.training import workdir as workdir_lib

_LINES = 10  # progress lines of a run whose output is no terminal


def read_rows(workdir: pathlib.Path) -> tuple[dict[int, Any], dict[int, Any]]:
    """Training and evaluation rows of a run by step; of a step that ran twice the last row counts.

    A last line that was cut off by a crash is left out.
    """
    train: dict[int, Any] = {}
    held_out: dict[int, Any] = {}
    path = workdir / workdir_lib.METRICS
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and "step" in row:
            (held_out if "eval_loss" in row else train)[row["step"]] = row
    return train, held_out


def check(config: FrozenConfigDict) -> None:
    """Refuses `metrics.wandb` where wandb is not installed."""
    if not config.metrics.wandb:
        return
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # without an origin: a folder of that name
        raise ValueError("metrics.wandb=True needs wandb: pip install 'deltares-jax[wandb]'")


class Writer:
    """Writes rows of one step to metrics.jsonl and to the other places that are switched on.

    Args:
      workdir: of the run.
      config: the resolved config.
      on: whether it writes at all; one process of a run does.
    """

    def __init__(self, workdir: pathlib.Path, config: Any, on: bool = True):
        self._file = self._tensorboard = self._wandb = None
        if not on:
            return
        path = workdir / workdir_lib.METRICS
        cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
        self._file = path.open("a", buffering=1)
        if cut:  # by a crash: what follows must start on a line of its own
            self._file.write("\n")
        if config.metrics.tensorboard:
            from tensorboardX import SummaryWriter

            self._tensorboard = SummaryWriter(str(workdir / "tensorboard"))
        if config.metrics.wandb:
            self._wandb = _begin_wandb(workdir, config)

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Writes one row; the values are plain numbers, None for one that is not finite."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        if self._tensorboard:
            for name, value in row.items():
                if value is not None:
                    self._tensorboard.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(row, step=step)

    def close(self) -> None:
        """Flushes and closes all of them."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def _begin_wandb(workdir: pathlib.Path, config: Any) -> Any:
    import wandb

    settings = {"id": _wandb_id(workdir), "resume": "allow", "config": config.to_dict()}
    try:
        return wandb.init(project="deltares_jax", dir=str(workdir), **settings)
    except Exception as error:  # of many types: no key, no network, settings
        raise ValueError(
            f"metrics.wandb=True: W&B cannot begin ({one_line(error)}); log in by `wandb login`, "
            "or set WANDB_MODE=offline"
        ) from error


def _wandb_id(workdir: pathlib.Path) -> str:
    """The id under which a run goes on after a restart; kept in its folder."""
    path = workdir / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


class Progress:
    """The live line of a terminal; elsewhere about ten lines in all."""

    def __init__(self, first_step: int, steps: int):
        self._first, self._steps = first_step, steps
        self._live = sys.stdout.isatty()
        self._drawn = 0.0
        self._width = 0

    def update(self, row: dict[str, Any], step: int, step_seconds: float) -> None:
        """Shows the row of a step; `step_seconds` is the mean so far."""
        every = max(1, (self._steps - self._first) // _LINES)
        due = step in (self._first + 1, self._steps) or (step - self._first) % every == 0
        if self._live:
            due = due or time.perf_counter() - self._drawn > 0.2
        if not due:
            return
        self._drawn = time.perf_counter()
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
        left = human_time((self._steps - step) * step_seconds)
        text = (
            f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss}  "
            f"lr {row['learning_rate']:.2e}  "
            f"{human_count(row['tokens_per_second'])} tokens/s  {left} left"
        )
        if self._live:
            say(f"\r{text:<{self._width}}", end="")
            self._width = len(text)
        else:
            say(text)

    def note(self, text: str) -> None:
        """Prints a line of its own, clear of the live line."""
        self.close()
        say(text)

    def close(self) -> None:
        """Ends the live line."""
        if self._width:
            say("")
            self._width = 0
