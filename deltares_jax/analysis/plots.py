"""Figures of a run."""

import pathlib
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("agg")  # no display is needed


def loss_curve(
    train: dict[int, Any],
    held_out: dict[int, Any],
    path: pathlib.Path,
    title: str,
    bigram: float | None = None,
) -> None:
    """Draws training and held-out loss by step, and the bigram table's loss as a line.

    Args:
      train: rows by step with `loss`.
      held_out: rows by step with `eval_loss`.
      path: the picture to write; its ending chooses the format.
      title: the title.
      bigram: the held-out loss of a bigram table in nats per token.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = sorted(train)
    axes.plot(steps, [train[s]["loss"] for s in steps], lw=0.8, alpha=0.6, label="training loss")
    steps = sorted(held_out)
    axes.plot(steps, [held_out[s]["eval_loss"] for s in steps], "o-", label="held-out loss")
    if bigram is not None:
        axes.axhline(bigram, ls="--", color="0.4", label=f"add-one bigram table: {bigram:.3f}")
    axes.set(xlabel="step", ylabel="nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
