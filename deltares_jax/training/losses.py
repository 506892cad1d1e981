"""Cross-entropy from hidden states; the logits [B, T, V] never exist as a whole.

B batch, T sequence, D width, V vocabulary, P devices along the vocabulary, C chunks of v tokens.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from deltares_jax.models.layers import whole_rows
from deltares_jax.parallel import sharding

_CHUNK_LOGITS = 2**26  # of a device: 256 MiB in float32
_MULTIPLE = 128  # of a chunk's size: what matrix units take


class LossSums(NamedTuple):
    """Weighted sums over targets: cross-entropy in nats, squared log-normaliser, weights."""

    loss: jax.Array
    z: jax.Array
    weight: jax.Array


def _chunks(positions: int, rows: int) -> tuple[int, int]:
    """How many chunks of how many rows of the output matrix a device with `rows` of them makes."""
    chunks = -(-positions * rows // _CHUNK_LOGITS)
    if chunks == 1:
        return 1, rows
    size = -(-rows // (chunks * _MULTIPLE)) * _MULTIPLE
    return -(-rows // size), size


def _split_head(head_VD: jax.Array, P: int, C: int, v: int) -> tuple[jax.Array, jax.Array]:
    """The output matrix as [C, P, v, D], filled up with zeros, and its token ids [C, P, v].

    Rows that fill up have the id V.
    """
    V, D = head_VD.shape
    rows = -(-V // P)
    head_PrD = jnp.pad(head_VD, ((0, P * rows - V), (0, 0))).reshape(P, rows, D)
    head_PrD = nn.with_logical_constraint(head_PrD, ("vocab", None, "width"))
    head_PrD = jnp.pad(head_PrD, ((0, 0), (0, C * v - rows), (0, 0)))
    row_r = jnp.arange(C * v)
    id_Pr = jnp.where(row_r < rows, jnp.arange(P)[:, None] * rows + row_r[None], V)
    id_Pr = jnp.minimum(id_Pr, V)
    return (
        head_PrD.reshape(P, C, v, D).swapaxes(0, 1),
        id_Pr.reshape(P, C, v).swapaxes(0, 1),
    )


def _chunk_logits(
    hidden_PBTD: jax.Array, head_PvD: jax.Array, id_Pv: jax.Array, V: int, dtype: Any
) -> jax.Array:
    """The logits of a chunk; the lowest number for rows that fill up."""
    head_PvD = nn.with_logical_constraint(head_PvD, ("vocab", None, "embed"))
    logits_PBTv = jnp.einsum("pbtd,pvd->pbtv", hidden_PBTD, head_PvD, preferred_element_type=dtype)
    return jnp.where(id_Pv[:, None, None] < V, logits_PBTv, jnp.finfo(dtype).min)


def _target_logits(logits_PBTv: jax.Array, id_Pv: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """The targets' logits where the chunk holds them, else 0."""
    hit_PBTv = id_Pv[:, None, None] == targets_BT[None, ..., None]
    return jnp.sum(jnp.where(hit_PBTv, logits_PBTv, 0.0), axis=-1)


