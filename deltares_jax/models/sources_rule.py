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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import reader_rule, residual, variants
from deltares_jax.models.block_rule import flat, unflat
from deltares_jax.models.kept import Sublayers
from deltares_jax.models.layers import Context
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


def _stack(*parts: jax.Array) -> jax.Array:
    return jnp.stack(parts)


class _Depth:
    """Forward and backward pass of the rule for one model."""

    def __init__(self, config: FrozenConfigDict, policy: Any):
        self.config, self.sublayers = config, Sublayers(config, policy)
        self.row = variants.VARIANTS[config.residual.variant]
        self.view = reader_rule.view(config)
        self.wide = statistics_dtype(config.dtype)
        self.passes = Passes(config, self.view)
        self.summed = self.row.stream == "accumulate" and self.row.appends == "output"
        # More layers in a group would read the buffer less often, and its own sources more often.
        self.group = 2 if config.num_layers % 2 == 0 and self.passes.fits(4) else 1
        self.unroll = variants.written_out(config.remat, config.num_layers)

    def forward(
        self, sublayers: Params, readers: Readers, embedding_BTD: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        """The input of the final norm, and what the backward pass reads."""
        L, G = self.config.num_layers, self.group
        buffer = self.passes.empty_buffer(embedding_BTD)
        table = self.passes.append(self.passes.empty_table(buffer), embedding_BTD[None], readers, 0)
        stream = None if self.row.stream == "discard" else embedding_BTD

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            buffer, table, stream = carry
            params, first = xs
            parts = self.passes.parts(buffer, table, readers, first, 2 * G)
            made: list[Any] = []
            stats, kept = [], []
            for place, part in enumerate(parts):
                number, (before, here) = first + place, self._split(made, place)
                reader, kind = readers.at(number, 1), variants.SUBLAYERS[place % 2]
                part = self._join(number, part, reader, before)
                x, own = self._read(number, part, reader, here, stream)
                own_params = _layer(params, sublayers, place // 2)
                y, residuals = self.sublayers.apply(kind, own_params, x, context)
                stream = None if stream is None else stream + y
                made.append(residual.appended(self.config, y, stream))
                stats.append(own)
                kept.append(residuals)
            # Nothing may read the buffer once it is written to: it would be copied.
            buffer, made = lax.optimization_barrier((buffer, made))
            for place, value in enumerate(made):
                table = self.passes.append(table, value[None], readers, 1 + first + place)
            buffer = self.passes.put(buffer, made, 1 + first)
            return (buffer, table, stream), (jax.tree.map(_stack, *stats), kept)

        xs = (self._groups(sublayers), 2 * G * jnp.arange(L // G))
        (buffer, table, stream), (stats, kept) = lax.scan(
            body, (buffer, table, stream), xs, unroll=self.unroll
        )
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
        L, G = self.config.num_layers, self.group
        table = self.passes.table_of(buffer, readers)
        stream = self.passes.sum(buffer, 1 + 2 * L) if self.summed else None
        d_stream = None if self.row.stream == "discard" else d_out_BTD
        back = Back(jnp.zeros_like(stats.top_RBT), jax.tree.map(jnp.zeros_like, readers))
        if self.row.final_read:
            mix = reader_rule.mix_of(self.passes.last_part(buffer, table, readers), 1)
            c_BT = jnp.sum(mix * d_out_BTD.astype(self.wide), axis=-1)
            back = back._replace(c_RBT=back.c_RBT.at[-1].set(c_BT))
            buffer = self.passes.put(buffer, [d_out_BTD], len(buffer) - 1)
            d_stream = None if d_stream is None else jnp.zeros_like(d_stream)

        def body(carry: Any, xs: Any) -> tuple[Any, Params]:
            buffer, stream, d_stream, back = carry
            params, first, kept = xs
            parts = self.passes.parts(buffer, table, readers, first, 2 * G)
            d_params: list[Params] = [{} for _ in range(G)]
            d_mixes: list[Any] = [None] * (2 * G)
            for place in reversed(range(2 * G)):
                number, k, layer = first + place, place % 2, place // 2
                kind, slot = variants.SUBLAYERS[k], 1 + number - k
                if k == 1:
                    d_values, back = self.passes.gather(buffer, slot, 2, readers, stats, back)
                    values = [self.passes.slot(buffer, 1 + first + k) for k in range(place + 1)]
                before, here = self._split(values[:place], place)
                reader, here = readers.at(number, 1), [v.astype(self.wide) for v in here]
                part = self._join(number, parts[place], reader, before)
                h, stream = self._stream_before(place, buffer, values, 1 + first, stream)
                top = stats.top_RBT[number]
                x, pull_read, own = self._read_again(number, part, reader, here, h, top)
                d_y = d_values[k].astype(self.wide)
                d_y = d_y if d_stream is None else d_y + d_stream
                own_params = _layer(params, sublayers, layer)
                pull = self.sublayers.derivative(kind, own_params, x, context, kept[place])
                d_own, d_x = pull(d_y.astype(self.config.dtype))
                (d_sum, d_mix), d_reader, d_made, d_read = pull_read(d_x)
                d_params[layer] |= d_own
                d_mixes[place] = d_mix.astype(buffer.dtype)
                if d_stream is not None:
                    d_stream = (d_stream if self.row.appends == "output" else d_y) + d_read
                if here:
                    d_values[0] = d_values[0].astype(self.wide) + d_made[0]
                back = back.add(number, d_reader, -own.sum_RBT * d_sum)
                if place:  # One sublayer runs again after the other, or both would be kept.
                    mix, _ = lax.optimization_barrier((parts[place - 1].mix_BTD, d_sum))
                    parts[place - 1] = parts[place - 1]._replace(mix_BTD=mix)
                if k == 0:
                    done = (buffer, stream, d_mixes[place : place + 2])
                    buffer, stream, mixes = lax.optimization_barrier(done)
                    buffer = self.passes.put(buffer, mixes, slot)
            d_stream = None if d_stream is None else d_stream.astype(self.config.dtype)
            return (buffer, stream, d_stream, back), jax.tree.map(_stack, *d_params)

        carry = (buffer, stream, d_stream, back)
        xs = (self._groups(sublayers), 2 * G * jnp.arange(L // G), kept)
        (buffer, _, d_stream, back), d_layers = lax.scan(
            body, carry, xs, reverse=True, unroll=self.unroll
        )
        d_embedding = jnp.zeros((), self.wide) if d_stream is None else d_stream
        if self.row.seeded:
            d_first, back = self.passes.gather(buffer, 0, 1, readers, stats, back)
            d_embedding += d_first[0]
        d_layers = jax.tree.map(lambda d, p: d.reshape(p.shape), d_layers, sublayers)
        return d_layers, back.d_readers, d_embedding.astype(buffer.dtype), None

    def _groups(self, sublayers: Params) -> Params:
        """The parameters of the layers as [L/G, G, …]."""

        def one(stack: jax.Array) -> jax.Array:
            stack = flat(self.config, stack)
            return stack.reshape(-1, self.group, *stack.shape[1:])

        return jax.tree.map(one, sublayers)

    def _split(self, made: list[Any], place: int) -> tuple[list[Any], list[Any]]:
        """The sources that a group made before a sublayer: by earlier layers, and by its own."""
        own = place - place % 2
        return made[:own], made[own:]

    def _logits(self, number: Any, values: list[Any], reader: Readers) -> list[jax.Array]:
        eps, count = self.config.norm_eps, jnp.asarray(self.view.count_R)[number]
        # A single source has weight 1 whatever its logit.
        return [
            jnp.where(count > 1, reader_rule.source_logit(value, reader, eps), 0.0)
            for value in values
        ]

    def _join(self, number: Any, part: Part, reader: Readers, values: list[Any]) -> Part:
        if not values:
            return part
        logits = self._logits(number, values, reader)
        return reader_rule.join(part, list(zip(values, logits, strict=True)))

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
        count = jnp.asarray(self.view.count_R)[number]
        values = [] if reader.null_RD is None else [reader.null_RD[None]]
        values += made + ([stream] if self.row.live == "always" else [])
        logits = self._logits(number, values, reader)
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

    def _stream_before(self, place: int, buffer: Any, values: Any, slot: Any, after: Any) -> Any:
        """The stream at a sublayer, and as a sum in float32 from the one after it."""
        if self.row.stream == "discard":
            return None, None
        if self.summed:
            before = after - values[place].astype(after.dtype)
            return before.astype(buffer.dtype), before
        return self.passes.slot(buffer, slot - 1 + place), None


def _layer(group: Params, whole: Params, layer: int) -> Params:
    """The parameters of one layer of a group in the shapes that it wants."""
    return unflat(jax.tree.map(lambda p: p[layer], group), whole)
