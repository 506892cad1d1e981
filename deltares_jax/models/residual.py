"""The seam for residual variants: what a sublayer reads, and what becomes of its output.

A layer calls `Reader` before and `write` after each sublayer, the depth loop calls `close_block`,
the model ends with `FinalReader`. What they do is decided by the row of `variants.VARIANTS`; no
other code asks which variant runs.

B batch, T sequence, D width, S source slots.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import variants
from deltares_jax.models.routing_ops import Sources, route, statistics_dtype


class State(NamedTuple):
    """What travels through the depth.

    stream_BTD: the residual stream, or the running block sum; None where none is kept.
    sources_SBTD: the buffer of sources; None where it is not at hand or no variant reads it.
    """

    stream_BTD: Any
    sources_SBTD: Any


class Site(NamedTuple):
    """A reader's place in the depth; block and layer may be traced integers.

    block: number of the block. layer: number of the layer in its block. sublayer: 0 attention,
    1 MLP. per_block: layers of a full block.
    """

    block: Any
    layer: Any
    sublayer: int
    per_block: int


def _row(config: FrozenConfigDict) -> variants.Variant:
    return variants.VARIANTS[config.residual.variant]


def start(config: FrozenConfigDict, embedding_BTD: jax.Array) -> State:
    """The state before the first layer."""
    row = _row(config)
    slots = variants.num_slots(
        config.residual.variant, config.num_layers, config.residual.num_blocks
    )
    sources_SBTD = None
    if slots:
        sources_SBTD = jnp.zeros((slots, *embedding_BTD.shape), embedding_BTD.dtype)
        if row.seeded:
            sources_SBTD = sources_SBTD.at[0].set(embedding_BTD)
    stream_BTD = {
        "accumulate": embedding_BTD,
        "restart": jnp.zeros_like(embedding_BTD),
        "discard": None,
    }[row.stream]
    return State(stream_BTD, sources_SBTD)


def split(config: FrozenConfigDict, state: State) -> tuple[State, jax.Array | None]:
    """Parts the state in what changes inside a block and the sources that stay as they are."""
    if _row(config).grows == "sublayer":
        return state, None
    return state._replace(sources_SBTD=None), state.sources_SBTD


def join(moving: State, fixed_SBTD: jax.Array | None) -> State:
    """The inverse of `split`."""
    return moving if fixed_SBTD is None else moving._replace(sources_SBTD=fixed_SBTD)


def write(config: FrozenConfigDict, state: State, y_BTD: jax.Array, site: Site) -> State:
    """The state after the sublayer at `site` has put out y."""
    row = _row(config)
    stream_BTD = None if state.stream_BTD is None else state.stream_BTD + y_BTD
    sources_SBTD = state.sources_SBTD
    if row.grows == "sublayer":
        source_BTD = {"output": y_BTD, "stream": stream_BTD}[row.appends]
        slot = row.seeded + variants.sublayer_index(*site)
        sources_SBTD = lax.dynamic_update_index_in_dim(sources_SBTD, source_BTD, slot, 0)
    return State(stream_BTD, sources_SBTD)


def close_block(config: FrozenConfigDict, opened: State, state: State, block: Any) -> State:
    """The state after a block's last layer; `opened` is the state from before its first."""
    row = _row(config)
    if row.grows != "block":
        return state
    stream_BTD, sources_SBTD = state
    source_BTD = {
        "delta": lambda: stream_BTD - opened.stream_BTD,
        "sum": lambda: stream_BTD,
        # Against the newest source, as the released code does.
        "change": lambda: stream_BTD - lax.dynamic_index_in_dim(sources_SBTD, block, 0, False),
    }[row.appends]()
    slot = row.seeded + block
    sources_SBTD = lax.dynamic_update_index_in_dim(sources_SBTD, source_BTD, slot, 0)
    if row.stream == "restart":
        stream_BTD = jnp.zeros_like(stream_BTD)
    return State(stream_BTD, sources_SBTD)


