"""Causal attention that stays inside a document: one signature, several implementations.

B batch, T queries, S keys, H query heads, K key/value heads, G = H/K, N = G · T, d head_dim.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from deltares_jax.models.routing_ops import statistics_dtype

# Scores are computed in tiles of this side where the row is long enough.
_SPLASH_BLOCK = 512
_SPLASH_MULTIPLE = 128


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


def _mask(segments_BT: jax.Array) -> jax.Array:
    """[B, T, S]: a token sees itself and earlier ones of its own segment.

    Every token sees at least itself, padding included (it is a segment of its own), so no row is
    ever fully masked.
    """
    T = segments_BT.shape[1]
    causal_TS = jnp.tril(jnp.ones((T, T), bool))
    return (segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TS[None]


def reference(
    q_BTHd: jax.Array, k_BTKd: jax.Array, v_BTKd: jax.Array, segments_BT: jax.Array
) -> jax.Array:
    """Plain softmax attention on any platform. Holds [B, H, T, T] in float32 or wider."""
    return masked(q_BTHd, k_BTKd, v_BTKd, _mask(segments_BT))


def masked(
    q_BTHd: jax.Array, k_BSKd: jax.Array, v_BSKd: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Softmax attention [B, T, H, d] of T queries over those of S keys that the mask lets see.

    The mask must let every query see a key.
    """
    B, T, H, d = q_BTHd.shape
    K = k_BSKd.shape[2]
    q_BKNd = q_BTHd.reshape(B, T, K, H // K, d).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, d)
    out_BKNd = _average(q_BKNd, k_BSKd.swapaxes(1, 2), v_BSKd.swapaxes(1, 2), mask_BTS)
    return out_BKNd.reshape(B, K, H // K, T, d).transpose(0, 3, 1, 2, 4).reshape(B, T, H, d)


@jax.custom_vjp
def _average(
    q_BKNd: jax.Array, k_BKSd: jax.Array, v_BKSd: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """What the N = G · T queries of each key/value head read of its values, [B, K, N, d].

    The derivative of the softmax is taken from the output, as in FlashAttention (arXiv 2205.14135,
    section 3.1), and no matrix of scores is turned over: on a CPU that takes as long as a product.
    """
    return _average_forward(q_BKNd, k_BKSd, v_BKSd, mask_BTS)[0]


def _average_forward(
    q_BKNd: jax.Array, k_BKSd: jax.Array, v_BKSd: jax.Array, mask_BTS: jax.Array
) -> tuple[jax.Array, Any]:
    B, K, N, d = q_BKNd.shape
    dtype = statistics_dtype(q_BKNd.dtype)
    logits_BKNS = jnp.einsum("bknd,bksd->bkns", q_BKNd, k_BKSd, preferred_element_type=dtype)
    logits_BKGTS = (logits_BKNS * d**-0.5).reshape(B, K, -1, *mask_BTS.shape[1:])
    logits_BKGTS = jnp.where(mask_BTS[:, None, None], logits_BKGTS, jnp.finfo(dtype).min)
    logits_BKNS = logits_BKGTS.reshape(B, K, N, -1)
    parts_BKNS = jnp.exp(logits_BKNS - jnp.max(logits_BKNS, axis=-1, keepdims=True))
    share_BKN1 = 1 / jnp.sum(parts_BKNS, axis=-1, keepdims=True)
    parts_BKNS = parts_BKNS.astype(v_BKSd.dtype)
    out_BKNd = jnp.einsum("bkns,bksd->bknd", parts_BKNS, v_BKSd, preferred_element_type=dtype)
    out_BKNd = (out_BKNd * share_BKN1).astype(v_BKSd.dtype)
    return out_BKNd, (q_BKNd, k_BKSd, v_BKSd, parts_BKNS, share_BKN1, out_BKNd)


def _average_backward(kept: Any, d_out_BKNd: jax.Array) -> tuple[Any, ...]:
    q_BKNd, k_BKSd, v_BKSd, parts_BKNS, share_BKN1, out_BKNd = kept
    dtype = share_BKN1.dtype
    own_BKN1 = jnp.sum(d_out_BKNd.astype(dtype) * out_BKNd, axis=-1, keepdims=True)
    d_weights_BKNS = jnp.einsum("bknd,bksd->bkns", d_out_BKNd, v_BKSd, preferred_element_type=dtype)
    scaled_BKN1 = share_BKN1 * q_BKNd.shape[-1] ** -0.5
    d_logits_BKNS = parts_BKNS * (scaled_BKN1 * (d_weights_BKNS - own_BKN1))
    d_logits_BKNS = d_logits_BKNS.astype(q_BKNd.dtype)
    d_q_BKNd = jnp.einsum("bkns,bksd->bknd", d_logits_BKNS, k_BKSd)
    d_k_BKdS = jnp.einsum("bknd,bkns->bkds", q_BKNd, d_logits_BKNS)
    shared_BKNd = (d_out_BKNd * share_BKN1).astype(v_BKSd.dtype)
    d_v_BKdS = jnp.einsum("bknd,bkns->bkds", shared_BKNd, parts_BKNS)
    return d_q_BKNd, d_k_BKdS.swapaxes(2, 3), d_v_BKdS.swapaxes(2, 3), None


_average.defvjp(_average_forward, _average_backward)


@functools.cache
def _tile(rows: int, columns: int, offset: int) -> np.ndarray:
    """Part of a causal mask that begins `offset` further along the rows than along the columns."""
    return np.arange(rows)[:, None] + offset >= np.arange(columns)


@functools.cache
def causal_mask_class() -> Any:
    """JAX's causal mask with tiles that are made once.

    Splash looks at each tile of T × T on the host, for a program once. On a busy machine of two
    cores that took 50 s at 65536 tokens; with these tiles 11 s, and 39 s at 131072.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class CausalMask(masks.CausalMask):
        def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
            rows, columns = (side.stop - side.start for side in tile)
            offset = tile[0].start - tile[1].start
            return _tile(rows, columns, max(-rows, min(offset, columns)))

    return CausalMask


def splash(
    q_BTHd: jax.Array,
    k_BTKd: jax.Array,
    v_BTKd: jax.Array,
    segments_BT: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """The splash kernel of JAX for TPU: masked tiles are skipped, nothing of size T × T is held."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T = q_BTHd.shape[1]
    side = next(n for n in (_SPLASH_BLOCK, 256, _SPLASH_MULTIPLE) if T % n == 0)
    blocks = kernel.BlockSizes(
        block_q=side,
        block_kv=side,
        block_kv_compute=side,
        block_q_dkv=side,
        block_kv_dkv=side,
        block_kv_dkv_compute=side,
        block_q_dq=side,
        block_kv_dq=side,
    )

    def local(
        q_BTHd: jax.Array, k_BTKd: jax.Array, v_BTKd: jax.Array, segments_BT: jax.Array
    ) -> jax.Array:
        heads = [causal_mask_class()((T, T)) for _ in range(q_BTHd.shape[2])]
        attention = kernel.make_splash_mha(
            masks.MultiHeadMask(heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            # What the backward pass needs of the forward one, by the name that remat knows.
            residual_checkpoint_name="attention",
            interpret=interpret,
        )
        scale = q_BTHd.shape[-1] ** -0.5
        q_BHTd, k_BKTd, v_BKTd = (x.swapaxes(1, 2) for x in (q_BTHd * scale, k_BTKd, v_BTKd))
        segments = kernel.SegmentIds(segments_BT, segments_BT)
        return jax.vmap(attention)(q_BHTd, k_BKTd, v_BKTd, segments).swapaxes(1, 2)

    if jax.sharding.get_abstract_mesh().empty:
        return local(q_BTHd, k_BTKd, v_BTKd, segments_BT)
    heads = nn.logical_to_mesh_axes(("batch", None, "heads", None))
    rows = nn.logical_to_mesh_axes(("batch", None))
    sharded = jax.shard_map(
        local, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False
    )
    return sharded(q_BTHd, k_BTKd, v_BTKd, segments_BT)


def cudnn(
    q_BTHd: jax.Array, k_BTKd: jax.Array, v_BTKd: jax.Array, segments_BT: jax.Array
) -> jax.Array:
    """CuDNN's fused attention for GPU, with the document mask as [B, 1, T, S]."""
    mask_BHTS = _mask(segments_BT)[:, None]
    return jax.nn.dot_product_attention(
        q_BTHd, k_BTKd, v_BTKd, mask=mask_BHTS, implementation="cudnn"
    )


IMPLEMENTATIONS = {"reference": reference, "splash": splash, "cudnn": cudnn}


def choose(name: str, platform: str, seq_len: int, dtype: str) -> str:
    """The implementation that `model.attention` means on a platform.

    `auto` is splash on TPU and cuDNN on GPU where they can do the job, else the reference.

    Raises:
      ValueError: the named one does not run there, or cannot take the length or the dtype.
    """
    reasons = {
        "splash": (
            f"platform {platform}, it needs tpu"
            if platform != "tpu"
            else f"data.seq_len={seq_len}, it needs a multiple of {_SPLASH_MULTIPLE}"
            if seq_len % _SPLASH_MULTIPLE
            else f"model.dtype={dtype}, it needs bfloat16 or float32"
            if dtype == "float64"
            else ""
        ),
        "cudnn": (
            f"platform {platform}, it needs gpu"
            if platform not in ("gpu", "cuda")
            else f"model.dtype={dtype}, it needs bfloat16"
            if dtype != "bfloat16"
            else ""
        ),
    }
    if name == "auto":
        return next((n for n, reason in reasons.items() if not reason), "reference")
    if reasons.get(name):
        raise ValueError(f"model.attention={name} does not go with {reasons[name]}")
    return name


def attend(
    q_BTHd: jax.Array,
    k_BTKd: jax.Array,
    v_BTKd: jax.Array,
    segments_BT: jax.Array,
    implementation: str = "auto",
) -> jax.Array:
    """Attention [B, T, H, d] by the named implementation; `auto` goes by the default device."""
    if implementation == "auto":
        length, dtype = q_BTHd.shape[1], str(q_BTHd.dtype)
        implementation = choose("auto", jax.default_backend(), length, dtype)
    return IMPLEMENTATIONS[implementation](q_BTHd, k_BTKd, v_BTKd, segments_BT)
