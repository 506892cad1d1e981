"""The last lines of a run: where it is, what it reached, what to try next."""

import pathlib
from typing import Any

from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.analysis import plots
from deltares_jax.data import ngram, pipeline
from deltares_jax.training import metrics

PICTURE = "loss.png"


def bigram_loss(config: FrozenConfigDict, dataset: pipeline.Dataset) -> float | None:
    """Loss of the train split's add-one bigram table on the held-out rows of the run.

    None where the vocabulary is too large for a table.
    """
    manifest = dataset.manifest
    if manifest["vocab_size"] > ngram.MAX_VOCAB:
        return None
    counts = ngram.bigram_counts(
        dataset.streams["train"], manifest["vocab_size"], manifest["end_of_text"]
    )
    rows = dataset.rows["validation"]
    count = min(config.eval.rows, len(rows))
    return ngram.bigram_loss(counts, pipeline.eval_batches(rows, count, config.eval.batch_size))


def finish(
    config: FrozenConfigDict,
    folder: pathlib.Path,
    recipe: str,
    dataset: pipeline.Dataset,
) -> dict[str, Any]:
    """Draws the loss curve, prints the summary and returns its numbers."""
    train, held_out = metrics.read_rows(folder)
    first, last = train[min(train)], train[max(train)]
    result: dict[str, Any] = {
        "workdir": str(folder),
        "steps": max(train),
        "first_loss": first["loss"],
        "last_loss": last["loss"],
    }
    lines = [
        f"run: {folder}",
        f"loss: {first['loss']:.4f} at step {first['step']}, "
        f"{last['loss']:.4f} at step {last['step']} ({metrics.human_count(last['tokens_seen'])} "
        "tokens)",
    ]
    bigram = None
    if held_out:
        result["eval_loss"] = held_out[max(held_out)]["eval_loss"]
        bigram = bigram_loss(config, dataset)
        text = f"held-out loss: {result['eval_loss']:.4f} nats per token"
        if bigram is not None:
            result["bigram_loss"] = bigram
            text += f"; an add-one bigram table of the train split has {bigram:.4f}"
        lines.append(text)
    title = f"{config.model.residual.variant} on {config.data.source}"
    plots.loss_curve(train, held_out, folder / PICTURE, title, bigram)
    lines.append(f"curve: {folder / PICTURE}")
    other = "baseline" if config.model.residual.variant != "baseline" else "delta_block"
    if recipe:
        lines.append(
            f"next: python -m deltares_jax.train --config={recipe} "
            f"--config.model.residual.variant={other} --workdir={folder.parent / other}"
        )
    print(*lines, sep="\n", flush=True)
    return result
