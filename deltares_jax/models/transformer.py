"""The language model: embedding, depth, final norm. The loss owns the head.

B batch, T sequence, D width, V vocabulary, L layers, S source slots.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import attention, depth, residual, variants
from deltares_jax.models.captured import Captured
from deltares_jax.models.layers import INIT, Context, RMSNorm
from deltares_jax.models.routing_ops import statistics_dtype

Params = Any


class Output(NamedTuple):
    """What the model returns.

    hidden_BTD: normed hidden states, to be multiplied with `head`.
    routing: what its readers do; None where not captured.
    """

    hidden_BTD: jax.Array
    routing: Captured | None


def embed(config: FrozenConfigDict, embedding_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """What enters the first layer, [B, T, D] in the compute dtype."""
    # A device looks its columns up for the rows of all devices that hold other columns; what
    # is exchanged then is h, not the table. The cast comes after the lookup, so that gradients
    # of equal tokens add up in float32.
    ids_BT = nn.with_logical_constraint(tokens_BT, ("rows", None))
    table_VD = nn.with_logical_constraint(embedding_VD, ("tokens", "columns"))
    h_BTD = jnp.take(table_VD, ids_BT, axis=0).astype(config.dtype)
    h_BTD = nn.with_logical_constraint(h_BTD, ("rows", None, "columns"))
    h_BTD = nn.with_logical_constraint(h_BTD, ("rows", "length", "width"))
    return nn.with_logical_constraint(h_BTD, ("batch", "length", "embed"))


class Transformer(nn.Module):
    """A Qwen3-style decoder with a residual variant; see `variants.VARIANTS`."""

    config: FrozenConfigDict

    @nn.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segments_BT: jax.Array,
        capture: bool = False,
    ) -> Output:
        """Runs the model.

        Args:
          tokens_BT: ids below V.
          positions_BT: position of each token in its document.
          segments_BT: document of each token; tokens see their own document alone.
          capture: return what its readers do, too.
        """
        cfg = self.config
        dtype = statistics_dtype(cfg.dtype)
        embedding_VD = self.param("embedding", INIT, (cfg.vocab_size, cfg.width), dtype)
        if not cfg.tied:
            self.param("head", INIT, (cfg.vocab_size, cfg.width), dtype)
        h_BTD = embed(cfg, embedding_VD, tokens_BT)
        rotary = attention.rotary_tables(positions_BT, cfg.head_dim, cfg.rope_theta, dtype)
        context = Context(rotary, segments_BT)
        state = residual.start(cfg, h_BTD)
        routing = None
        if self.is_initializing():  # initial values need no depth
            self.param("layers", depth.init_layers, cfg, state, 0, None, 0, None, context)
            h_BTD = residual.FinalReader(cfg, name="final_reader")(state)[0]
        else:
            params = self.variables["params"]
            last = params.get("final_reader", {})
            h_BTD, routing = depth.run(cfg, params["layers"], last, h_BTD, context, capture)
        return Output(RMSNorm(cfg.norm_eps, name="final_norm")(h_BTD), routing)


def apply(config: FrozenConfigDict, params: Params, *inputs: Any, capture: bool = False) -> Output:
    """Runs the model on (tokens, positions, segments), each [B, T]."""
    output = Transformer(config).apply({"params": params}, *inputs, capture)
    assert isinstance(output, Output)
    return output


def head(params: Params) -> jax.Array:
    """The output matrix [V, D]: the embedding where it is tied."""
    return params.get("head", params["embedding"])


def init(config: FrozenConfigDict, key: jax.Array) -> Params:
    """Initial parameters; the same values on every mesh, in every form of the depth loop."""
    ids_BT = jnp.zeros((1, 2), jnp.int32)
    return Transformer(config).init(key, ids_BT, ids_BT, ids_BT)["params"]


def routing_by_reader(config: FrozenConfigDict, routing: Any) -> dict[str, Any]:
    """Captured weights as {reader: [sources, B, T]} in the order of `variants.source_names`."""
    name, num_blocks = config.residual.variant, config.residual.num_blocks
    names = variants.source_names(name, config.num_layers, num_blocks, config.residual.null_source)
    slots = variants.slot_names(name, config.num_layers, num_blocks)
    order = ["null"] * config.residual.null_source + slots + ["stream"]
    result = {}
    for reader, sources in names.items():
        if reader == "final":
            result[reader] = routing.final.weights_SBT
            continue
        _, number, kind = reader.split(".")
        weights_SBT = getattr(routing, kind).weights_SBT[int(number)]
        result[reader] = weights_SBT[jnp.array([order.index(source) for source in sources])]
    return result
