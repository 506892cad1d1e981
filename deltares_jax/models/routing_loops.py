"""Passes over a buffer of sources as loops over its slots, for every platform.

Only the slots of a span are read, each once for all readers of the pass, and nothing of the size of
the buffer is made. Sums are in the statistics dtype, in the order of the slots.

B batch, T sequence, D width, S slots, R readers, K sources whose gradients are gathered.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltares_jax.models.routing_ops import logits_of_readers, statistics_dtype

Span = tuple[Any, Any]


def _slot(buffer_SBTD: jax.Array, slot: jax.Array) -> jax.Array:
    value_BTD = lax.dynamic_index_in_dim(buffer_SBTD, slot, 0, keepdims=False)
    return value_BTD.astype(statistics_dtype(buffer_SBTD.dtype))


def _zeros(buffer_SBTD: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Where `count` sums [B, T, D] add up."""
    zeros = jnp.zeros(buffer_SBTD.shape[1:], statistics_dtype(buffer_SBTD.dtype))
    return (nn.with_logical_constraint(zeros, ("batch", "length", "embed")),) * count


def _sum_over_width(products: jax.Array) -> jax.Array:
    # As a matmul: on CPU a sum along the last axis runs without vector instructions.
    ones_D = jnp.ones(products.shape[-1:], products.dtype)
    return jnp.einsum("...d,d->...", products, ones_D, precision=lax.Precision.HIGHEST)


def put(buffer_SBTD: jax.Array, values: list[jax.Array], slot: Any) -> jax.Array:
    """Writes values, [B, T, D] each in the dtype of the buffer, from a slot on."""
    for k, value_BTD in enumerate(values):
        buffer_SBTD = lax.dynamic_update_index_in_dim(buffer_SBTD, value_BTD, slot + k, 0)
    return buffer_SBTD


def read(
    buffer_SBTD: jax.Array,
    direction_RD: jax.Array,
    span: Span,
    end_R: jax.Array,
    eps: float,
    centered: bool,
) -> tuple[list[jax.Array], jax.Array, jax.Array, Any]:
    """Sums over the sources of each reader, by an online softmax.

    Args:
      buffer_SBTD: the sources.
      direction_RD: query times gain.
      span: the first slot, and the last plus 1.
      end_R: the slot where a reader's view ends, inside the span.
      eps: the epsilon of the key norm.
      centered: also sum the sources as they are.

    Returns:
      With u = exp(logit − top): Σ u s as [B, T, D] for each reader; top and Σ u, [R, B, T] (−inf
      and 0 without sources); Σ s of the span, or None.
    """
    _, B, T, D = buffer_SBTD.shape
    R = len(direction_RD)
    zeros_RBT = jnp.zeros((R, B, T), statistics_dtype(buffer_SBTD.dtype))
    direction_RD = direction_RD.astype(zeros_RBT.dtype)

    def body(slot: jax.Array, carry: Any) -> Any:
        top_RBT, sum_RBT, mixes = carry
        value_BTD = _slot(buffer_SBTD, slot)
        scale_BT = lax.rsqrt(_sum_over_width(jnp.square(value_BTD)) / D + eps)
        dot_RBT = jnp.einsum(
            "btd,rd->rbt", value_BTD, direction_RD, precision=lax.Precision.HIGHEST
        )
        seen_R11 = (slot < end_R)[:, None, None]
        logit_RBT = jnp.where(seen_R11, dot_RBT * scale_BT[None], -jnp.inf)
        new_RBT = jnp.maximum(top_RBT, logit_RBT)
        finite_RBT = jnp.where(new_RBT == -jnp.inf, 0.0, new_RBT)
        rescale_RBT, u_RBT = jnp.exp(top_RBT - finite_RBT), jnp.exp(logit_RBT - finite_RBT)
        sums = [
            mix_BTD * rescale_BT[..., None] + u_BT[..., None] * value_BTD
            for mix_BTD, rescale_BT, u_BT in zip(mixes[:R], rescale_RBT, u_RBT, strict=True)
        ]
        sums += [total_BTD + value_BTD for total_BTD in mixes[R:]]
        return new_RBT, sum_RBT * rescale_RBT + u_RBT, tuple(sums)

    start = (jnp.full_like(zeros_RBT, -jnp.inf), zeros_RBT, _zeros(buffer_SBTD, R + centered))
    top_RBT, sum_RBT, mixes = lax.fori_loop(*span, body, start)
    return list(mixes[:R]), top_RBT, sum_RBT, mixes[R] if centered else None


def mix(buffer_SBTD: jax.Array, factors_RSBT: jax.Array, span: Span) -> list[jax.Array]:
    """Mixes [B, T, D] of the slots of the span, one for each row of factors."""

    def body(slot: jax.Array, mixes: Any) -> Any:
        return _add(mixes, factors_RSBT, _slot(buffer_SBTD, slot), slot)

    return list(lax.fori_loop(*span, body, _zeros(buffer_SBTD, len(factors_RSBT))))


