"""Causal attention that stays inside a document.

B batch, T queries, S keys, H query heads, K key/value heads, G = H/K, d head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

from deltares_jax.models.routing_ops import statistics_dtype


def rotary_tables(
    positions_BT: jax.Array, head_dim: int, theta: float, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [B, T, 1, d/2] of the half-split rotation (RoFormer, as in Qwen3)."""
    period_d = theta ** (jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    angle_BTd = positions_BT[..., None].astype(dtype) / period_d[None, None]
    return jnp.cos(angle_BTd)[:, :, None], jnp.sin(angle_BTd)[:, :, None]


def rotate(x_BTHd: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the halves of the last axis against each other; statistics in float32 or wider."""
    cos, sin = rotary
    first, second = jnp.split(x_BTHd.astype(cos.dtype), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHd.dtype)


def reference(
    q_BTHd: jax.Array, k_BTKd: jax.Array, v_BTKd: jax.Array, segments_BT: jax.Array
) -> jax.Array:
    """Plain softmax attention; a token sees itself and earlier ones of its own segment.

    Every token sees at least itself, padding included (it is a segment of its own), so no row is
    ever fully masked. Holds [B, H, T, T].
    """
    B, T, H, d = q_BTHd.shape
    K = k_BTKd.shape[2]
    dtype = statistics_dtype(q_BTHd.dtype)
    q_BTKGd = q_BTHd.reshape(B, T, K, H // K, d)
    logits_BKGTS = jnp.einsum(
        "btkgd,bskd->bkgts", q_BTKGd, k_BTKd, preferred_element_type=dtype
    ) * (d**-0.5)
    causal_TS = jnp.tril(jnp.ones((T, T), bool))
    mask_BTS = (segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TS[None]
    logits_BKGTS = jnp.where(mask_BTS[:, None, None], logits_BKGTS, jnp.finfo(dtype).min)
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1).astype(v_BTKd.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights_BKGTS, v_BTKd).reshape(B, T, H, d)


IMPLEMENTATIONS = {"reference": reference}


def attend(
    q_BTHd: jax.Array,
    k_BTKd: jax.Array,
    v_BTKd: jax.Array,
    segments_BT: jax.Array,
    implementation: str = "auto",
) -> jax.Array:
    """Attention [B, T, H, d] by the named implementation; `auto` takes the platform's best."""
    name = "reference" if implementation == "auto" else implementation
    return IMPLEMENTATIONS[name](q_BTHd, k_BTKd, v_BTKd, segments_BT)
