"""The whole depth under one derivative rule, for variants whose sources grow with every sublayer.

Autodiff of a loop that carries the sources saves all of them at each layer. Here they lie once in
one buffer, which the backward pass turns over in place, as flash attention over the depth: slot
j + 1 holds the source that sublayer j made; once sublayer j is differentiated that source has no
readers left, and the slot takes the gradient of reader j's mix instead. So at sublayer j the slots
up to j hold sources, to make its input again, and those after hold gradients, to gather the
gradient of its source:

    a_jt = exp(logit_jt − top_j) / sum_j        the weight of reader j on source t
    d_logit_jt = a_jt (d_mix_j · s_t − c_j)     c_j = d_mix_j · Σ_t a_jt s_t
    d_s_t = Σ_j f_jt d_mix_j + d_logit_jt ∂logit_jt/∂s_t,     f = a, or a − 1/S where centred

Kept from the forward pass: the buffer, top and sum of every reader, and what `model.remat` names of
the sublayers. A stream that is not itself a source is summed up again in float32 from what was
added to it; taken back from its last, rounded value it would be off by more with every layer.

B batch, T sequence, D width, L layers, S slots, R readers.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import kept as kept_lib
from deltares_jax.models import reader_rule, residual, variants
from deltares_jax.models.block_rule import flat, unflat
from deltares_jax.models.layers import Context, apply_sublayer
from deltares_jax.models.reader_rule import Part, Readers, Stats
from deltares_jax.models.routing_ops import statistics_dtype
from deltares_jax.models.source_passes import Back, Passes

Params = Any


class Saved(NamedTuple):
    """What the backward pass reads besides the arguments.

    buffer_SBTD: every source. stats: of every reader. kept: of the two sublayers, stacked by layer;
    None where nothing is kept of them.
    """

    buffer_SBTD: jax.Array
    stats: Stats
    kept: Any


def run(
    config: FrozenConfigDict,
    layers: Params,
    last: Params,
    embedding_BTD: jax.Array,
    context: Context,
    policy: Any,
) -> jax.Array:
    """The input [B, T, D] of the final norm.

    Args:
      config: of the model, with a variant whose sources grow with every sublayer.
      layers: parameters of all layers, stacked as [L, …].
      last: parameters of the last reader, or empty.
      embedding_BTD: what enters the first layer.
      context: what all layers read.
      policy: what is kept of a sublayer, as for `jax.checkpoint`; None for everything.
    """
    sublayers = {name: p for name, p in layers.items() if not name.endswith("_reader")}
    readers = reader_rule.stack_readers(config, layers, last)
    depth = _Depth(config, policy)
    rule = jax.custom_vjp(lambda *args: depth.forward(*args)[0])
    rule.defvjp(depth.forward, depth.backward)
    result: jax.Array = rule(sublayers, readers, embedding_BTD, context)
    return result


def _pin(buffer_SBTD: jax.Array) -> jax.Array:
    return nn.with_logical_constraint(buffer_SBTD, (None, "batch", "length", "embed"))


def _put(buffer_SBTD: jax.Array, values: list[jax.Array], slot: Any) -> jax.Array:
    """Writes values, [B, T, D] each, from a slot on."""
    for k, value_BTD in enumerate(values):
        value_BTD = value_BTD.astype(buffer_SBTD.dtype)
        buffer_SBTD = lax.dynamic_update_index_in_dim(buffer_SBTD, value_BTD, slot + k, 0)
    return _pin(buffer_SBTD)


def _stack(*parts: jax.Array) -> jax.Array:
    return jnp.stack(parts)


class _Depth:
    """Forward and backward pass of the rule for one model."""

    def __init__(self, config: FrozenConfigDict, policy: Any):
        self.config, self.policy = config, policy
        self.row = variants.VARIANTS[config.residual.variant]
        self.view = reader_rule.view(config)
        self.wide = statistics_dtype(config.dtype)
        self.passes = Passes(config, self.view)
        self.summed = self.row.stream == "accumulate" and self.row.appends == "output"

    def forward(
        self, sublayers: Params, readers: Readers, embedding_BTD: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        """The input of the final norm, and what the backward pass reads."""
        L = self.config.num_layers
        buffer = _pin(self.passes.empty_buffer(embedding_BTD))
        table = self.passes.append(self.passes.empty_table(buffer), embedding_BTD[None], readers, 0)
        stream = None if self.row.stream == "discard" else embedding_BTD

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            buffer, table, stream = carry
            params, layer = xs
            params = unflat(params, sublayers)
            parts = self.passes.parts(buffer, table, readers, layer)
            made: list[Any] = []
            stats, kept = [], []
            for k, kind in enumerate(variants.SUBLAYERS):
                number = 2 * layer + k
                x, own = self._read(number, parts[k], readers.at(number, 1), made, stream)
                y, residuals = self._apply(kind, params, x, context)
                stream = None if stream is None else stream + y
                made.append(residual.appended(self.config, y, stream))
                stats.append(own)
                kept.append(residuals)
            # Nothing may read the buffer once it is written to: it would be copied.
            buffer, made = lax.optimization_barrier((buffer, made))
            for k, value in enumerate(made):
                table = self.passes.append(table, value[None], readers, 1 + 2 * layer + k)
            buffer = _put(buffer, made, 1 + 2 * layer)
            return (buffer, table, stream), (jax.tree.map(_stack, *stats), kept)

        xs = (jax.tree.map(functools.partial(flat, self.config), sublayers), jnp.arange(L))
        (buffer, table, stream), (stats, kept) = lax.scan(body, (buffer, table, stream), xs)
        stats = jax.tree.map(lambda s: s.reshape(2 * L, *s.shape[2:]), stats)
        if self.row.final_read:
            part = self.passes.last_part(buffer, table, readers)
            last = Stats(part.top_BT, part.sum_BT)
            stats = jax.tree.map(lambda s, own: jnp.concatenate([s, own[None]]), stats, last)
            stream = reader_rule.mix_of(part, 1).astype(self.config.dtype)
        assert stream is not None
        return stream, (sublayers, readers, context, Saved(buffer, stats, kept))

    def backward(self, residuals: Any, d_out_BTD: jax.Array) -> tuple[Any, ...]:
        """Gradients of the arguments of `forward`."""
        sublayers, readers, context, (buffer, stats, kept) = residuals
        L = self.config.num_layers
        table = self.passes.table_of(buffer, readers)
        stream = jnp.sum(buffer[: 1 + 2 * L].astype(self.wide), axis=0) if self.summed else None
        d_stream = None if self.row.stream == "discard" else d_out_BTD
        back = Back(jnp.zeros_like(stats.top_RBT), jax.tree.map(jnp.zeros_like, readers))
        if self.row.final_read:
            mix = reader_rule.mix_of(self.passes.last_part(buffer, table, readers), 1)
            c_BT = jnp.sum(mix * d_out_BTD.astype(self.wide), axis=-1)
            back = back._replace(c_RBT=back.c_RBT.at[-1].set(c_BT))
            buffer = _pin(buffer.at[-1].set(d_out_BTD.astype(buffer.dtype)))
            d_stream = None if d_stream is None else jnp.zeros_like(d_stream)

        def body(carry: Any, xs: Any) -> tuple[Any, Params]:
            buffer, stream, d_stream, back = carry
            params, layer, kept = xs
            params = unflat(params, sublayers)
            slot = 1 + 2 * layer
            values = lax.dynamic_slice_in_dim(buffer, slot, 2)
            d_values, back = self.passes.gather(buffer, values, slot, readers, stats, back)
            parts = self.passes.parts(buffer, table, readers, layer)
            d_params: Params = {}
            d_mixes: list[Any] = [None, None]
            for k in (1, 0):
                kind, number = variants.SUBLAYERS[k], 2 * layer + k
                made, top = [v.astype(self.wide) for v in values[:k]], stats.top_RBT[number]
                before, stream = self._stream_before(k, buffer, values, slot, stream)
                x, pull_read, own = self._read_again(
                    number, parts[k], readers.at(number, 1), made, before, top
                )
                d_y = d_values[k].astype(self.wide)
                d_y = d_y if d_stream is None else d_y + d_stream
                pull = self._derivative(kind, params, x, context, kept[k])
                d_own, d_x = pull(d_y.astype(self.config.dtype))
                (d_sum, d_mixes[k]), d_reader, d_made, d_read = pull_read(d_x)
                d_params |= d_own
                if d_stream is not None:
                    d_stream = (d_stream if self.row.appends == "output" else d_y) + d_read
                if made:
                    d_values[0] = d_values[0].astype(self.wide) + d_made[0]
                back = back.add(number, d_reader, -own.sum_RBT * d_sum)
            buffer, d_mixes = lax.optimization_barrier((buffer, d_mixes))
            buffer = _put(buffer, d_mixes, slot)
            d_stream = None if d_stream is None else d_stream.astype(self.config.dtype)
            return (buffer, stream, d_stream, back), d_params

        carry = (buffer, stream, d_stream, back)
        xs = (jax.tree.map(functools.partial(flat, self.config), sublayers), jnp.arange(L), kept)
        (buffer, _, d_stream, back), d_layers = lax.scan(body, carry, xs, reverse=True)
        d_embedding = jnp.zeros((), self.wide) if d_stream is None else d_stream
        if self.row.seeded:
            d_first, back = self.passes.gather(buffer, buffer[:1], 0, readers, stats, back)
            d_embedding += d_first[0]
        d_layers = jax.tree.map(lambda d, p: d.reshape(p.shape), d_layers, sublayers)
        return d_layers, back.d_readers, d_embedding.astype(buffer.dtype), None

    def _read(
        self,
        number: Any,
        part: Part,
        reader: Readers,
        made: list[Any],
        stream: Any,
        top: Any = None,
        more: tuple[Any, Any] = (0.0, 0.0),
    ) -> tuple[jax.Array, Stats]:
        """What a sublayer reads: the sums over the buffer, and what came after it.

        `more` is added to Σ u and to the mix.
        """
        eps, count = self.config.norm_eps, jnp.asarray(self.view.count_R)[number]
        values = [] if reader.null_RD is None else [reader.null_RD[None]]
        values += made + ([stream] if self.row.live == "always" else [])
        # A single source has weight 1 whatever its logit.
        logits = [
            jnp.where(count > 1, reader_rule.source_logit(value, reader, eps), 0.0)
            for value in values
        ]
        part = reader_rule.join(part, list(zip(values, logits, strict=True)), top)
        part = part._replace(sum_BT=part.sum_BT + more[0])
        mix = reader_rule.mix_of(part, count) + more[1]
        gate = None if reader.gate_R is None else reader.gate_R[0]
        x = residual.sublayer_input(self.config, stream, mix, gate)
        return x, Stats(part.top_BT, jnp.where(count > 0, part.sum_BT, 1.0))

    def _read_again(
        self, number: Any, part: Part, reader: Readers, made: Any, stream: Any, top: Any
    ) -> tuple[Any, ...]:
        """`_read`, its derivative by (Σ u, mix), reader, made and stream, and its stats."""

        def read(more: Any, reader: Readers, made: Any, stream: Any) -> Any:
            return self._read(number, part, reader, made, stream, top, more)

        more = (jnp.zeros_like(part.sum_BT), jnp.zeros_like(part.mix_BTD))
        return jax.vjp(read, more, reader, made, stream, has_aux=True)

    def _function(self, kind: str) -> Any:
        def function(params: Params, x: jax.Array, context: Context) -> jax.Array:
            return apply_sublayer(self.config, params, kind, x, context)

        if self.policy is None:
            return function
        return jax.checkpoint(function, policy=self.policy, prevent_cse=False)

    def _apply(self, kind: str, params: Params, x: jax.Array, context: Context) -> Any:
        """A sublayer's output, and what is kept of it."""
        if self.config.remat == "full":
            return apply_sublayer(self.config, params, kind, x, context), None
        return kept_lib.differentiate(self._function(kind), (_own(params, kind), x), context)

    def _derivative(
        self, kind: str, params: Params, x: jax.Array, context: Context, kept: Any
    ) -> Any:
        args = (_own(params, kind), x)
        if kept is None:
            return jax.vjp(lambda p, x: apply_sublayer(self.config, p, kind, x, context), *args)[1]
        return kept_lib.load(kept, args, context)

    def _stream_before(self, k: int, buffer: Any, values: Any, slot: Any, after: Any) -> Any:
        """The stream at a sublayer, and as a sum in float32 from the one after it."""
        if self.row.stream == "discard":
            return None, None
        if self.summed:
            before = after - values[k].astype(after.dtype)
            return before.astype(buffer.dtype), before
        return lax.dynamic_index_in_dim(buffer, slot - 1 + k, 0, keepdims=False), None


def _own(params: Params, kind: str) -> Params:
    return {name: params[name] for name in (f"{kind}_norm", kind)}