def cross_entropy_sums(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
) -> LossSums:
    """Sums of the cross-entropy over all targets, chunk by chunk along the vocabulary.

    A chunk of the output matrix is gathered, and its gradient is reduced, once: chunks along the
    rows of the batch would do that with the whole matrix for each of them.

    Args:
      hidden_BTD: normed hidden states in the compute dtype.
      head_VD: the output matrix; cast to the compute dtype.
      targets_BT: the next tokens.
      weights_BT: 0 leaves a target out.

    Returns:
      Sums in float32 (float64 for float64 states).
    """
    (B, T, D), V = hidden_BTD.shape, head_VD.shape[0]
    P = sharding.parts("vocab")
    C, v = _chunks(B * T // sharding.parts("batch"), -(-V // P))
    dtype = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    compute_dtype = hidden_BTD.dtype
    head_CPvD, id_CPv = _split_head(head_VD.astype(compute_dtype), P, C, v)
    hidden_BTD = whole_rows(hidden_BTD)
    # An axis for the devices along the vocabulary, and float32: gradients of the chunks add up on
    # each device alone, and over devices once.
    hidden_PBTD = jnp.broadcast_to(hidden_BTD.astype(dtype), (P, B, T, D))
    hidden_PBTD = nn.with_logical_constraint(hidden_PBTD, ("vocab", "batch", None, "embed"))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(
        hidden_PBTD: jax.Array, head_PvD: jax.Array, id_Pv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        hidden_PBTD = hidden_PBTD.astype(compute_dtype)
        logits_PBTv = _chunk_logits(hidden_PBTD, head_PvD, id_Pv, V, dtype)
        return jax.nn.logsumexp(logits_PBTv, axis=-1), _target_logits(
            logits_PBTv, id_Pv, targets_BT
        )

    _, (lse_CPBT, target_CPBT) = lax.scan(
        lambda _, part: (None, chunk(hidden_PBTD, *part)), None, (head_CPvD, id_CPv)
    )
    lse_BT = jax.nn.logsumexp(lse_CPBT, axis=(0, 1))
    target_BT = jnp.sum(target_CPBT, axis=(0, 1))
    weights_BT = weights_BT.astype(dtype)
    return LossSums(
        jnp.sum(weights_BT * (lse_BT - target_BT)),
        jnp.sum(weights_BT * jnp.square(lse_BT)),
        jnp.sum(weights_BT),
    )


def token_scores(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy of every target in nats, and whether the target is the likeliest token.

    Of equal logits the lowest id counts as the likeliest. For evaluation: not differentiated.

    Args:
      hidden_BTD: normed hidden states in the compute dtype.
      head_VD: the output matrix; cast to the compute dtype.
      targets_BT: the next tokens.

    Returns:
      [B, T] in float32 (float64 for float64 states), and [B, T] booleans.
    """
    (B, T, D), V = hidden_BTD.shape, head_VD.shape[0]
    P = sharding.parts("vocab")
    C, v = _chunks(B * T // sharding.parts("batch"), -(-V // P))
    dtype = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    parts = _split_head(head_VD.astype(hidden_BTD.dtype), P, C, v)
    hidden_PBTD = jnp.broadcast_to(whole_rows(hidden_BTD), (P, B, T, D))
    hidden_PBTD = nn.with_logical_constraint(hidden_PBTD, ("vocab", "batch", None, "embed"))

    def chunk(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        head_PvD, id_Pv = part
        logits_PBTv = _chunk_logits(hidden_PBTD, head_PvD, id_Pv, V, dtype)
        top_PBT = jnp.max(logits_PBTv, axis=-1)
        tops_PBTv = jnp.where(logits_PBTv == top_PBT[..., None], id_Pv[:, None, None], V)
        return (
            jax.nn.logsumexp(logits_PBTv, axis=-1),
            _target_logits(logits_PBTv, id_Pv, targets_BT),
            top_PBT,
            jnp.min(tops_PBTv, axis=-1),
        )

    lse_CPBT, target_CPBT, top_CPBT, id_CPBT = lax.map(chunk, parts)
    best_CPBT = jnp.where(top_CPBT == jnp.max(top_CPBT, axis=(0, 1), keepdims=True), id_CPBT, V)
    loss_BT = jax.nn.logsumexp(lse_CPBT, axis=(0, 1)) - jnp.sum(target_CPBT, axis=(0, 1))
    return loss_BT, jnp.min(best_CPBT, axis=(0, 1)) == targets_BT


def largest_logit_difference(
    one_BTD: jax.Array, other_BTD: jax.Array, head_VD: jax.Array
) -> jax.Array:
    """The largest difference of two logits of the same token, between two hidden states.

    Args:
      one_BTD: normed hidden states in the compute dtype.
      other_BTD: others.
      head_VD: the output matrix; cast to the compute dtype.
    """
    (B, T, _), V = one_BTD.shape, head_VD.shape[0]
    P = sharding.parts("vocab")
    C, v = _chunks(B * T // sharding.parts("batch"), -(-V // P))
    head_CPvD, _ = _split_head(head_VD.astype(one_BTD.dtype), P, C, v)
    dtype = jnp.promote_types(one_BTD.dtype, jnp.float32)
    states = [whole_rows(one_BTD), whole_rows(other_BTD)]

    def chunk(head_PvD: jax.Array) -> jax.Array:
        one_PBTv, other_PBTv = (
            jnp.einsum("btd,pvd->pbtv", x, head_PvD, preferred_element_type=dtype) for x in states
        )
        return jnp.max(jnp.abs(one_PBTv - other_PBTv))

    return jnp.max(lax.map(chunk, head_CPvD))
