"""What start-up says about a config that is allowed."""

import itertools

from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import variants


def notes(config: FrozenConfigDict) -> list[str]:
    """What start-up should say about the config: options without effect, readers without choice."""
    residual, lines = config.model.residual, _saves(config)
    row = variants.VARIANTS[residual.variant]
    if config.optim.routing_learning_rate and row.routing == "none":
        lines.append(f"optim.routing_learning_rate has no effect on {residual.variant}")
    if config.metrics.routing_every and row.routing == "none":
        lines.append(
            f"metrics.routing_every: {residual.variant} routes nothing; the norm of its stream "
            "alone is logged"
        )
    if row.grows != "block":
        lines.append(f"model.residual.num_blocks has no effect on {residual.variant}")
        return lines
    lengths = variants.block_lengths(residual.variant, config.model.num_layers, residual.num_blocks)
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    spans = ", ".join(f"{a}-{b - 1}" for a, b in itertools.pairwise(ends))
    asked = f" ({residual.num_blocks} asked for)" if len(lengths) < residual.num_blocks else ""
    lines.append(f"blocks: {len(lengths)}{asked}, of layers {spans}")
    if len(lengths) == 1 and row.routing == "add" and not residual.null_source:
        lines.append(
            "warning: with one block every reader has one source at most, so its weight is 1 and "
            "the queries never learn; use model.residual.num_blocks >= 2"
        )
    return lines


def _saves(config: FrozenConfigDict) -> list[str]:
    every, period = config.checkpoint.every, config.checkpoint.keep_period
    if not period or (every and (period % every == 0 or every % period == 0)):
        return []
    return [
        f"checkpoint.keep_period={period} keeps what is saved, and checkpoint.every={every} "
        f"saves {f'multiples of {every}' if every else 'the last step'} alone"
    ]
