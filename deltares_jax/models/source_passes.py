"""Passes over the buffer of sources: logits, sums for the readers of a layer, gradients of sources.

By `model.residual.kernel` the logits of a reader are computed where it reads (`direct`, and inside
the kernel of `pallas`), or those of all readers when a source is born (`batched`), in a table that
grows with the square of the depth.

B batch, T sequence, D width, S slots, R readers.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import reader_rule, routing_kernels, routing_loops
from deltares_jax.models.reader_rule import Part, Readers, Stats, View
from deltares_jax.models.routing_ops import logits_of_readers, statistics_dtype


class Back(NamedTuple):
    """What the backward pass collects of all readers: d_mix · softmax mix, and their gradients."""

    c_RBT: jax.Array
    d_readers: Readers

    def add(self, number: Any, d_reader: Readers, c_BT: jax.Array) -> "Back":
        """Adds what one reader's own sources give."""
        d_readers = jax.tree.map(
            lambda total, one: total.at[number].add(one[0]), self.d_readers, d_reader
        )
        return Back(self.c_RBT.at[number].set(c_BT), d_readers)


class Passes:
    """The passes of one model. Tables of logits are [S, R, B, T], or None where there is none."""

    def __init__(self, config: FrozenConfigDict, view: View):
        self.config, self.view = config, view
        self.eps: float = config.norm_eps
        self.centered: bool = config.residual.centered
        self.wide = statistics_dtype(config.dtype)
        self.has_table = config.residual.kernel == "batched"
        self.ops: Any = routing_kernels if config.residual.kernel == "pallas" else routing_loops

    def fits(self, readers: int) -> bool:
        """Whether a pass can serve so many readers."""
        return self.ops is not routing_kernels or routing_kernels.fits(self.config, readers)

    def empty_buffer(self, embedding_BTD: jax.Array) -> jax.Array:
        """The buffer [S, B, T, D] with the embedding in its first slot."""
        shape = (1 + len(self.view.end_R), *embedding_BTD.shape)
        return self.put(lax.empty(shape, embedding_BTD.dtype), [embedding_BTD], 0)

    def put(self, buffer: jax.Array, values: list[jax.Array], slot: Any) -> jax.Array:
        """Writes values, [B, T, D] each, from a slot on."""
        buffer = self.ops.put(buffer, [value.astype(buffer.dtype) for value in values], slot)
        return nn.with_logical_constraint(buffer, (None, "batch", "length", "embed"))

    def slot(self, buffer: jax.Array, slot: Any) -> jax.Array:
        """What a slot holds, [B, T, D]."""
        return lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)

    def sum(self, buffer: jax.Array, end: int) -> jax.Array:
        """The sum of the slots before `end`, [B, T, D]: that is the mix of equal logits."""
        direction = jnp.zeros((1, buffer.shape[-1]), self.wide)
        mixes, *_ = self.ops.read(buffer, direction, (0, end), jnp.array([end]), self.eps, False)
        total: jax.Array = mixes[0]
        return total

    def empty_table(self, buffer: jax.Array) -> Any:
        """Where the logits of all readers on all slots go, [S, R, B, T]; None if not wanted."""
        if not self.has_table:
            return None
        shape = (len(buffer), len(self.view.end_R), *buffer.shape[1:3])
        return jnp.zeros(shape, self.wide)

    def append(self, table: Any, values: jax.Array, readers: Readers, slot: Any) -> Any:
        """Writes the logits of all readers on new sources."""
        if table is None:
            return None
        rows = self._logits(values, readers)
        rows = nn.with_logical_constraint(jnp.swapaxes(rows, 0, 1), (None, None, "batch", "length"))
        return lax.dynamic_update_slice_in_dim(table, rows, slot, 0)

    def _logits(self, values: jax.Array, readers: Readers) -> jax.Array:
        return logits_of_readers(values, readers.query_RD, readers.gain_RD, self.eps)

    def table_of(self, buffer: jax.Array, readers: Readers) -> Any:
        """The whole table, made again slot by slot."""
        if not self.has_table:
            return None
        return lax.map(lambda value: self._logits(value[None], readers)[:, 0], buffer)

    def parts(
        self, buffer: jax.Array, table: Any, readers: Readers, first: Any, count: int
    ) -> list[Part]:
        """Sums of the readers from `first` on over what was written before them."""
        return self._sums(buffer, table, readers, first, count, 1 + first, self.centered)

    def last_part(self, buffer: jax.Array, table: Any, readers: Readers) -> Part:
        """Sums of the model's last reader over all sources."""
        number = len(self.view.end_R) - 1
        return self._sums(buffer, table, readers, number, 1, number + 1, False)[0]

    def _sums(
        self,
        buffer: jax.Array,
        table: Any,
        readers: Readers,
        first: Any,
        count: int,
        end: Any,
        centered: bool,
    ) -> list[Part]:
        """Sums of some readers over the slots before `end`."""
        numbers, span = first + jnp.arange(count), (self.view.first, end)
        if table is None:
            some = readers.at(first, count)
            direction = some.query_RD * some.gain_RD
            ends = jnp.minimum(jnp.asarray(self.view.end_R)[numbers], end)
            args = (buffer, direction, span, ends, self.eps, centered)
            mixes, tops, sums, total = self.ops.read(*args)
            # The total is that of the whole span, which a reader sees whole or not at all.
            totals = [total if total is None else total * (e > span[0]) for e in ends]
            return [Part(*part) for part in zip(tops, sums, mixes, totals, strict=True)]
        slots = jnp.arange(len(buffer))
        sees = reader_rule.sees(self.view, numbers, slots) & (slots < end)[None]
        logits = jnp.swapaxes(lax.dynamic_slice_in_dim(table, first, count, 1), 0, 1)
        return reader_rule.sum_up(buffer, logits, sees, span, centered)

    def gather(
        self, buffer: Any, slot: Any, count: int, readers: Readers, stats: Stats, back: Back
    ) -> tuple[list[jax.Array], Back]:
        """Gradients of `count` sources from `slot` on, from the readers of later layers."""
        query_RD, gain_RD = (p.astype(self.wide) for p in (readers.query_RD, readers.gain_RD))
        d_values, d_direction_RD = self.ops.gather(
            buffer,
            slot,
            count,
            query_RD * gain_RD,
            self.view.end_R,
            self.view.count_R,
            (*stats, back.c_RBT),
            self.eps,
            self.centered,
        )
        d_query, d_gain = back.d_readers.query_RD, back.d_readers.gain_RD
        d_readers = back.d_readers._replace(
            query_RD=d_query + (d_direction_RD * gain_RD).astype(d_query.dtype),
            gain_RD=d_gain + (d_direction_RD * query_RD).astype(d_gain.dtype),
        )
        # Added up here and now: their parts would be kept until they are read.
        return lax.optimization_barrier(d_values), back._replace(d_readers=d_readers)
