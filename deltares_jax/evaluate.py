"""Held-out loss and perplexity of a checkpoint, on any devices.

    python -m deltares_jax.evaluate --workdir=runs/debug
    python -m deltares_jax.evaluate --workdir=runs/debug --step=best --tokens=0 --by_position

Sum of losses over count of targets on the first tokens of each set, equal for every batch size and
mesh. The result goes to evaluation/ in the run's folder.
"""

from typing import Any

from absl import flags

from deltares_jax import command, config, printing
from deltares_jax.data import names
from deltares_jax.training import signals

_WORKDIR = flags.DEFINE_string("workdir", "", "Run, or RUN/checkpoints/STEP.")
_STEP = flags.DEFINE_string("step", "", "Step of the run: a number, last or best; last by default.")
_DATA = flags.DEFINE_string(
    "data", "", "Sets as NAME=SOURCE_OR_FOLDER[:SPLIT],…; those of the run by default."
)
_TOKENS = flags.DEFINE_integer(
    "tokens", None, "Of each set; 0: all; by default as many as the run takes.", lower_bound=0
)
_BATCH_SIZE = command.define_batch_size_flag()
_MESH = command.define_mesh_flag()
_POSITION = flags.DEFINE_boolean("by_position", False, "Also by position in the document.")
_DOCUMENT = flags.DEFINE_boolean("by_document", False, "Also of each document.")


def _position_lines(result: Any) -> list[str]:
    """A table by position; ranges double."""
    lines, first = ["position     tokens    loss"], 0
    while first < len(result.position_tokens_T):
        span = slice(first, max(1, 2 * first))
        tokens, loss = result.position_tokens_T[span].sum(), result.position_loss_T[span].sum()
        last = min(span.stop, len(result.position_tokens_T)) - 1
        if tokens:
            span_text = str(first) if first == last else f"{first}-{last}"
            lines.append(f"{span_text:>8} {tokens:>10,.0f}  {loss / tokens:.4f}")
        first = span.stop
    return lines


def _document_lines(result: Any) -> list[str]:
    """The spread over documents; each of them is in the file."""
    import numpy as np

    known = result.document_tokens > 0
    means = result.document_loss[known] / result.document_tokens[known]
    low, middle, high = np.percentile(means, [5, 50, 95])
    return [
        f"{known.sum():,} documents, loss of one: median {middle:.4f}, 5 % below {low:.4f}, 5 % "
        f"above {high:.4f}"
    ]


def _row(result: Any) -> dict[str, Any]:
    """What is written of a set."""
    row: dict[str, Any] = {
        "loss": result.mean,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        "text_tokens": result.asked,
    }
    if _POSITION.value:
        row["positions"] = {
            "tokens": result.position_tokens_T.tolist(),
            "loss_sum": result.position_loss_T.tolist(),
        }
    if _DOCUMENT.value:
        row["documents"] = {
            "tokens": result.document_tokens.tolist(),
            "loss_sum": result.document_loss.tolist(),
        }
    return row


def main() -> int:
    """Evaluates and prints."""
    signals.interrupt_on_request()
    if _DATA.value:
        names.parse_sets(_DATA.value, "--data")
    from deltares_jax.data import dataset  # brings in jax; a misspelt flag was refused before
    from deltares_jax.inference import held_out, scorer, trained
    from deltares_jax.training import group, workdir

    with group.together(config.resolve(config.default())) as processes:
        folder, step = trained.find(_WORKDIR.value, _STEP.value)
        saved = trained.saved_config(folder, step)
        if _DATA.value:
            saved = trained.changed(saved, {"eval.sets": _DATA.value})
        path = workdir.results_path(folder, "evaluation", step)
        try:
            sets = processes.one_by_one(lambda: dataset.open_eval_sets(saved))
        except ValueError as error:
            why = str(error)
            raise ValueError(
                f"--data: {why.removeprefix('eval.sets: ')}" if _DATA.value else why
            ) from None
        model = trained.load(folder, step, saved, _MESH.value)
        printing.say(model.describe())
        asked = _BATCH_SIZE.value or saved.eval.batch_size
        batch_size = model.batch_size(asked)
        if batch_size != asked:
            printing.say(f"batch {asked} → {batch_size}, filled up for {model.parts} devices")
        own = saved.eval.rows * saved.data.seq_len
        budget = own if _TOKENS.value is None else _TOKENS.value
        scores, rows = scorer.Scorer(model), {}
        for name, text in sets.items():
            result = held_out.evaluate(model, scores, text, budget, batch_size)
            if result.mean != result.mean or result.mean == float("inf"):
                raise signals.Stop(f"{name}: the loss is {result.mean}", signals.NON_FINITE)
            rows[name] = _row(result)
            short = f" (all there is of {budget:,})" if result.asked < budget else ""
            printing.put(
                f"{name}: loss {result.mean:.4f}, perplexity {result.perplexity:.4f} on "
                f"{result.tokens:,} targets in {result.asked:,} tokens{short}"
            )
            printing.put(*(_position_lines(result) if _POSITION.value else []))
            printing.put(*(_document_lines(result) if _DOCUMENT.value else []))
        if processes.index == 0:
            workdir.write_results(path, {"step": step, "data": saved.eval.sets, "sets": rows})
    return 0


if __name__ == "__main__":
    command.run(main, __doc__)