class _Routing(nn.Module):
    """The parameters of one reader and the mix that they choose.

    Zero queries weigh all sources alike at the start.
    """

    config: FrozenConfigDict
    null_source: bool
    centered: bool

    @nn.compact
    def __call__(self, groups: list[Sources]) -> tuple[jax.Array, jax.Array]:
        cfg = self.config
        dtype = statistics_dtype(cfg.dtype)
        query_D = self.param("query", nn.initializers.zeros, (cfg.width,), dtype)
        gain_D = self.param("gain", nn.initializers.ones, (cfg.width,), dtype)
        if self.null_source:
            null_D = self.param("null_source", nn.initializers.zeros, (cfg.width,), dtype)
            groups = [Sources(null_D[None, None, None], jnp.ones(1, bool)), *groups]
        return route(groups, query_D, gain_D, cfg.norm_eps, self.centered)


class Reader(nn.Module):
    """Reads the input of one sublayer from the state.

    Returns x [B, T, D] in the compute dtype, and the weights over (null source, every slot,
    stream) as [S', B, T], 0 where the reader has no such source; None for the baseline.
    """

    config: FrozenConfigDict

    @nn.compact
    def __call__(self, state: State, site: Site) -> tuple[jax.Array, jax.Array | None]:
        """Reads at `site`."""
        cfg, row = self.config, _row(self.config)
        stream_BTD, sources_SBTD = state
        if row.routing == "none":
            return stream_BTD, None
        slots = sources_SBTD.shape[0]
        seen = variants.visible_slots(row, *site)
        # A depth known at trace time reads just its sources; otherwise the rest is masked.
        used = seen if isinstance(seen, int) else slots
        groups = [Sources(sources_SBTD[:used], jnp.arange(used) < seen)]
        if row.live != "never":
            live = jnp.asarray(variants.sees_stream(row, site.layer, site.sublayer)).reshape(1)
            groups.append(Sources(stream_BTD[None], live))
        residual = cfg.residual
        routing = _Routing(cfg, residual.null_source, residual.centered, name="routing")
        mix_BTD, weights_SBT = routing(groups)
        head, tail = jnp.split(weights_SBT, [int(residual.null_source) + used])
        unread_SBT = jnp.zeros((slots - used, *weights_SBT.shape[1:]), weights_SBT.dtype)
        weights_SBT = jnp.concatenate([head, unread_SBT, tail])
        if row.routing == "replace":
            return mix_BTD.astype(cfg.dtype), weights_SBT
        gate = self._gate(mix_BTD.dtype)
        x_BTD = stream_BTD.astype(mix_BTD.dtype) + gate * mix_BTD
        return x_BTD.astype(cfg.dtype), weights_SBT

    def _gate(self, dtype: jnp.dtype) -> jax.Array | float:
        """(1−g) h + g (h + mix) = h + g · mix."""
        if self.config.residual.gate == "none":
            return 1.0
        if self.config.residual.gate == "alpha":
            return self.param("gate", nn.initializers.zeros, (), dtype)
        return nn.sigmoid(self.param("gate", nn.initializers.constant(-2.0), (), dtype))


class FinalReader(nn.Module):
    """The input of the final norm: the stream, or the last read over all sources.

    Returns h [B, T, D] and the weights over all slots, or None where there is no last read.
    """

    config: FrozenConfigDict

    @nn.compact
    def __call__(self, state: State) -> tuple[jax.Array, jax.Array | None]:
        """Reads after the last block is closed."""
        if not _row(self.config).final_read:
            return state.stream_BTD, None
        groups = [Sources(state.sources_SBTD, jnp.ones(state.sources_SBTD.shape[0], bool))]
        mix_BTD, weights_SBT = _Routing(self.config, False, False, name="routing")(groups)
        return mix_BTD.astype(self.config.dtype), weights_SBT
