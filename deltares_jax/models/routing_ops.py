"""Softmax routing over the depth: logits, weights and the mix of sources.

S sources, B batch, T sequence, D width, R readers. Statistics, logits and weights are float32
(float64 for float64 sources), matmuls run at the highest precision: at the default precision of
recent TPUs the weights are off by tens of percent.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Sources(NamedTuple):
    """A group of sources that lie in one array.

    values_SBTD: the sources; B and T may be 1 where a source is equal for all tokens. Or an object
      in their place that has a `shape` and a method `mix`, together with logits.
    valid_S: which of them the reader sees; unseen ones get weight 0, whatever they hold.
    logits_SBT: the reader's logits where they were computed before, by `logits_of_readers`.
    """

    values_SBTD: Any
    valid_S: jax.Array
    logits_SBT: Any = None


def statistics_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of norms, softmax and sums for values of `dtype`."""
    return jnp.promote_types(dtype, jnp.float32)


def routing_logits(group: Sources, query_D: jax.Array, gain_D: jax.Array, eps: float) -> jax.Array:
    """Q · RMSNorm_g(s) of every source of the group, [S, B, T]; 0 where it is not valid."""
    valid_S11 = group.valid_S[:, None, None]
    if group.logits_SBT is not None:
        return jnp.where(valid_S11, group.logits_SBT, 0.0)
    dtype = statistics_dtype(group.values_SBTD.dtype)
    values_SBTD = group.values_SBTD.astype(dtype)
    # An unwritten slot is all zeros: with eps = 0 its norm, and the gradient of it, would be NaN.
    square_SBT = jnp.where(valid_S11, jnp.mean(jnp.square(values_SBTD), axis=-1), 1.0)
    direction_D = query_D.astype(dtype) * gain_D.astype(dtype)
    dot_SBT = jnp.einsum("sbtd,d->sbt", values_SBTD, direction_D, precision=lax.Precision.HIGHEST)
    return jnp.where(valid_S11, dot_SBT * lax.rsqrt(square_SBT + eps), 0.0)


def logits_of_readers(
    values_SBTD: jax.Array, query_RD: jax.Array, gain_RD: jax.Array, eps: float
) -> jax.Array:
    """The logits of all readers of a block over its sources, [R, S, B, T].

    One matmul for all of them, and each source is normalised once: the queries are parameters.
    """
    dtype = statistics_dtype(values_SBTD.dtype)
    # The tokens go last, as they lie in memory in the layers' loop: otherwise the compiler copies
    # what the sources are slices of.
    values_SBDT = jnp.swapaxes(values_SBTD, 2, 3).astype(dtype)
    square_SBT = jnp.mean(jnp.square(values_SBDT), axis=2)
    if eps == 0:  # a slot that is not written yet is all zeros
        square_SBT = jnp.where(square_SBT > 0, square_SBT, 1.0)
    scale_SBT = lax.rsqrt(square_SBT + eps)
    direction_RD = query_RD.astype(dtype) * gain_RD.astype(dtype)
    dot_RSBT = jnp.einsum(
        "rd,sbdt->rsbt", direction_RD, values_SBDT, precision=lax.Precision.HIGHEST
    )
    return dot_RSBT * scale_SBT[None]


def routing_weights(
    logits_SBT: jax.Array, valid_S: jax.Array, centered: bool
) -> tuple[jax.Array, jax.Array]:
    """The softmax over the valid sources and the factors of the mix, each [S, B, T].

    The factors are the softmax, or with `centered` softmax − 1/S as (S·u − Σu) / (S·Σu), which is
    exactly 0 for equal logits. Both are 0 for sources that are not valid.
    """
    valid_S11 = valid_S[:, None, None]
    # A single source has weight 1 whatever its logit: cut it off, since Adam would turn what
    # rounding leaves of its zero gradient into real steps.
    logits_SBT = jnp.where(jnp.sum(valid_S) > 1, logits_SBT, 0.0)
    masked_SBT = jnp.where(valid_S11, logits_SBT, -jnp.inf)
    top_1BT = lax.stop_gradient(jnp.max(masked_SBT, axis=0, keepdims=True))
    top_1BT = jnp.where(jnp.isfinite(top_1BT), top_1BT, 0.0)
    u_SBT = jnp.exp(jnp.where(valid_S11, masked_SBT - top_1BT, -jnp.inf))
    sum_1BT = jnp.where(jnp.any(valid_S), jnp.sum(u_SBT, axis=0, keepdims=True), 1.0)
    softmax_SBT = u_SBT / sum_1BT
    if not centered:
        return softmax_SBT, softmax_SBT
    count = jnp.maximum(jnp.sum(valid_S), 1).astype(u_SBT.dtype)
    factors_SBT = (count * u_SBT - sum_1BT) / (count * sum_1BT)
    return softmax_SBT, jnp.where(valid_S11, factors_SBT, 0.0)


def route(
    groups: list[Sources],
    query_D: jax.Array,
    gain_D: jax.Array,
    eps: float,
    centered: bool,
) -> tuple[jax.Array, jax.Array]:
    """Mixes the sources of all groups with one softmax over them.

    Args:
      groups: the sources in the order of the reported weights.
      query_D: the reader's query.
      gain_D: the reader's key gain.
      eps: the epsilon of the key norm.
      centered: mix with the weights minus 1/S.

    Returns:
      The mix [B, T, D] (a scalar 0 if there are no sources at all) and the weights [S, B, T], both
      in the statistics dtype.
    """
    valid_S = jnp.concatenate([group.valid_S for group in groups])
    shape_BT = jnp.broadcast_shapes(*(group.values_SBTD.shape[1:3] for group in groups))
    if valid_S.size > 1:
        logits = [routing_logits(group, query_D, gain_D, eps) for group in groups]
        logits_SBT = jnp.concatenate([jnp.broadcast_to(x, x.shape[:1] + shape_BT) for x in logits])
    else:  # nothing to choose from
        logits_SBT = jnp.zeros((valid_S.size, *shape_BT), statistics_dtype(query_D.dtype))
    if not valid_S.size:
        return jnp.zeros((), logits_SBT.dtype), logits_SBT
    weights_SBT, factors_SBT = routing_weights(logits_SBT, valid_S, centered)
    # One mix per group: joining the groups first would copy the whole buffer.
    mix_BTD, start = jnp.zeros((), weights_SBT.dtype), 0
    for group in groups:
        part_SBT = factors_SBT[start : start + group.valid_S.size]
        start += group.valid_S.size
        values = group.values_SBTD
        mix_BTD += mix(values, part_SBT) if isinstance(values, jax.Array) else values.mix(part_SBT)
    return mix_BTD, weights_SBT


def mix(values_SBTD: jax.Array, factors_SBT: jax.Array) -> jax.Array:
    """The sum of the sources times their factors, [B, T, D] in the factors' dtype."""
    return jnp.sum(factors_SBT[..., None] * values_SBTD.astype(factors_SBT.dtype), axis=0)
