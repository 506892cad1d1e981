"""Cross-entropy from hidden states; the logits [B, T, V] never exist as a whole.

B batch, T sequence, D width, V vocabulary, C chunks, t tokens of a row in a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_CHUNK_TOKENS = 4096  # rows × t: bounds the logits at 4096 × V however long the rows are


class LossSums(NamedTuple):
    """Weighted sums over targets: cross-entropy in nats, squared log-normaliser, weights."""

    loss: jax.Array
    z: jax.Array
    weight: jax.Array


def chunk_length(batch: int, length: int) -> int:
    """Tokens of a row per chunk: a divisor of the length, so that two chunks are made at least."""
    limit = max(1, min(_CHUNK_TOKENS // batch, length // 2))
    return next(n for n in range(limit, 0, -1) if length % n == 0)


def cross_entropy_sums(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
) -> LossSums:
    """Sums of the cross-entropy over all targets, chunk by chunk along the rows.

    Args:
      hidden_BTD: normed hidden states in the compute dtype.
      head_VD: the output matrix; cast to the compute dtype.
      targets_BT: the next tokens.
      weights_BT: 0 leaves a target out.

    Returns:
      Sums in float32 (float64 for float64 states).
    """
    B, T, _ = hidden_BTD.shape
    t = chunk_length(B, T)
    dtype = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    head_VD = head_VD.astype(hidden_BTD.dtype)

    @jax.checkpoint
    def chunk_sums(hidden_BtD: jax.Array, targets_Bt: jax.Array, weights_Bt: jax.Array) -> LossSums:
        logits_BtV = jnp.einsum("btd,vd->btv", hidden_BtD, head_VD, preferred_element_type=dtype)
        lse_Bt = jax.nn.logsumexp(logits_BtV, axis=-1)
        target_Bt = jnp.take_along_axis(logits_BtV, targets_Bt[..., None], axis=-1)[..., 0]
        weights_Bt = weights_Bt.astype(dtype)
        return LossSums(
            jnp.sum(weights_Bt * (lse_Bt - target_Bt)),
            jnp.sum(weights_Bt * jnp.square(lse_Bt)),
            jnp.sum(weights_Bt),
        )

    def body(sums: LossSums, chunk: tuple[jax.Array, ...]) -> tuple[LossSums, None]:
        return jax.tree.map(jnp.add, sums, chunk_sums(*chunk)), None

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, T // t, t, *x.shape[2:]), 1, 0)

    zeros = LossSums(*(jnp.zeros((), dtype) for _ in LossSums._fields))
    chunks = (split(hidden_BTD), split(targets_BT), split(weights_BT))
    return lax.scan(body, zeros, chunks)[0]
