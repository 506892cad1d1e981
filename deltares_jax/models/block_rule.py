"""The layers of one block under a derivative rule of their own, for `model.remat=full`.

Autodiff of a scan keeps what the scan reads: a copy of the block's slice of every stacked parameter
and all of its sources, from the forward to the backward pass. The rule keeps the input of each
layer alone. Parameters are sliced again, in the compute dtype, and sources made again from the
inputs of the blocks where they are read.

An argument that is differentiated but not read has a twin that is read: the gradient of `own`, the
block's slice of the parameters, flows while the values come from `whole`.

The sources come out as they went in, so that their gradients go from block to block and each adds
its own: else those of all blocks would be kept and added up at the end, N² / 2 of them.

B batch, T sequence, D width, L layers, m layers of a block, S source slots.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import residual
from deltares_jax.models.layers import Context
from deltares_jax.models.made_sources import Made, make
from deltares_jax.models.routing_ops import statistics_dtype

Params = Any
# (layer parameters, moving state, layer, logits, block, fixed, context) -> moving state
ApplyLayer = Callable[..., residual.State]


class Extent(NamedTuple):
    """Which layers a block has: its number, its first layer in the stack, its length in layers."""

    block: int
    first: int
    length: int


class Kept(NamedTuple):
    """What the backward pass of a block reads.

    starts: the state at the start of each block up to this one.
    inner: the inputs of the layers after the first, [m − 1, B, T, D]; None where not kept.
    fixed: the sources, None where they are made from the starts or there are none.
    logits: of the block's readers over the sources, or None.
    whole: the parameters of all layers.
    made: whether the sources are made from the starts.
    """

    starts: tuple[residual.State, ...]
    inner: Any
    fixed: Any
    logits: Any
    whole: Params
    context: Context
    made: bool


def run_block(
    config: FrozenConfigDict,
    apply_layer: ApplyLayer,
    extent: Extent,
    params: Params,
    state: residual.State,
    earlier: tuple[residual.State, ...],
    context: Context,
) -> residual.State:
    """The state after the last layer of a block, which is not closed yet.

    Args:
      config: of the model.
      apply_layer: one layer on its own parameters.
      extent: the block's place in the stack.
      params: the parameters of all layers, [L, …].
      state: the state at the start of the block.
      earlier: the states at the starts of the blocks before.
      context: what all layers read.
    """
    moving, fixed = residual.split(config, state)
    earlier = tuple(residual.split(config, start)[0] for start in earlier)
    last = extent.first + extent.length
    own = jax.tree.map(lambda p: p[extent.first : last], params)
    rule = _rule(config, apply_layer, extent)
    return residual.join(*rule(own, moving, fixed, lax.stop_gradient(params), context, earlier))


def _rule(config: FrozenConfigDict, apply_layer: ApplyLayer, extent: Extent) -> Callable[..., Any]:
    made = residual.starts_make_sources(config)

    def primal(*args: Any) -> Any:
        return save(*args)[0]

    def save(
        _: Params, moving: Any, fixed: Any, whole: Params, context: Context, earlier: Any
    ) -> tuple[Any, Kept]:
        own = _slice(config, whole, extent, moving)
        logits = residual.block_logits(config, own, fixed)
        args = (own, moving, fixed, logits, context, whole)
        after, inner = run_layers(apply_layer, extent, *args, keep=True)
        starts = (*earlier, moving)
        kept = Kept(starts, inner, None if made else fixed, logits, whole, context, made)
        return (after, fixed), kept

    def derivative(kept: Kept, d_results: Any) -> tuple[Any, ...]:
        d_after, d_fixed = d_results
        own = _slice(config, kept.whole, extent, d_after)
        grads = differentiate(config, apply_layer, extent, kept, own, d_after, d_fixed)
        return *grads, None, None, None

    rule = jax.custom_vjp(primal)
    rule.defvjp(save, derivative)
    return rule


def differentiate(
    config: FrozenConfigDict,
    apply_layer: ApplyLayer,
    extent: Extent,
    kept: Kept,
    own: Params,
    d_after: Any,
    d_fixed: Any,
) -> tuple[Params, Any, Any]:
    """The backward pass of a block.

    Args:
      config: of the model.
      apply_layer: one layer on its own parameters.
      extent: the block's place in the stack; the number may be traced.
      kept: from the forward pass.
      own: the block's parameters, flat and in the compute dtype, [m, …].
      d_after: gradient of the state after the last layer.
      d_fixed: that of the sources, from what comes after the block.

    Returns:
      The gradients of `own` in the shapes and dtypes of the stack, of the state at the start, and
      of the sources with what the block adds.
    """
    inner, start = kept.inner, kept.starts[-1]
    if inner is None and extent.length > 1:
        fixed = _fixed_sources(kept, d_after)
        args = (own, start, fixed, kept.logits, kept.context, kept.whole)
        inner = run_layers(apply_layer, extent, *args, keep=True)[1]

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        d_after, d_fixed = carry
        params, layer, logits = xs
        moving = _get(inner, start, layer - 1)
        # Ties the sources to the loop: they would be converted, and kept, outside of it.
        d_after, fixed = lax.optimization_barrier((d_after, kept.fixed))

        def apply(params: Params, moving: Any, logits: Any, fixed: Any) -> Any:
            if kept.made:
                fixed = Made(fixed, kept.starts, config.dtype)
            args = (layer, logits, extent.block, fixed, kept.context)
            return apply_layer(unflat(params, kept.whole), moving, *args)

        # Unrounded, so that the sum over the readers is fused and rounded once.
        read = jax.tree.map(lambda d: d.astype(statistics_dtype(d.dtype)), d_fixed)
        vjp = jax.vjp(apply, params, moving, logits, read if kept.made else fixed)[1]
        d_params, d_moving, d_logits, d_more = vjp(d_after)
        d_fixed = jax.tree.map(lambda d, more: (d + more).astype(d.dtype), d_fixed, d_more)
        return (d_moving, d_fixed), (d_params, d_logits)

    (d_moving, d_fixed), (d_own, d_logits) = lax.scan(
        body, (d_after, d_fixed), (own, jnp.arange(extent.length), kept.logits), reverse=True
    )
    fixed = _fixed_sources(kept, d_moving)
    logits_vjp = jax.vjp(functools.partial(residual.block_logits, config), own, fixed)[1]
    d_own, d_fixed = jax.tree.map(jnp.add, (d_own, d_fixed), logits_vjp(d_logits))
    d_own = jax.tree.map(
        lambda d, p: d.reshape(-1, *p.shape[1:]).astype(p.dtype), d_own, kept.whole
    )
    return d_own, d_moving, d_fixed


def _fixed_sources(kept: Kept, when: Any) -> Any:
    return make(lax.optimization_barrier((when, kept.starts))[1]) if kept.made else kept.fixed


def run_layers(
    apply_layer: ApplyLayer,
    extent: Extent,
    own: Params,
    moving: Any,
    fixed: Any,
    logits: Any,
    context: Context,
    whole: Params,
    keep: bool,
) -> tuple[Any, Any]:
    """The state after the last layer of a block, and `Kept.inner` if it is to be kept."""
    inner = None
    if keep and extent.length > 1:
        later = extent.length - 1
        inner = jax.tree.map(lambda x: lax.empty((later, *x.shape), x.dtype), moving)

    def body(carry: Any, xs: Any) -> tuple[Any, None]:
        moving, inner = carry
        flat, layer, logits = xs
        inner = _put(inner, moving, layer - 1)
        args = (layer, logits, extent.block, fixed, context)
        return (apply_layer(unflat(flat, whole), moving, *args), inner), None

    return lax.scan(body, (moving, inner), (own, jnp.arange(extent.length), logits))[0]


def _put(inner: Any, moving: Any, index: jax.Array) -> Any:
    """Writes an input; that of the first layer, at −1, is overwritten by the next one's."""
    if inner is None:
        return None
    index = jnp.maximum(index, 0)
    return jax.tree.map(lambda i, m: lax.dynamic_update_index_in_dim(i, m, index, 0), inner, moving)


