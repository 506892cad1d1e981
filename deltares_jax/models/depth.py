"""The depth loop: layers inside blocks, in several forms over the same parameters.

Parameters are stacked as [L, …] in every variant and form; the [N, L/N, …] view that the scan over
blocks wants is made here, so a change of variant, block count or form converts nothing.

B batch, T sequence, D width, L layers, N blocks, m layers of a block, S source slots.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import block_rule, block_scan, residual, sources_rule, variants
from deltares_jax.models.captured import Captured, Observed
from deltares_jax.models.layers import MLP, Attention, Context, RMSNorm

Params = Any
Weights = tuple[Observed, Observed] | None  # of attention and MLP readers

REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "save_attention": jax.checkpoint_policies.save_only_these_names("attention"),
    "save_projections": jax.checkpoint_policies.save_only_these_names("projection", "attention"),
}


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each reading through the residual seam.

    Returns the part of the state that changes, and with `capture` what its two readers do.
    """

    config: FrozenConfigDict
    per_block: int
    capture: bool

    @nn.compact
    def __call__(
        self,
        moving: residual.State,
        layer: Any,
        logits: Any,
        block: Any,
        fixed: Any,
        context: Context,
    ) -> tuple[residual.State, Weights]:
        """The state after layer `layer` of block `block`.

        `logits` are those of its two readers over the fixed sources, as [2, S, B, T], or None.
        """
        cfg = self.config
        # Ties the constants to the carry: the compiler would move their conversion to float32 out
        # of the loop and keep both copies.
        moving, fixed = lax.optimization_barrier((moving, fixed))
        moving = jax.tree.map(lambda x: checkpoint_name(x, "layer_input"), moving)
        state, captured = moving, list[Any]()
        sublayers: tuple[tuple[str, Callable[[jax.Array], jax.Array]], ...] = (
            ("attn", functools.partial(Attention(cfg, name="attn"), context=context)),
            ("mlp", MLP(cfg, name="mlp")),
        )
        for sublayer, (name, function) in enumerate(sublayers):
            site = residual.Site(block, layer, sublayer, self.per_block)
            reader = residual.Reader(cfg, self.capture, name=f"{name}_reader")
            logits_SBT = None if logits is None else logits[sublayer]
            x_BTD, seen = reader(residual.join(state, fixed), site, logits_SBT)
            y_BTD = function(RMSNorm(cfg.norm_eps, name=f"{name}_norm")(x_BTD))
            y_BTD = nn.with_logical_constraint(y_BTD, ("batch", "length", "embed"))
            state = residual.write(cfg, state, y_BTD, site)
            captured.append(seen)
        return state, (captured[0], captured[1]) if self.capture else None


def _layer_class(config: FrozenConfigDict) -> Any:
    if config.remat == "none":
        return Layer
    # Inside a scan CSE cannot undo the recomputation, and guarding against it costs fusions.
    return nn.remat(Layer, policy=REMAT_POLICIES[config.remat], prevent_cse=False)


class Block(nn.Module):
    """A scan over the layers of one block; its sources are constants of the loop."""

    config: FrozenConfigDict
    per_block: int
    length: int
    capture: bool

    @nn.compact
    def __call__(
        self, state: residual.State, block: Any, context: Context
    ) -> tuple[residual.State, Weights]:
        """The state after block `block`."""
        moving, fixed = residual.split(self.config, state)
        layers = nn.scan(
            _layer_class(self.config),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=self.length,
            unroll=variants.written_out(self.config.remat, self.length),
        )(self.config, self.per_block, self.capture, name="layers")
        stacked = self.variables["params"]["layers"]
        logits = residual.block_logits(self.config, stacked, fixed)
        moving, weights = layers(moving, jnp.arange(self.length), logits, block, fixed, context)
        closed = residual.join(moving, fixed)
        return residual.close_block(self.config, state, closed, block), weights


def _per_block(config: FrozenConfigDict) -> int:
    residual = config.residual
    return variants.layers_per_block(residual.variant, config.num_layers, residual.num_blocks)


def init_layers(key: jax.Array, config: FrozenConfigDict, *args: Any) -> Params:
    """Initial parameters of all layers, stacked as [L, …]; equal for every form and mesh."""
    # Kernels refuse the short row that stands in for the data here.
    config = FrozenConfigDict({**config.to_dict(), "attention": "reference"})

    def init_one(key: jax.Array) -> Params:
        return Layer(config, config.num_layers, False).init(key, *args)["params"]

    return jax.vmap(init_one)(jax.random.split(key, config.num_layers))


def _apply_block(
    config: FrozenConfigDict,
    params: Params,
    state: residual.State,
    context: Context,
    capture: bool,
    block: int,
    length: int,
) -> tuple[residual.State, Weights]:
    """Runs one block on its slice of the stacked parameters."""
    per_block = _per_block(config)
    first = block * per_block
    part = {"params": {"layers": jax.tree.map(lambda p: p[first : first + length], params)}}
    result: Any = Block(config, per_block, length, capture).apply(part, state, block, context)
    return result


