"""The held-out loss of a run."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from deltares_jax.data import pipeline
from deltares_jax.data.dataset import Data
from deltares_jax.training.programs import Programs


def evaluate(
    programs: Programs, params: Any, data: Data, config: Any, stopped: Callable[[], bool]
) -> tuple[dict[str, float], list[str]] | None:
    """Sum of losses over count of targets of every set, on the same rows each time.

    Args:
      programs: the compiled steps.
      params: of the model.
      data: its evaluation sets.
      config: `config.eval`.
      stopped: whether to leave it unfinished, the same on every process.

    Returns:
      A row of numbers, and lines to print; None when it was left.
    """
    place = programs.place
    row: dict[str, float] = {}
    notes = []
    for name, rows in data.eval_sets.items():
        count = min(config.rows, len(rows))
        total, waiting = np.zeros(2), None
        for batch in pipeline.eval_batches(rows, count, config.batch_size, *place):
            running = programs.evaluate(params, programs.put(batch))
            if waiting is not None:  # the device has the next one while this is read
                total += np.asarray(jax.device_get(waiting), np.float64)
            waiting = running
            if stopped():
                return None
        total += np.asarray(jax.device_get(waiting), np.float64)
        mean = float(total[0] / total[1])
        suffix = f"/{name}" if row else ""  # the first set drives what follows the loss
        row[f"eval_loss{suffix}"] = mean
        row[f"eval_perplexity{suffix}"] = float(np.exp(mean))
        row[f"eval_tokens{suffix}"] = float(total[1])
        of = f" of {name}" if len(data.eval_sets) > 1 else ""
        notes.append(f"held-out loss{of} {mean:.4f} on {int(total[1]):,} tokens")
    return row, notes
