"""AdamW with decay groups, and the learning-rate schedules.

Update t = 1 … steps uses peak · t / W for t ≤ W and the final rate exactly at t = steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.parallel.sharding import path_name


def schedule(config: FrozenConfigDict) -> optax.Schedule:
    """The learning rate of update t, t counted from 1."""
    optim, steps = config.optim, config.train.steps
    peak, final, warmup = optim.learning_rate, optim.final_learning_rate, optim.warmup_steps
    length = optim.cooldown_steps if optim.schedule == "wsd" else steps - warmup
    length = max(length, 1)

    def rate(update: jax.Array) -> jax.Array:
        progress = jnp.clip((update - (steps - length)) / length, 0.0, 1.0)
        if optim.schedule == "constant":
            decayed = jnp.asarray(peak)
        elif optim.schedule == "cosine":
            decayed = final + (peak - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        else:
            decayed = peak + (final - peak) * progress
        return jnp.where(update < warmup, peak * update / max(warmup, 1), decayed)

    return rate


def decay_mask(params: Any) -> Any:
    """True for matrices: projections, embedding and head; False for gains, queries, gates, nulls.

    Layer parameters are stacked as [L, …], so a matrix has one axis more there.
    """

    def one(path: Any, leaf: jax.Array) -> bool:
        return leaf.ndim - (path[0].key == "layers") >= 2

    return jax.tree_util.tree_map_with_path(one, params)


def is_routing(name: str) -> bool:
    """Whether a parameter belongs to a reader, by its path `layers/attn_reader/routing/query`."""
    return "_reader/" in name


def routing_mask(params: Any) -> Any:
    """True for the parameters of readers."""
    return jax.tree_util.tree_map_with_path(lambda path, _: is_routing(path_name(path)), params)


def routing_scale(config: FrozenConfigDict) -> float:
    """The learning rate of routing parameters over that of all others; the schedule is shared."""
    optim = config.optim
    return optim.routing_learning_rate / optim.learning_rate if optim.routing_learning_rate else 1.0


def without_frozen(config: FrozenConfigDict, grads: Any) -> Any:
    """The gradients, zero for what `optim.freeze_base` keeps; the compiler drops their making."""
    if not config.optim.freeze_base:
        return grads
    return jax.tree.map(
        lambda grad, moves: grad if moves else jnp.zeros_like(grad), grads, routing_mask(grads)
    )


def make_optimizer(config: FrozenConfigDict) -> optax.GradientTransformation:
    """Clip by the global norm, Adam, decoupled decay, minus the learning rate.

    With `optim.freeze_base` routing parameters alone move and have moments.
    """
    optim = config.optim
    rate = schedule(config)
    parts = [optax.clip_by_global_norm(optim.clip_norm)] if optim.clip_norm else []
    parts += [
        optax.scale_by_adam(optim.b1, optim.b2, optim.eps),
        optax.add_decayed_weights(
            optim.weight_decay, decay_mask if optim.decay == "matrices" else None
        ),
        optax.scale_by_learning_rate(lambda count: rate(count + 1)),  # optax counts from 0
    ]
    if optim.routing_learning_rate:
        parts.append(optax.masked(optax.scale(routing_scale(config)), routing_mask))
    if not optim.freeze_base:
        return optax.chain(*parts)
    return optax.partition(
        {"routing": optax.chain(*parts), "base": optax.set_to_zero()},
        lambda params: jax.tree.map(lambda moves: ("base", "routing")[moves], routing_mask(params)),
    )
