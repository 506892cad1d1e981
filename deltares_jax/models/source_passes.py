"""Passes over the buffer of sources: logits, sums for the readers of a layer, gradients of sources.

With `model.residual.kernel=direct` the logits of a reader are computed where it reads; else those
of all readers when a source is born, in a table.

B batch, T sequence, D width, S slots, R readers.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import reader_rule, routing_kernels, routing_ops
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
        self.view = view
        self.eps: float = config.norm_eps
        self.centered: bool = config.residual.centered
        self.wide = statistics_dtype(config.dtype)
        self.direct = config.residual.kernel == "direct"
        self.ops: Any = routing_kernels if config.residual.kernel == "pallas" else routing_ops

    def empty_table(self, buffer: jax.Array) -> Any:
        """Where the logits of all readers on all slots go, [S, R, B, T]; None if not wanted."""
        if self.direct:
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
        if self.direct:
            return None
        return lax.map(lambda value: self._logits(value[None], readers)[:, 0], buffer)

    def parts(
        self, buffer: jax.Array, table: Any, readers: Readers, layer: Any, tops: Any
    ) -> list[Part]:
        """Sums of the two readers of a layer over what was written before it."""
        slot, slots = 1 + 2 * layer, jnp.arange(len(buffer))
        sees = reader_rule.sees(self.view, slot - 1 + jnp.arange(2), slots) & (slots < slot)[None]
        top = None if tops is None else lax.dynamic_slice_in_dim(tops, slot - 1, 2)
        logits = self._rows(buffer, table, readers, slot - 1, 2)
        span = (self.view.first, slot)
        centered = self.centered
        return reader_rule.passes(self.ops, buffer, logits, sees, span, top, centered)

    def last_part(self, buffer: jax.Array, table: Any, readers: Readers) -> Part:
        """Sums of the model's last reader over all sources."""
        number, slots = len(self.view.end_R) - 1, jnp.arange(len(buffer))
        sees = reader_rule.sees(self.view, jnp.array([number]), slots)
        logits = self._rows(buffer, table, readers, number, 1)
        span = (self.view.first, number + 1)
        return reader_rule.passes(self.ops, buffer, logits, sees, span, None, False)[0]

    def _rows(self, buffer: Any, table: Any, readers: Readers, first: Any, count: int) -> jax.Array:
        """The logits of some readers on all slots, [count, S, B, T]."""
        if table is None:
            return self._logits(buffer, readers.at(first, count))
        return jnp.swapaxes(lax.dynamic_slice_in_dim(table, first, count, 1), 0, 1)

    def gather(
        self, buffer: Any, values: Any, slot: Any, readers: Readers, stats: Stats, back: Back
    ) -> tuple[list[jax.Array], Back]:
        """Gradients of the sources from `slot` on, from the readers of later layers."""
        number = jnp.arange(len(self.view.end_R))
        sees = reader_rule.sees(self.view, number, slot + jnp.arange(len(values)))
        sees &= (number + 1 >= slot + len(values))[:, None]
        d_values, d_query, d_gain = reader_rule.gather(
            self.ops,
            buffer,
            values,
            sees,
            (slot + len(values), len(buffer)),
            readers,
            stats,
            self.view.count_R,
            back.c_RBT,
            self.eps,
            self.centered,
        )
        d_readers = back.d_readers._replace(
            query_RD=back.d_readers.query_RD + d_query, gain_RD=back.d_readers.gain_RD + d_gain
        )
        return list(d_values), back._replace(d_readers=d_readers)
