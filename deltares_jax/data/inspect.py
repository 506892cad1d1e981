"""Shows the data that a recipe trains on: counts, document lengths, epochs, and its first rows.

python -m deltares_jax.data.inspect --config=configs/debug.py
python -m deltares_jax.data.inspect --config=configs/600m_delta_block.py --rows=1
"""

import numpy as np
from absl import flags

from deltares_jax import command
from deltares_jax import config as config_lib
from deltares_jax.data import dataset, tokens
from deltares_jax.printing import human_count, put

_ROWS = flags.DEFINE_integer("rows", 3, "How many rows to decode.", lower_bound=0)
_LENGTHS_TOKENS = 1 << 24  # of a larger text, the lengths of the first documents are shown


def _lengths(part: dataset.Dataset) -> str:
    """Lengths of documents in tokens, end-of-text included."""
    stream, count = part.streams["train"], part.manifest["splits"]["train"]
    chunk = stream[0:_LENGTHS_TOKENS]
    lengths = np.diff(np.flatnonzero(chunk == part.manifest["end_of_text"]), prepend=-1)
    text = f"mean {count['tokens'] / count['documents']:,.1f}"
    if lengths.size:
        low, middle, high = np.percentile(lengths, [5, 50, 95])
        text += f", median {middle:,.0f}, 5 % below {low:,.0f}, 5 % above {high:,.0f}"
        text += f", longest {lengths.max():,}"
    rest = "" if chunk.size == len(stream) else f" (in the first {human_count(chunk.size)} tokens)"
    return f"documents, in tokens{rest}: {text}"


def _part_lines(config: config_lib.FrozenConfigDict, data: dataset.Data, name: str) -> list[str]:
    part, T, batch = data.parts[name], config.data.seq_len, config.train.batch_size
    rows, count = len(part.rows["train"]), part.manifest["splits"]["train"]
    padding = rows * T - (count["tokens"] - 1)
    first = count["documents"] - 1 if config.data.document_masking else 0
    share = data.share(name)
    steps = rows / (batch * share)
    return [
        f"{name}, train:",
        f"  {_lengths(part)}",
        f"  epoch: {count['tokens']:,} tokens, {rows:,} rows of {T}, "
        f"{steps:,.1f} steps of {batch} rows" + (f" at {share:.2%}" if share < 1 else ""),
        f"  no loss on: padding, {padding / (rows * T):.3%} of the targets; first tokens of "
        f"documents, {first / (rows * T):.3%}",
        f"  train.steps={config.train.steps}: {config.train.steps / steps:,.3f} epochs",
    ]


def _row_lines(number: int, row: dict[str, np.ndarray], tokenizer: tokens.Tokenizer) -> list[str]:
    """A row, a paragraph for each segment."""
    lines = [f"row {number} of the run:"]
    for segment in np.unique(row["segments"]):
        own = row["segments"] == segment
        if not row["weights"][own].any():
            lines.append(f"  segment {segment}: {own.sum()} tokens without a target of weight 1")
            continue
        lines.append(f"  segment {segment}, {own.sum()} tokens:")
        text = tokenizer.decode(row["inputs"][own].tolist())
        lines += [f"    | {line}" for line in text.splitlines()]
    return lines


def main() -> int:
    """Prints what the config's data hold."""
    if not flags.FLAGS.config:
        raise ValueError(command.MISSING_CONFIG)
    config = config_lib.resolve(flags.FLAGS.config)
    data = dataset.open_data(config)
    put(*data.describe(0))
    for name in data.parts:
        put(*_part_lines(config, data, name))
    for name, rows in data.eval_sets.items():
        put(f"evaluation on {name}: {min(config.eval.rows, len(rows)):,} of {len(rows):,} rows")
    part = next(iter(data.parts.values()))
    tokenizer = tokens.load(part.folder, part.manifest)
    for number in range(min(_ROWS.value, len(data.order))):
        source, row = data.order[number]
        put(*_row_lines(number + 1, data.rows[source][row], tokenizer))
    return 0


if __name__ == "__main__":
    command.define_config_flag()
    command.run(main, __doc__)
