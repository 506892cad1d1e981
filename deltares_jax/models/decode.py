"""The model token by token: keys and values of earlier tokens are cached, sources are not.

Routing goes over the depth, token by token, so it needs nothing of earlier ones: the loop below
keeps a state for the new tokens alone, through the same seam as training.

B batch, T new tokens, S cached positions, D width, V vocabulary, L layers, K key/value heads, d
head_dim.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import attention, depth, residual, transformer, variants
from deltares_jax.models.layers import Context, RMSNorm
from deltares_jax.models.routing_ops import statistics_dtype

Cache = dict[str, Any]


def empty_cache(config: FrozenConfigDict, rows: int, length: int) -> Cache:
    """Room for the keys and values of rows of at most `length` tokens, [L, B, S, K, d] each."""
    shape = (config.num_layers, rows, length, config.num_kv_heads, config.head_dim)
    axes = (None, "batch", None, "heads", None)
    empty = nn.with_logical_constraint(jnp.zeros(shape, config.dtype), axes)
    return {"attn": {"key": empty, "value": empty}}


def apply(
    config: FrozenConfigDict,
    params: Any,
    cache: Cache,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Runs the model on tokens that follow those in the cache.

    Each row is one document from position 0 on. A token sees the cached positions up to its own;
    what fills a row up is not seen as long as its position is written again before.

    Args:
      config: of the model.
      params: of the model.
      cache: from `empty_cache`, or from a call before.
      tokens_BT: the new tokens.
      positions_BT: their positions, below S.

    Returns:
      Normed hidden states [B, T, D], to be multiplied with `transformer.head`, and the cache.
    """
    dtype = statistics_dtype(config.dtype)
    rotary = attention.rotary_tables(positions_BT, config.head_dim, config.rope_theta, dtype)
    context = Context(rotary, jnp.ones_like(positions_BT), positions_BT)
    variant, num_blocks = config.residual.variant, config.residual.num_blocks
    per_block = variants.layers_per_block(variant, config.num_layers, num_blocks)
    layer_class = depth.Layer(config, per_block, False)

    def body(carry: Any, xs: Any) -> tuple[Any, Cache]:
        opened, state = carry
        layer_params, layer_cache, number = xs
        block, layer = number // per_block, number % per_block
        moving, fixed = residual.split(config, state)
        variables = {"params": layer_params, "cache": layer_cache}
        (moving, _), updated = layer_class.apply(
            variables, moving, layer, None, block, fixed, context, mutable=["cache"]
        )
        state = residual.join(moving, fixed)
        last = (layer == per_block - 1) | (number == config.num_layers - 1)
        closed = residual.close_block(config, opened, state, block)
        state = jax.tree.map(lambda new, old: jnp.where(last, new, old), closed, state)
        opened = jax.tree.map(lambda new, old: jnp.where(last, new, old), state, opened)
        return (opened, state), updated["cache"]

    # New tokens are too few to be cut among devices.
    rules = [(name, None if name == "length" else to) for name, to in nn.get_logical_axis_rules()]
    with nn.logical_axis_rules(rules):
        start = residual.start(config, transformer.embed(config, params["embedding"], tokens_BT))
        xs = (params["layers"], cache, jnp.arange(config.num_layers))
        (_, state), cache = lax.scan(body, (start, start), xs)
        scope = {"params": params.get("final_reader", {})}
        reader: Any = residual.FinalReader(config)
        h_BTD, _ = reader.apply(scope, state)
        norm: Any = RMSNorm(config.norm_eps)
        return norm.apply({"params": params["final_norm"]}, h_BTD), cache
