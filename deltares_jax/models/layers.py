"""The sublayers of a Qwen3 decoder: RMSNorm, attention, MLP (arXiv 2505.09388).

Between sublayers T is cut along the tensor axis; inside, T is whole, and heads or F are cut.

B batch, T sequence, D width, H query heads, K key/value heads, d head_dim, F MLP width.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import attention
from deltares_jax.models.routing_ops import statistics_dtype

INIT = nn.initializers.normal(0.02)


class Context(NamedTuple):
    """What every layer reads besides the stream.

    rotary: cosine and sine tables, [B, T, 1, d/2] each. segments_BT: document ids.
    positions_BT: of the tokens in their row, where keys and values are cached.
    """

    rotary: tuple[jax.Array, jax.Array]
    segments_BT: jax.Array
    positions_BT: Any = None


def weight(module: nn.Module, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A projection's parameter, kept in float32 (or wider) and cast for the matmul."""
    return module.param(name, INIT, shape, statistics_dtype(dtype)).astype(dtype)


@jax.custom_vjp
def widen(x_BTD: jax.Array, weight_DF: jax.Array) -> jax.Array:
    """The product [B, T, F], where F is larger than D.

    Autodiff would take the gradient of the weight as dyᵀ · x; a CPU then turns dy over, where x is
    narrower.
    """
    return jnp.einsum("btd,df->btf", x_BTD, weight_DF)


def _widen_forward(x_BTD: jax.Array, weight_DF: jax.Array) -> tuple[jax.Array, Any]:
    return widen(x_BTD, weight_DF), (x_BTD, weight_DF)


