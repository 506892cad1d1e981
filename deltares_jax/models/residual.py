"""The seam for residual variants: what a sublayer reads, and what becomes of its output.

A layer calls `Reader` before and `write` after each sublayer, the depth loop calls `close_block`,
the model ends with `FinalReader`. What they do is decided by the row of `variants.VARIANTS`; no
other code asks which variant runs.

B batch, T sequence, D width, S source slots, R readers of a block, m layers of a block.
"""

import itertools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import captured, variants
from deltares_jax.models.routing_ops import Sources, logits_of_readers, route, statistics_dtype

_GATE_START = {"scalar": -2.0, "alpha": 0.0}


class State(NamedTuple):
    """What travels through the depth.

    stream_BTD: the residual stream, or the running block sum; None where none is kept.
    sources: a buffer [S, B, T, D] with a slot for every source there will be, or a tuple of those
      there are, [B, T, D] each; None where they are not at hand or no variant reads them.
    """

    stream_BTD: Any
    sources: Any


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


def _num_slots(config: FrozenConfigDict) -> int:
    residual = config.residual
    return variants.num_slots(residual.variant, config.num_layers, residual.num_blocks)


def start(config: FrozenConfigDict, embedding_BTD: jax.Array, listed: bool = False) -> State:
    """The state before the first layer; `listed` keeps block sources as a tuple."""
    row, slots = _row(config), _num_slots(config)
    sources: Any = None
    if listed and row.grows == "block":
        sources = (embedding_BTD,) if row.seeded else ()
    elif slots:
        sources = jnp.zeros((slots, *embedding_BTD.shape), embedding_BTD.dtype)
        if row.seeded:
            sources = sources.at[0].set(embedding_BTD)
    stream_BTD = {
        "accumulate": embedding_BTD,
        "restart": jnp.zeros_like(embedding_BTD),
        "discard": None,
    }[row.stream]
    return State(stream_BTD, sources)


def _append(sources: Any, source_BTD: jax.Array, slot: Any) -> Any:
    if isinstance(sources, tuple):
        return (*sources, source_BTD)
    return lax.dynamic_update_index_in_dim(sources, source_BTD, slot, 0)


def split(config: FrozenConfigDict, state: State) -> tuple[State, Any]:
    """Parts the state in what changes inside a block and the sources that stay as they are."""
    if _row(config).grows == "sublayer":
        return state, None
    return state._replace(sources=None), state.sources


def join(moving: State, fixed: Any) -> State:
    """The inverse of `split`."""
    return moving if fixed is None else moving._replace(sources=fixed)


def appended(config: FrozenConfigDict, y_BTD: jax.Array, stream_BTD: Any) -> jax.Array:
    """The source that a sublayer makes, from its output and the stream after it."""
    source_BTD: jax.Array = {"output": y_BTD, "stream": stream_BTD}[_row(config).appends]
    return source_BTD


def write(config: FrozenConfigDict, state: State, y_BTD: jax.Array, site: Site) -> State:
    """The state after the sublayer at `site` has put out y."""
    row = _row(config)
    stream_BTD: Any = None if state.stream_BTD is None else state.stream_BTD + y_BTD
    sources = state.sources
    if row.grows == "sublayer":
        source_BTD = appended(config, y_BTD, stream_BTD)
        sources = _append(sources, source_BTD, row.seeded + variants.sublayer_index(*site))
    return State(stream_BTD, sources)


def close_block(config: FrozenConfigDict, opened: State, state: State, block: Any) -> State:
    """The state after a block's last layer; `opened` is the state from before its first."""
    row = _row(config)
    if row.grows != "block":
        return state
    stream_BTD, sources = state

    def newest() -> jax.Array:
        if isinstance(sources, tuple):
            return sources[-1]
        return lax.dynamic_index_in_dim(sources, row.seeded + block - 1, 0, keepdims=False)

    source_BTD = {
        "delta": lambda: stream_BTD - opened.stream_BTD,
        "sum": lambda: stream_BTD,
        # Against the newest source, as the released code does.
        "change": lambda: stream_BTD - newest(),
    }[row.appends]()
    sources = _append(sources, source_BTD, row.seeded + block)
    if row.stream == "restart":
        stream_BTD = jnp.zeros_like(stream_BTD)
    return State(stream_BTD, sources)


