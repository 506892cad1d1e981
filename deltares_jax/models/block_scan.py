"""All blocks under one derivative rule, as a scan over them: a small program for any N.

Autodiff of a scan that carries the sources saves all of them at each block. Here they lie once in
one buffer. Kept are the buffer and the state at the start of each block; the layers of a block run
once more before their backward passes if there is more than one.

B batch, T sequence, D width, L layers, N blocks, m layers of a block, S source slots.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import block_rule, residual, variants
from deltares_jax.models.block_rule import ApplyLayer, Extent, Kept
from deltares_jax.models.layers import Context
from deltares_jax.models.residual import State

Params = Any


def run(
    config: FrozenConfigDict,
    apply_layer: ApplyLayer,
    per_block: int,
    params: Params,
    state: State,
    context: Context,
) -> State:
    """The state after the last block.

    Args:
      config: of the model.
      apply_layer: one layer on its own parameters.
      per_block: m.
      params: of the layers of all blocks, stacked as [N m, …].
      state: the state before the first block, with its sources in a buffer.
      context: what all layers read.
    """
    blocks = _Blocks(config, apply_layer, per_block)
    rule = jax.custom_vjp(lambda *args: blocks.forward(*args)[0])
    rule.defvjp(blocks.forward, blocks.backward)
    result: State = rule(params, state, context)
    return result


def _pin(sources: Any) -> Any:
    return nn.with_logical_constraint(sources, (None, "batch", "length", "embed"))


class _Blocks:
    """Forward and backward pass of the rule for one model."""

    def __init__(self, config: FrozenConfigDict, apply_layer: ApplyLayer, per_block: int):
        self.config, self.apply_layer, self.per_block = config, apply_layer, per_block
        self.row = variants.VARIANTS[config.residual.variant]

    def _view(self, params: Params) -> tuple[Params, jax.Array]:
        """Parameters as [N, m, …] and the numbers of the blocks, for a scan over them."""

        def one(stack: jax.Array) -> jax.Array:
            stack = block_rule.flat(self.config, stack)
            return stack.reshape(-1, self.per_block, *stack.shape[1:])

        view = jax.tree.map(one, params)
        return view, jnp.arange(len(jax.tree.leaves(view)[0]))

    def _extent(self, block: Any) -> Extent:
        return Extent(block, block * self.per_block, self.per_block)

    def _kept(
        self, own: Params, start: State, sources: Any, params: Params, context: Context
    ) -> Kept:
        logits = residual.block_logits(self.config, own, sources)
        return Kept((start,), None, sources, logits, params, context, made=False)

    def forward(self, params: Params, state: State, context: Context) -> tuple[State, Any]:
        """The state after the last block, and what the backward pass reads."""

        def body(state: State, xs: Any) -> tuple[State, Any]:
            own, block = block_rule.cast(self.config, xs[0]), xs[1]
            moving, fixed = residual.split(self.config, state)
            logits = residual.block_logits(self.config, own, fixed)
            extent = self._extent(block)
            args = (own, moving, fixed, logits, context, params)
            after, _ = block_rule.run_layers(self.apply_layer, extent, *args, keep=False)
            # Nothing may read the buffer once it is written to: it would be copied.
            closed = lax.optimization_barrier(residual.join(after, fixed))
            stream_BTD, sources = residual.close_block(self.config, state, closed, block)
            kept = None if self.row.stream == "restart" else moving.stream_BTD
            return State(stream_BTD, _pin(sources)), kept

        last, starts_NBTD = lax.scan(body, state, self._view(params))
        return last, (params, context, last, starts_NBTD)

    def backward(self, residuals: Any, d_last: State) -> tuple[Params, State, None]:
        """Gradients of the arguments of `forward`."""
        params, context, (stream_BTD, sources), starts_NBTD = residuals

        def body(d_state: State, xs: Any) -> tuple[State, Params]:
            flat_own, block, start_BTD = xs
            own = block_rule.cast(self.config, flat_own)
            if start_BTD is None:
                start_BTD = jnp.zeros_like(stream_BTD)
            d_closed, d_opened, d_sources = self._open(d_state, start_BTD, sources, block)
            kept = self._kept(own, State(start_BTD, None), sources, params, context)
            d_own, d_start, d_sources = block_rule.differentiate(
                self.config,
                self.apply_layer,
                self._extent(block),
                kept,
                own,
                State(d_closed, None),
                d_sources,
            )
            return State(d_start.stream_BTD + d_opened, _pin(d_sources)), d_own

        d_first, d_blocks = lax.scan(body, d_last, (*self._view(params), starts_NBTD), reverse=True)
        return jax.tree.map(lambda d, p: d.reshape(p.shape), d_blocks, params), d_first, None

    def _open(
        self, d_state: State, start_BTD: jax.Array, sources: Any, block: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """From the gradient of the state after a block is closed to those of before.

        Returns the gradients of the stream at the end of the block and at its start, and of the
        sources without the new one.
        """
        slot = self.row.seeded + block

        def close(
            stream_BTD: jax.Array, start_BTD: jax.Array, newest_BTD: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            opened, state = State(start_BTD, (newest_BTD,)), State(stream_BTD, (newest_BTD,))
            closed = residual.close_block(self.config, opened, state, block)
            return closed.stream_BTD, closed.sources[-1]

        d_source_BTD = lax.dynamic_index_in_dim(d_state.sources, slot, 0, keepdims=False)
        newest_BTD = lax.dynamic_index_in_dim(sources, slot - 1, 0, keepdims=False)
        # Closing is linear: the streams stand for any others.
        pull = jax.vjp(close, start_BTD, start_BTD, newest_BTD)[1]
        d_closed, d_opened, d_newest = pull((d_state.stream_BTD, d_source_BTD))
        d_sources = lax.dynamic_update_index_in_dim(
            d_state.sources, jnp.zeros_like(d_source_BTD), slot, 0
        )
        d_sources = d_sources.at[jnp.maximum(slot - 1, 0)].add(d_newest)
        return d_closed, d_opened, d_sources
