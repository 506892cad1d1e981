"""The first and last lines of a run: what will run, what it reached, what to try next."""

import pathlib
import shlex
from typing import Any

from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config_notes
from deltares_jax.analysis import plots
from deltares_jax.data import ngram, pipeline
from deltares_jax.data.dataset import Data
from deltares_jax.models import sizes
from deltares_jax.training import clock, metrics, optim, remote
from deltares_jax.training import workdir as workdir_lib
from deltares_jax.training.start import Start

PICTURE = "loss.png"


def start_lines(
    config: FrozenConfigDict,
    folder: pathlib.Path,
    machine: list[str],
    data: Data,
    start: Start,
) -> list[str]:
    """What will run, in a few lines.

    Args:
      config: the resolved config.
      folder: of the run.
      machine: lines on the devices and what they hold.
      data: what it reads.
      start: where the run starts.
    """
    changed = "changed on resume" if start.own else "changed"
    lines = [
        f"{workdir_lib.shown(folder)}: {start.text}",
        *(f"{changed}: {change}" for change in start.changes),
    ]
    if any(change.startswith(("train.steps", "optim.")) for change in start.changes):
        old = FrozenConfigDict(start.meta["config"])
        rates = [float(optim.schedule(c)(start.step + 1)) for c in (old, config)]
        lines.append(f"learning rate of the next step: {rates[0]:.3e} → {rates[1]:.3e}")
    lines += machine
    lines += data.describe(start.meta["rows_seen"])
    if config.data.mixture:
        lines.append("data.source has no effect beside data.mixture")
    if not config.data.document_masking:
        lines.append("data.document_masking=False: tokens see the documents before theirs in a row")
    if config.eval.every and not data.eval_sets:
        lines.append(
            f"warning: eval.every={config.eval.every}, but the data have no held-out text (split "
            "validation): there is no evaluation; eval.sets may name other data"
        )
    for name, rows in data.eval_sets.items():
        if config.eval.rows > len(rows):
            lines.append(f"eval.rows={config.eval.rows}: {name} has {len(rows)}, all are used")
    counts = sizes.parameter_counts(config.model)
    lines.append(
        f"{config.model.residual.variant}: {metrics.human_count(sum(counts.values()))} parameters, "
        f"{counts['routing']:,} of them for routing"
    )
    lines += config_notes.notes(config)
    batch, parts = config.train.batch_size, config.train.accumulation
    lines.append(
        f"global batch {batch} × {config.data.seq_len} tokens, {batch * config.data.seq_len:,} per "
        f"update; micro-batch {batch // parts}, accumulation {parts}"
    )
    return lines


def bigram_loss(config: FrozenConfigDict, data: Data) -> float | None:
    """Loss of the train split's add-one bigram table on the first evaluation set of the run.

    None where the vocabulary or the text is too large for a table, or the text is a mixture.
    """
    (part, *others), (rows, *_) = data.parts.values(), data.eval_sets.values()
    vocab_size, stream = part.manifest["vocab_size"], part.streams["train"]
    if others or vocab_size > ngram.MAX_VOCAB or len(stream) > ngram.MAX_TOKENS:
        return None
    counts = ngram.bigram_counts(stream, vocab_size, part.manifest["end_of_text"])
    count = min(config.eval.rows, len(rows))
    return ngram.bigram_loss(counts, pipeline.eval_batches(rows, count, config.eval.batch_size))


def finish(
    config: FrozenConfigDict,
    folder: pathlib.Path,
    recipe: str,
    data: Data,
    seconds: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Draws the loss curve, prints the summary and returns its numbers.

    Args:
      config: the resolved config.
      folder: of the run.
      recipe: for the command that is printed.
      data: what it read.
      seconds: what its time was spent on, where that is known.
    """
    # An attempt that left no checkpoint may have gone further.
    train, held_out = (
        {s: row for s, row in rows.items() if s <= config.train.steps}
        for rows in metrics.read_rows(folder)
    )
    made = {step: row for step, row in train.items() if row["loss"] is not None}
    if not made:
        raise ValueError(f"{folder / workdir_lib.METRICS} holds no training rows to sum up")
    first, last = made[min(made)], made[max(made)]
    result: dict[str, Any] = {
        "workdir": str(folder),
        "steps": max(train),
        "first_loss": first["loss"],
        "last_loss": last["loss"],
        "goodput": last.get("goodput"),  # absent in rows of older versions
    }
    lines = [
        f"run: {workdir_lib.shown(folder)}",
        f"loss: {first['loss']:.4f} at step {first['step']}, "
        f"{last['loss']:.4f} at step {last['step']} ({metrics.human_count(last['tokens_seen'])} "
        "tokens)",
    ]
    bigram = None
    if held_out:
        result["eval_loss"] = held_out[max(held_out)]["eval_loss"]
        bigram = bigram_loss(config, data) if data.eval_sets else None
        text = f"held-out loss: {result['eval_loss']:.4f} nats per token at step {max(held_out)}"
        if bigram is not None:
            result["bigram_loss"] = bigram
            text += f"; an add-one bigram table of the train split has {bigram:.4f}"
        lines.append(text)
    if seconds:
        shares = clock.shares(seconds)
        spent = ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items())
        lines.append(f"time: {metrics.human_time(sum(seconds.values()))}: {spent}")
    title = f"{config.model.residual.variant} on {', '.join(data.parts)}"
    plots.loss_curve(made, held_out, folder / PICTURE, title, bigram)
    lines.append(f"curve: {workdir_lib.shown(folder / PICTURE)}")
    other = "baseline" if config.model.residual.variant != "baseline" else "delta_block"
    if recipe and config.init_from:  # weights that no other variant can start from
        here, there = (shlex.quote(workdir_lib.shown(folder) + end) for end in ("", "_hf"))
        lines.append(f"next: python -m deltares_jax.convert export --workdir={here} --out={there}")
    elif recipe:
        beside = workdir_lib.shown(folder.parent / other)
        if address := remote.shown(folder):
            beside = f"{address.rpartition('/')[0]}/{other}"
        lines.append(
            f"next: python -m deltares_jax.train --config={recipe} "
            f"--config.model.residual.variant={other} "
            f"--workdir={shlex.quote(beside)}"
        )
    metrics.say(*lines)
    return result
