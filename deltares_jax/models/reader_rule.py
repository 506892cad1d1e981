"""Readers of a growing list of sources, and their mix.

The sources lie in a buffer. A layer has two readers; both go over what was written before the layer
in one pass, and join what the layer itself makes, the null source and the running stream one by one
(an online softmax, as flash attention over the depth).

B batch, T sequence, D width, S slots, R readers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import routing_loops, variants
from deltares_jax.models.routing_ops import logits_of_readers

Params = Any


class Readers(NamedTuple):
    """The parameters of readers in the order of the depth; the last reader of the model is one.

    query_RD, gain_RD; null_RD and gate_R where the options ask for them, else None.
    """

    query_RD: jax.Array
    gain_RD: jax.Array
    null_RD: Any
    gate_R: Any

    def at(self, first: Any, count: int) -> "Readers":
        """Readers first … first + count − 1; `first` may be traced."""
        return jax.tree.map(lambda p: jax.lax.dynamic_slice_in_dim(p, first, count), self)


class View(NamedTuple):
    """What each reader sees, as constants.

    Slot 0 holds the embedding, slot j + 1 what sublayer j appends; the last reader of the model has
    a slot of its own behind them.

    first: the first slot that is a source. end_R: the slot after the last one that a reader sees.
    count_R: all its sources, the null source and the stream counted.
    """

    first: int
    end_R: np.ndarray
    count_R: np.ndarray


class Stats(NamedTuple):
    """What the softmax of readers leaves, [R, B, T]: the top logit and Σ exp(logit − top)."""

    top_RBT: jax.Array
    sum_RBT: jax.Array


class Part(NamedTuple):
    """Sums over some sources of one reader.

    top_BT: the largest logit, −inf without sources. sum_BT: Σ u with u = exp(logit − top).
    mix_BTD: Σ u s. total_BTD: Σ s, for `centered` alone.
    """

    top_BT: jax.Array
    sum_BT: jax.Array
    mix_BTD: jax.Array
    total_BTD: Any


def stack_readers(config: FrozenConfigDict, layers: Params, last: Params) -> Readers:
    """Readers [R, …] from the stacked layers and the parameters of the last reader, if there is."""
    kinds = [layers[f"{kind}_reader"] for kind in variants.SUBLAYERS]

    def interleave(parts: list[jax.Array]) -> jax.Array:
        stacked = jnp.stack(parts, axis=1)
        return stacked.reshape(-1, *stacked.shape[2:])

    def routing(name: str) -> jax.Array:
        rows = interleave([reader["routing"][name] for reader in kinds])
        return jnp.concatenate([rows, last["routing"][name][None]]) if last else rows

    options = config.residual
    return Readers(
        query_RD=routing("query"),
        gain_RD=routing("gain"),
        null_RD=routing("null_source") if options.null_source else None,
        gate_R=interleave([r["gate"] for r in kinds]) if options.gate != "none" else None,
    )


def view(config: FrozenConfigDict) -> View:
    """The constants of a model's readers."""
    row, L = variants.VARIANTS[config.residual.variant], config.num_layers
    sites = [(layer, sublayer) for layer in range(L) for sublayer in range(2)]
    seen = [int(variants.visible_slots(row, 0, *site, L)) for site in sites]
    single = [config.residual.null_source + int(variants.sees_stream(row, *site)) for site in sites]
    if row.final_read:
        seen.append(row.seeded + 2 * L)
        single.append(0)
    first = 1 - row.seeded
    return View(first, np.array(seen) + first, np.array(seen) + np.array(single))


def sees(view: View, readers: jax.Array, slots: jax.Array) -> jax.Array:
    """Which readers see which slots, [readers, slots]."""
    end = jnp.asarray(view.end_R)[readers][:, None]
    return (slots[None] >= view.first) & (slots[None] < end)


def sum_up(
    buffer_SBTD: jax.Array,
    logits_RSBT: jax.Array,
    sees_RS: jax.Array,
    span: tuple[Any, Any],
    centered: bool,
) -> list[Part]:
    """Sums over a span of the buffer for some readers, from their logits."""
    masked_RSBT = jnp.where(sees_RS[..., None, None], logits_RSBT, -jnp.inf)
    top_RBT = jnp.max(masked_RSBT, axis=1)
    finite_RBT = jnp.where(jnp.isfinite(top_RBT), top_RBT, 0.0)
    u_RSBT = jnp.exp(masked_RSBT - finite_RBT[:, None])
    sum_RBT = jnp.sum(u_RSBT, axis=1)
    R, factors = len(u_RSBT), u_RSBT
    if centered:  # summed as the mix is, so that equal logits cancel bit for bit
        seen_RSBT = jnp.broadcast_to(sees_RS[..., None, None], u_RSBT.shape)
        factors = jnp.concatenate([u_RSBT, seen_RSBT.astype(u_RSBT.dtype)])
    mixes = routing_loops.mix(buffer_SBTD, factors, span)
    totals = mixes[R:] if centered else [None] * R
    return [Part(*part) for part in zip(top_RBT, sum_RBT, mixes[:R], totals, strict=True)]


def join(part: Part, singles: list[tuple[jax.Array, jax.Array]], top_BT: Any = None) -> Part:
    """Adds sources (value [B, T, D], logit [B, T]) one by one; B and T may be 1.

    `top_BT` is the largest logit of all where it is known.
    """
    if top_BT is None:
        top_BT = part.top_BT
        for _, logit_BT in singles:
            top_BT = jnp.maximum(top_BT, logit_BT)
    top_BT = jnp.where(jnp.isfinite(top_BT), top_BT, 0.0)
    scale_BT = jnp.exp(part.top_BT - top_BT)
    sum_BT, mix_BTD, total_BTD = part.sum_BT * scale_BT, part.mix_BTD * scale_BT[..., None], None
    if part.total_BTD is not None:
        total_BTD = part.total_BTD
    for value_BTD, logit_BT in singles:
        value_BTD = value_BTD.astype(mix_BTD.dtype)
        u_BT = jnp.exp(logit_BT - top_BT)
        sum_BT += u_BT
        mix_BTD += u_BT[..., None] * value_BTD
        if total_BTD is not None:
            total_BTD += value_BTD
    return Part(top_BT, sum_BT, mix_BTD, total_BTD)


def mix_of(part: Part, count: Any) -> jax.Array:
    """The mix [B, T, D] of a reader that has `count` sources; 0 without any.

    Centred if the part has a total: (S·Σus − Σu·Σs) / (S·Σu), exactly 0 for equal logits.
    """
    sum_BT1 = jnp.where(count > 0, part.sum_BT, 1.0)[..., None]
    if part.total_BTD is None:
        return part.mix_BTD / sum_BT1
    count = jnp.maximum(count, 1).astype(sum_BT1.dtype)
    return (count * part.mix_BTD - sum_BT1 * part.total_BTD) / (count * sum_BT1)


def source_logit(value_BTD: jax.Array, reader: Readers, eps: float) -> jax.Array:
    """The logit [B, T] of the one reader that `reader` holds on one source."""
    return logits_of_readers(value_BTD[None], reader.query_RD, reader.gain_RD, eps)[0, 0]