def starts_make_sources(config: FrozenConfigDict) -> bool:
    """Whether sources are the embedding and differences of the streams at the starts of blocks."""
    row = _row(config)
    return is_batched(config) and row.seeded and row.appends == "delta"


def sources_from_starts(starts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The listed sources of block n from the streams [B, T, D] at the starts of blocks 1 … n.

    For variants for which `starts_make_sources` holds.
    """
    return (starts[0], *(after - before for before, after in itertools.pairwise(starts)))


def block_logits(config: FrozenConfigDict, layers: Any, sources: Any) -> Any:
    """The logits of all readers of a block over the sources that are fixed in it.

    Args:
      config: of the model.
      layers: the parameters of the block's layers, stacked as [m, …].
      sources: a buffer or a tuple, as in `State`.

    Returns:
      [m, 2, S, B, T], or None where every reader computes its own or has nothing to choose.
    """
    if not is_batched(config) or not len(sources):
        return None
    if len(sources) == 1 and not config.residual.null_source and _row(config).live == "never":
        return None
    routing = [layers[f"{kind}_reader"]["routing"] for kind in variants.SUBLAYERS]
    query_RD, gain_RD = (
        jnp.concatenate([parameters[name] for parameters in routing]) for name in ("query", "gain")
    )
    parts = [s[None] for s in sources] if isinstance(sources, tuple) else [sources]
    logits_RSBT = jnp.concatenate(
        [logits_of_readers(part, query_RD, gain_RD, config.norm_eps) for part in parts], axis=1
    )
    halves = logits_RSBT.reshape(2, -1, *logits_RSBT.shape[1:])
    return jnp.swapaxes(halves, 0, 1)


def is_batched(config: FrozenConfigDict) -> bool:
    """Whether logits are computed for a block at once: its sources stay as they are inside it."""
    return config.residual.kernel != "direct" and _row(config).grows == "block"


def _groups(sources: Any, seen: Any, logits_SBT: Any = None) -> tuple[list[Sources], int]:
    """The sources as groups for `route`, and how many slots they take up."""
    if isinstance(sources, tuple):
        groups = []
        for slot, source_BTD in enumerate(sources):
            logits_1BT = None if logits_SBT is None else logits_SBT[slot : slot + 1]
            valid_1 = jnp.asarray(slot < seen).reshape(1)
            groups.append(Sources(source_BTD[None], valid_1, logits_1BT))
        return groups, len(sources)
    # A depth known at trace time reads just its sources; otherwise the rest is masked.
    is_array = isinstance(sources, jax.Array)
    used = seen if is_array and isinstance(seen, int) else sources.shape[0]
    if not is_array:
        return [Sources(sources, jnp.arange(used) < seen, logits_SBT)], used
    if logits_SBT is not None:
        logits_SBT = logits_SBT[:used]
    return [Sources(sources[:used], jnp.arange(used) < seen, logits_SBT)], used


def sublayer_input(
    config: FrozenConfigDict, stream_BTD: Any, mix_BTD: jax.Array, gate: Any
) -> jax.Array:
    """What a sublayer reads, [B, T, D] in the compute dtype: the mix, or the stream and the mix.

    `gate` is the reader's parameter, or None: (1−g) h + g (h + mix) = h + g · mix.
    """
    if _row(config).routing == "replace":
        return mix_BTD.astype(config.dtype)
    # Made once: the compiler would fuse the mix into each matmul that reads it.
    x_BTD = stream_BTD.astype(mix_BTD.dtype) + _gated(config, mix_BTD, gate)
    return lax.optimization_barrier(x_BTD.astype(config.dtype))


def _gated(config: FrozenConfigDict, mix_BTD: jax.Array, gate: Any) -> jax.Array:
    if gate is None:
        return mix_BTD
    return mix_BTD * (nn.sigmoid(gate) if config.residual.gate == "scalar" else gate)


class _Routing(nn.Module):
    """The parameters of one reader and the mix that they choose.

    Zero queries weigh all sources alike at the start.
    """

    config: FrozenConfigDict
    null_source: bool
    centered: bool

    @nn.compact
    def __call__(self, groups: list[Sources], stream: Any) -> tuple[jax.Array, jax.Array]:
        cfg = self.config
        dtype = statistics_dtype(cfg.dtype)
        query_D = self.param("query", nn.initializers.zeros, (cfg.width,), dtype)
        gain_D = self.param("gain", nn.initializers.ones, (cfg.width,), dtype)
        if self.null_source:
            null_D = self.param("null_source", nn.initializers.zeros, (cfg.width,), dtype)
            groups = [Sources(null_D[None, None, None], jnp.ones(1, bool)), *groups]
        if self.has_variable("params", captured.KEEP):
            keep: Any = self.get_variable("params", captured.KEEP)
            groups = captured.left(cfg, keep, groups, stream)
        return route(groups, query_D, gain_D, cfg.norm_eps, self.centered)


class Reader(nn.Module):
    """Reads the input of one sublayer from the state.

    Returns x [B, T, D] in the compute dtype, and with `capture` what is observed.
    """

    config: FrozenConfigDict
    capture: bool = False

    @nn.compact
    def __call__(
        self, state: State, site: Site, logits_SBT: Any = None
    ) -> tuple[jax.Array, captured.Observed | None]:
        """Reads at `site`, with the logits over the slots where `block_logits` made them."""
        cfg, row = self.config, _row(self.config)
        stream_BTD, sources = state
        if row.routing == "none":
            return stream_BTD, captured.observe(None, stream_BTD, None) if self.capture else None
        groups, used = _groups(sources, variants.visible_slots(row, *site), logits_SBT)
        if row.live != "never":
            live = jnp.asarray(variants.sees_stream(row, site.layer, site.sublayer)).reshape(1)
            groups.append(Sources(stream_BTD[None], live))
        residual = cfg.residual
        routing = _Routing(cfg, residual.null_source, residual.centered, name="routing")
        mix_BTD, weights_SBT = routing(groups, stream_BTD)
        gate = None
        if row.routing == "add" and cfg.residual.gate != "none":
            start = nn.initializers.constant(_GATE_START[cfg.residual.gate])
            gate = self.param("gate", start, (), mix_BTD.dtype)
        x_BTD = sublayer_input(cfg, stream_BTD, mix_BTD, gate)
        if not self.capture:
            return x_BTD, None
        later = (int(residual.null_source) + used, _num_slots(cfg) - used)
        weights_SBT = captured.widen(weights_SBT, *later)
        return x_BTD, captured.observe(weights_SBT, stream_BTD, _gated(cfg, mix_BTD, gate))


class FinalReader(nn.Module):
    """The input of the final norm: the stream, or the last read over all sources.

    Returns h [B, T, D], and with `capture` what is observed of a last read, if there is one.
    """

    config: FrozenConfigDict
    capture: bool = False

    @nn.compact
    def __call__(self, state: State) -> tuple[jax.Array, captured.Observed | None]:
        """Reads after the last block is closed."""
        if not _row(self.config).final_read:
            return state.stream_BTD, None
        groups, _ = _groups(state.sources, _num_slots(self.config))
        mix_BTD, weights_SBT = _Routing(self.config, False, False, name="routing")(groups, None)
        seen = captured.observe(weights_SBT, None, mix_BTD) if self.capture else None
        return mix_BTD.astype(self.config.dtype), seen