def scan_blocks(
    config: FrozenConfigDict,
    params: Params,
    state: residual.State,
    context: Context,
    capture: bool,
) -> tuple[residual.State, Weights]:
    """`nn.scan` over blocks that carries the sources, a scan over the block's layers inside.

    The smallest program; what is saved for the backward pass grows with N².
    """
    per_block = _per_block(config)
    full, tail = divmod(config.num_layers, per_block)
    view = jax.tree.map(
        lambda p: p[: full * per_block].reshape(full, per_block, *p.shape[1:]), params
    )
    blocks = nn.scan(
        Block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),
        length=full,
    )(config, per_block, per_block, capture)
    view = {"params": {"layers": view}}
    state, weights = blocks.apply(view, state, jnp.arange(full), context)
    weights = jax.tree.map(lambda w: w.reshape(full * per_block, *w.shape[2:]), weights)
    if tail:
        state, last = _apply_block(config, params, state, context, capture, full, tail)
        weights = jax.tree.map(lambda *w: jnp.concatenate(w), weights, last)
    return state, weights


def unrolled(
    config: FrozenConfigDict,
    params: Params,
    state: residual.State,
    context: Context,
    capture: bool,
) -> tuple[residual.State, Weights]:
    """A Python loop over blocks, a scan over the layers of each.

    Each block has just its own sources. What is saved for the backward pass with `remat=full`, see
    block_rule, is the input of each layer. The program grows with N.
    """
    name, num_blocks = config.residual.variant, config.residual.num_blocks
    captured: list[Weights] = []
    starts: tuple[residual.State, ...] = ()
    for block, length in enumerate(variants.block_lengths(name, config.num_layers, num_blocks)):
        if config.remat == "full" and not capture:
            extent = block_rule.Extent(block, block * _per_block(config), length)
            opened, apply = state, functools.partial(_apply_layer, config)
            state = block_rule.run_block(config, apply, extent, params, state, starts, context)
            state = residual.close_block(config, opened, state, block)
            starts = (*starts, opened)
            continue
        state, weights = _apply_block(config, params, state, context, capture, block, length)
        captured.append(weights)
    return state, jax.tree.map(lambda *w: jnp.concatenate(w), *captured) if capture else None


def boundaries(
    config: FrozenConfigDict,
    params: Params,
    state: residual.State,
    context: Context,
    capture: bool,
) -> tuple[residual.State, Weights]:
    """A scan over blocks under one rule, see block_scan, that keeps their starts; `remat=full`.

    A small program for any N, in the least memory. One more forward pass, unless m = 1.
    """
    if capture:
        return scan_blocks(config, params, state, context, capture)
    per_block = _per_block(config)
    full, tail = divmod(config.num_layers, per_block)
    whole = jax.tree.map(lambda p: p[: full * per_block], params)
    apply_layer = functools.partial(_apply_layer, config)
    state = block_scan.run(config, apply_layer, per_block, whole, state, context)
    if tail:
        state, _ = _apply_block(config, params, state, context, False, full, tail)
    return state, None


def _apply_layer(config: FrozenConfigDict, params: Params, *args: Any) -> residual.State:
    moving: Any = Layer(config, _per_block(config), False).apply({"params": params}, *args)[0]
    return moving


MANY_BLOCKS = 16  # unrolled, a program of more takes long to compile
FORMS: dict[str, Callable[..., tuple[residual.State, Weights]]] = {
    "blocks": scan_blocks,
    "unrolled": unrolled,
    "boundaries": boundaries,
}


def resolved_form(config: FrozenConfigDict) -> str:
    """The form that `model.scan` names.

    `auto` takes `unrolled`, the fastest; `boundaries` with many blocks, or as many as layers, where
    that program would be too large; `blocks` for one block without sources. Sources of every
    sublayer have one rule, `unrolled`.
    """
    grows, per_block = variants.VARIANTS[config.residual.variant].grows, _per_block(config)
    form = str(config.scan)
    if form == "auto":
        if grows != "sublayer" and per_block == config.num_layers:
            return "blocks"
        many = per_block == 1 or config.num_layers // per_block > MANY_BLOCKS
        form = "boundaries" if many and config.remat == "full" else "unrolled"
    return "unrolled" if form == "boundaries" and grows != "block" else form


def run(
    config: FrozenConfigDict,
    params: Params,
    last: Params,
    embedding_BTD: jax.Array,
    context: Context,
    capture: bool,
) -> tuple[jax.Array, Captured | None]:
    """Runs all layers by the form that `model.scan` names, and the model's last reader.

    Args:
      config: of the model.
      params: of all layers, stacked as [L, …].
      last: of the last reader, empty where there is none.
      embedding_BTD: what enters the first layer.
      context: what all layers read.
      capture: return what readers do, too.

    Returns:
      The input [B, T, D] of the final norm, and what was captured, else None.
    """
    form, grows = resolved_form(config), variants.VARIANTS[config.residual.variant].grows
    if grows == "sublayer" and form != "blocks" and not capture:
        policy = None if config.remat == "none" else REMAT_POLICIES[config.remat]
        return sources_rule.run(config, params, last, embedding_BTD, context, policy), None
    if grows == "sublayer":
        form = "blocks"
    state = residual.start(config, embedding_BTD, listed=form == "unrolled")
    state, weights = FORMS[form](config, params, state, context, capture)
    reader: Any = residual.FinalReader(config, capture)
    h_BTD, final = reader.apply({"params": last}, state)
    return h_BTD, Captured(*weights, final, state.sources) if weights else None