def _widen_backward(kept: Any, dy_BTF: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTD, weight_DF = kept
    d_weight_DF = jnp.einsum("btd,btf->df", x_BTD, dy_BTF)
    return jnp.einsum("btf,df->btd", dy_BTF, weight_DF), d_weight_DF


widen.defvjp(_widen_forward, _widen_backward)


@jax.custom_vjp
def narrow(x_BTF: jax.Array, weight_FD: jax.Array) -> jax.Array:
    """The product [B, T, D], where F is larger than D; see `widen`."""
    return jnp.einsum("btf,fd->btd", x_BTF, weight_FD)


def _narrow_forward(x_BTF: jax.Array, weight_FD: jax.Array) -> tuple[jax.Array, Any]:
    return narrow(x_BTF, weight_FD), (x_BTF, weight_FD)


def _narrow_backward(kept: Any, dy_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTF, weight_FD = kept
    # The barrier keeps XLA from turning x over instead of the result.
    d_weight_DF = lax.optimization_barrier(jnp.einsum("btd,btf->df", dy_BTD, x_BTF))
    return jnp.einsum("btd,fd->btf", dy_BTD, weight_FD), d_weight_DF.T


narrow.defvjp(_narrow_forward, _narrow_backward)


def whole_rows(x_BTD: jax.Array) -> jax.Array:
    """Gathers along T; the first constraint keeps casts before the gathering of their result."""
    x_BTD = nn.with_logical_constraint(x_BTD, ("batch", "length", "embed"))
    return nn.with_logical_constraint(x_BTD, ("batch", None, "embed"))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · gain over the last axis, in float32 or wider."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis of x; same shape and dtype."""
        dtype = statistics_dtype(x.dtype)
        gain = self.param("gain", nn.initializers.ones, (x.shape[-1],), dtype)
        wide = x.astype(dtype)
        square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        gain = jnp.expand_dims(gain, range(x.ndim - 1))
        return (wide * lax.rsqrt(square + self.eps) * gain).astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm over head_dim on queries and keys, then RoPE."""

    config: FrozenConfigDict

    @nn.compact
    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        """The output [B, T, D] of a normed input."""
        cfg = self.config
        D, H, K, d = cfg.width, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        x_BTD = whole_rows(x_BTD)
        q_BTHd = jnp.einsum("btd,dhk->bthk", x_BTD, weight(self, "query", (D, H, d), cfg.dtype))
        k_BTKd = jnp.einsum("btd,dhk->bthk", x_BTD, weight(self, "key", (D, K, d), cfg.dtype))
        v_BTKd = jnp.einsum("btd,dhk->bthk", x_BTD, weight(self, "value", (D, K, d), cfg.dtype))
        # Else the backward pass would cut these along T, as their outputs are, and reshuffle them.
        q_BTHd, k_BTKd, v_BTKd = (
            nn.with_logical_constraint(x, ("batch", None, "heads", None))
            for x in (q_BTHd, k_BTKd, v_BTKd)
        )
        q_BTHd = RMSNorm(cfg.norm_eps, name="query_norm")(q_BTHd)
        k_BTKd = RMSNorm(cfg.norm_eps, name="key_norm")(k_BTKd)
        q_BTHd = checkpoint_name(attention.rotate(q_BTHd, context.rotary), "projection")
        k_BTKd = checkpoint_name(attention.rotate(k_BTKd, context.rotary), "projection")
        v_BTKd = checkpoint_name(v_BTKd, "projection")
        if self.has_variable("cache", "key"):
            out_BTHd = self._attend_cached(q_BTHd, k_BTKd, v_BTKd, context.positions_BT)
        else:
            out_BTHd = attention.attend(q_BTHd, k_BTKd, v_BTKd, context.segments_BT, cfg.attention)
        out_BTHd = checkpoint_name(out_BTHd, "attention")
        out_BTHd = nn.with_logical_constraint(out_BTHd, ("batch", None, "heads", None))
        return jnp.einsum("bthk,hkd->btd", out_BTHd, weight(self, "out", (H, d, D), cfg.dtype))

    def _attend_cached(
        self, q_BTHd: jax.Array, k_BTKd: jax.Array, v_BTKd: jax.Array, positions_BT: jax.Array
    ) -> jax.Array:
        """Attends over what is cached, [B, S, K, d], and adds to it; slot s is position s."""
        rows_B1 = jnp.arange(q_BTHd.shape[0])[:, None]
        for name, new_BTKd in (("key", k_BTKd), ("value", v_BTKd)):
            kept_BSKd: jax.Array = self.get_variable("cache", name)
            self.put_variable("cache", name, kept_BSKd.at[rows_B1, positions_BT].set(new_BTKd))
        key_BSKd: jax.Array = self.get_variable("cache", "key")
        seen_BTS = jnp.arange(key_BSKd.shape[1])[None, None] <= positions_BT[..., None]
        return attention.masked(q_BTHd, key_BSKd, self.get_variable("cache", "value"), seen_BTS)


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    config: FrozenConfigDict

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """The output [B, T, D] of a normed input."""
        cfg = self.config
        D, F = cfg.width, cfg.mlp_width
        x_BTD = whole_rows(x_BTD)
        gate_BTF = widen(x_BTD, weight(self, "gate", (D, F), cfg.dtype))
        up_BTF = widen(x_BTD, weight(self, "up", (D, F), cfg.dtype))
        gate_BTF, up_BTF = (
            nn.with_logical_constraint(x, ("batch", None, "mlp")) for x in (gate_BTF, up_BTF)
        )
        gate_BTF = checkpoint_name(gate_BTF, "projection")
        up_BTF = checkpoint_name(up_BTF, "projection")
        hidden_BTF = nn.silu(gate_BTF) * up_BTF
        hidden_BTF = nn.with_logical_constraint(hidden_BTF, ("batch", None, "mlp"))
        return narrow(hidden_BTF, weight(self, "down", (F, D), cfg.dtype))


def apply_sublayer(
    config: FrozenConfigDict, params: Any, kind: str, x_BTD: jax.Array, context: Context
) -> jax.Array:
    """The output of a sublayer, `attn` or `mlp`, on what its reader reads.

    Args:
      config: of the model.
      params: of the layer: `attn_norm`, `attn`, `mlp_norm`, `mlp`.
      kind: the sublayer.
      x_BTD: its input, before the norm.
      context: what all layers read.
    """
    norm = RMSNorm(config.norm_eps)
    x: Any = norm.apply({"params": params[f"{kind}_norm"]}, x_BTD)
    scope = {"params": params[kind]}
    y: Any = (
        Attention(config).apply(scope, x, context)
        if kind == "attn"
        else MLP(config).apply(scope, x)
    )
    return nn.with_logical_constraint(y, ("batch", "length", "embed"))