def _get(inner: Any, start: Any, index: jax.Array) -> Any:
    """The input at an index; that of the first layer, at −1, is the start."""
    if inner is None:
        return start

    def one(inner: jax.Array, start: jax.Array) -> jax.Array:
        later = lax.dynamic_index_in_dim(inner, jnp.maximum(index, 0), 0, keepdims=False)
        return jnp.where(index < 0, start, later)

    return jax.tree.map(one, inner, start)


def _zero_after(value: Any) -> jax.Array:
    """A 0 that the compiler cannot know before `value` is there.

    As an index it keeps what is indexed from being made earlier than it is wanted: the scheduler
    would make the slices of all blocks at once.
    """
    leaf = jax.tree.leaves(value)[0]
    return jnp.isnan(leaf[(0,) * leaf.ndim]).astype(jnp.int32)


def _slice(config: FrozenConfigDict, whole: Params, extent: Extent, when: Any) -> Params:
    """The parameters of a block, matrices in the compute dtype, to which the layers cast them."""
    first = extent.first + _zero_after(when)

    def one(stack: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(flat(config, stack), first, extent.length)

    return cast(config, jax.tree.map(one, whole))


def cast(config: FrozenConfigDict, own: Params) -> Params:
    """Stacked matrices in the compute dtype, vectors as they are."""
    return jax.tree.map(lambda p: p.astype(config.dtype) if p.ndim > 2 else p, own)


def flat(config: FrozenConfigDict, stack: jax.Array) -> jax.Array:
    """Heads and head_dim as one axis: the compiler would copy the stack for another layout."""
    if stack.ndim < 4:
        return stack
    m, a, b, c = stack.shape
    return stack.reshape((m, a, b * c) if c == config.head_dim else (m, a * b, c))


def unflat(layer: Params, whole: Params) -> Params:
    """The parameters of one layer in the shapes that it wants, from flat ones."""
    return jax.tree.map(lambda p, w: p.reshape(w.shape[1:]), layer, whole)
