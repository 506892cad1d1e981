"""Sources that are made anew at each use from the streams at the starts of the blocks.

So the backward pass of a block holds none of them while its sublayers run.

B batch, T sequence, D width, S source slots.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from deltares_jax.models import residual
from deltares_jax.models.routing_ops import mix


def make(starts: tuple[residual.State, ...]) -> tuple[jax.Array, ...]:
    """The sources of a block from the states at the starts of the blocks up to it."""
    return residual.sources_from_starts(tuple(s.stream_BTD for s in starts))


@struct.dataclass
class Made:
    """Sources that are made anew at each use. Gradients flow to `twins`, which are not read."""

    twins: tuple[jax.Array, ...]
    starts: tuple[residual.State, ...]
    dtype: str = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """[S, B, T, D], as if the sources lay in one array."""
        return (len(self.twins), *self.twins[0].shape)

    def mix(self, factors_SBT: jax.Array) -> jax.Array:
        """See routing_ops.mix."""
        return _mixer(self.dtype)(self.twins, self.starts, factors_SBT)


def _mixer(dtype: str) -> Callable[..., jax.Array]:
    """The mix of made sources of a dtype, as a function of (twins, starts, factors)."""

    def made(starts: Any, when: jax.Array) -> tuple[Any, jax.Array]:
        when, starts = lax.optimization_barrier((when, starts))
        return make(starts), when

    def primal(twins: Any, starts: Any, factors_SBT: jax.Array) -> jax.Array:
        sources, factors_SBT = made(starts, factors_SBT)
        parts = [mix(s[None], f[None]) for s, f in zip(sources, factors_SBT, strict=True)]
        return functools.reduce(jnp.add, parts)

    def save(twins: Any, starts: Any, factors_SBT: jax.Array) -> Any:
        return primal(twins, starts, factors_SBT), (starts, factors_SBT)

    def derivative(saved: Any, d_mix_BTD: jax.Array) -> Any:
        starts, factors_SBT = saved
        # In the width in which it came: the sum into the twins' gradients reads it later.
        sources, d_mix_BTD = made(starts, d_mix_BTD.astype(dtype))
        d_mix_BTD = d_mix_BTD.astype(factors_SBT.dtype)
        d_factors = [jnp.sum(d_mix_BTD * s.astype(d_mix_BTD.dtype), axis=-1) for s in sources]
        d_twins = [f_BT[..., None] * d_mix_BTD for f_BT in factors_SBT]
        return tuple(d_twins), None, jnp.stack(d_factors)

    rule = jax.custom_vjp(primal)
    rule.defvjp(save, derivative)
    return rule