def gather(
    buffer_SBTD: jax.Array,
    slot: Any,
    count: int,
    direction_RD: jax.Array,
    end_R: np.ndarray,
    count_R: np.ndarray,
    stats: tuple[jax.Array, jax.Array, jax.Array],
    eps: float,
    centered: bool,
) -> tuple[list[jax.Array], jax.Array]:
    """Gradients of sources from those of later readers.

    Args:
      buffer_SBTD: sources up to slot + K − 1, then the gradients of mixes, reader j's in slot
        j + 1.
      slot: the first of the sources.
      count: K.
      direction_RD: query times gain of all readers.
      end_R: the slot where a reader's view ends.
      count_R: how many sources a reader has.
      stats: the readers' top logits, Σ exp(logit − top), and d_mix · the mix of the softmax,
        [R, B, T] each.
      eps: the epsilon of the key norm.
      centered: whether the factors are the weights minus 1/S.

    Returns:
      The gradients [B, T, D] of the sources, in their dtype, and of `direction_RD`.
    """

    def logits(values_KBTD: jax.Array, direction_RD: jax.Array) -> jax.Array:
        return logits_of_readers(values_KBTD, direction_RD, jnp.ones_like(direction_RD), eps)

    values_KBTD = lax.dynamic_slice_in_dim(buffer_SBTD, slot, count)
    reader_R1, slot_1K = jnp.arange(len(end_R))[:, None], slot + jnp.arange(count)[None]
    sees_RK11 = (slot_1K < jnp.asarray(end_R)[:, None]) & (reader_R1 + 1 >= slot + count)
    sees_RK11 = sees_RK11[..., None, None]
    wide_KBTD = values_KBTD.astype(statistics_dtype(values_KBTD.dtype))
    logits_RKBT, pull = jax.vjp(logits, wide_KBTD, direction_RD.astype(wide_KBTD.dtype))
    top_R1BT, sum_R1BT, c_R1BT = (stat_RBT[:, None] for stat_RBT in stats)
    count_R111 = jnp.asarray(count_R)[:, None, None, None]
    u_RKBT = jnp.exp(jnp.where(sees_RK11, logits_RKBT, -jnp.inf) - top_R1BT)
    weights_RKBT = factors_RKBT = u_RKBT / sum_R1BT
    if centered:
        sources = jnp.maximum(count_R111, 1).astype(u_RKBT.dtype)
        factors_RKBT = (sources * u_RKBT - sum_R1BT) / (sources * sum_R1BT)
        factors_RKBT = jnp.where(sees_RK11, factors_RKBT, 0.0)
    factors_KSBT = jnp.pad(jnp.swapaxes(factors_RKBT, 0, 1), ((0, 0), (1, 0), (0, 0), (0, 0)))
    span = (slot + count, len(buffer_SBTD))
    mixed, dots_KSBT = mix_and_dot(buffer_SBTD, factors_KSBT, values_KBTD, span)
    d_factors_RKBT = jnp.swapaxes(dots_KSBT[:, 1:], 0, 1)
    d_logits_RKBT = weights_RKBT * (d_factors_RKBT - c_R1BT)
    d_logits_RKBT = jnp.where(sees_RK11 & (count_R111 > 1), d_logits_RKBT, 0.0)
    d_values_KBTD, d_direction_RD = pull(d_logits_RKBT)
    d_values = [m + d for m, d in zip(mixed, d_values_KBTD, strict=True)]
    return [d.astype(values_KBTD.dtype) for d in d_values], d_direction_RD


def mix_and_dot(
    buffer_SBTD: jax.Array, factors_RSBT: jax.Array, others_RBTD: jax.Array, span: Span
) -> tuple[list[jax.Array], jax.Array]:
    """Mixes as of `mix`, and the dot products [R, S, B, T] of the slots and others.

    The dot products mean nothing outside of the span.
    """
    others_RBTD = others_RBTD.astype(factors_RSBT.dtype)

    def body(slot: jax.Array, carry: Any) -> Any:
        mixes, dots_RSBT = carry
        value_BTD = _slot(buffer_SBTD, slot)
        dots_RBT = _sum_over_width(value_BTD[None] * others_RBTD)
        dots_RSBT = lax.dynamic_update_index_in_dim(dots_RSBT, dots_RBT, slot, 1)
        return _add(mixes, factors_RSBT, value_BTD, slot), dots_RSBT

    start = (_zeros(buffer_SBTD, len(factors_RSBT)), jnp.zeros_like(factors_RSBT))
    mixes, dots_RSBT = lax.fori_loop(*span, body, start)
    return list(mixes), dots_RSBT


def _add(
    mixes: tuple[jax.Array, ...], factors_RSBT: jax.Array, value_BTD: jax.Array, slot: jax.Array
) -> tuple[jax.Array, ...]:
    factors_RBT = lax.dynamic_index_in_dim(factors_RSBT, slot, 1, keepdims=False)
    return tuple(
        mix_BTD + factor_BT[..., None] * value_BTD
        for mix_BTD, factor_BT in zip(mixes, factors_RBT, strict=True)
    )
