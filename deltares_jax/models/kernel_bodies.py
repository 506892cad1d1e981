"""The bodies of the routing kernels: one grid step, a tile of tokens and some slots.

Tokens lie along the lanes. Operands are references to blocks in fast memory: SLOTS slots
[1, 1, D, tile], then what `routing_kernels` hands over and takes back, as [R, 1, height, tile].

D width, S slots, R readers, K sources whose gradients are gathered.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS = 16  # of the width that stay in registers; bfloat16 is packed by 16
SLOTS = 4  # of one grid step


def _values(slots: Any, number: Any) -> list[jax.Array]:
    """Some rows of the slots of a step, in float32."""
    return [slot[0, 0, pl.ds(number * ROWS, ROWS), :].astype(jnp.float32) for slot in slots]


def put(K: int, slot: Any, *refs: Any) -> None:
    """Copies K values into the buffer that lies in the same memory."""
    values, buffer, semaphores = refs[:K], refs[K + 1], refs[K + 2]
    copies = [
        pltpu.make_async_copy(value, buffer.at[slot[0] + k], semaphores.at[k])
        for k, value in enumerate(values)
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def read(R: int, eps: float, D: int, bounds: Any, *refs: Any) -> None:
    """Adds some slots to Σ u s, top and Σ u of R readers, and to Σ s if there is room for it.

    `bounds`: the first slot, the last plus 1, the end of each reader's view.
    """
    slots, (directions, *outs) = refs[:SLOTS], refs[SLOTS:]
    *mixes, tops, sums = outs
    step, tile = pl.program_id(2), tops.shape[-1]

    @pl.when(step == 0)
    def _start() -> None:
        tops[...] = jnp.full_like(tops, -jnp.inf)
        for out in (*mixes, sums):
            out[...] = jnp.zeros_like(out)

    first = bounds[0] + step * SLOTS

    @pl.when(first < bounds[1])
    def _add() -> None:
        places = [first + place for place in range(SLOTS)]

        def products(number: Any, carry: Any) -> Any:
            squares, dots = carry
            values = _values(slots, number)
            squares = [total + v * v for total, v in zip(squares, values, strict=True)]
            here = pl.ds(number * ROWS, ROWS)
            rows = [directions[r, 0, here, :] for r in range(R)]
            dots = [
                [total + v * rows[r] for total, v in zip(dots[r], values, strict=True)]
                for r in range(R)
            ]
            return squares, dots

        zeros = [jnp.zeros((ROWS, tile), jnp.float32)] * SLOTS
        squares, dots = lax.fori_loop(0, D // ROWS, products, (zeros, [zeros] * R))
        scales = [lax.rsqrt(jnp.sum(square, axis=0, keepdims=True) / D + eps) for square in squares]
        rescales: list[Any] = []
        weights: list[Any] = []
        for r in range(R):
            old = tops[r, 0, :, :]
            logits = [
                jnp.where(
                    place < bounds[2 + r], jnp.sum(dot, axis=0, keepdims=True) * scale, -jnp.inf
                )
                for place, dot, scale in zip(places, dots[r], scales, strict=True)
            ]
            top = functools.reduce(jnp.maximum, logits, old)
            finite = jnp.where(top == -jnp.inf, 0.0, top)
            rescales.append(jnp.exp(old - finite))
            weights.append([jnp.exp(logit - finite) for logit in logits])
            tops[r, 0, :, :] = top
            sums[r, 0, :, :] = sums[r, 0, :, :] * rescales[r] + functools.reduce(
                jnp.add, weights[r]
            )
        # Of a total over the sources as they are, where it is asked for.
        ones = [jnp.where(place < bounds[1], 1.0, 0.0) for place in places]
        rescales, weights = [*rescales, 1.0], [*weights, ones]

        def mix(number: Any, carry: None) -> None:
            here, values = pl.ds(number * ROWS, ROWS), _values(slots, number)
            for out, rescale, weight in zip(mixes, rescales, weights, strict=False):
                total = out[0, 0, here, :] * rescale
                for w, value in zip(weight, values, strict=True):
                    total += w * value
                out[0, 0, here, :] = total

        lax.fori_loop(0, D // ROWS, mix, None)


class _Reader(NamedTuple):
    """The reader of a slot: whether it sees source k, how many it sees, its row, and its stats."""

    seen: list[Any]
    count: Any
    row: Any
    top: jax.Array
    total: jax.Array
    c: jax.Array

    def center(self, u: jax.Array, k: int) -> jax.Array:
        """Its weight on source k minus 1/count; see `reader_rule.mix_of`."""
        count = jnp.maximum(self.count, 1).astype(jnp.float32)
        return jnp.where(self.seen[k], (count * u - self.total) / (count * self.total), 0.0)


def _reader(place: Any, K: int, bounds: Any, stats: Any) -> _Reader:
    S = stats.shape[2]
    number = jnp.minimum(place, S - 1)
    end, count, row = bounds[2 + number], bounds[2 + S + number], pl.ds(number, 1)
    seen = [(place < bounds[1]) & (bounds[0] - K + k < end) for k in range(K)]
    return _Reader(seen, count, row, *(stats[i, 0, row, :] for i in range(3)))


def _dot(a: jax.Array, b: jax.Array, along: int) -> jax.Array:
    """The product of matrices, summed over the last axis of a and axis `along` of b."""
    return lax.dot_general(
        a,
        b,
        (((1,), (along,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _mix_and_dot(slots: Any, values: Any, mixes: Any, factors: list[list[Any]]) -> list[Any]:
    """Adds the slots times their factors to the mixes; products of slots and values, by rows."""
    K, D, tile = mixes.shape

    def rows(number: Any, sums: Any) -> Any:
        here, grads = pl.ds(number * ROWS, ROWS), _values(slots, number)
        result = []
        for k in range(K):
            total, value = mixes[k, here, :], values[k][0, 0, here, :].astype(jnp.float32)
            for factor, grad in zip(factors[k], grads, strict=True):
                total += factor * grad
            mixes[k, here, :] = total
            result.append([s + g * value for s, g in zip(sums[k], grads, strict=True)])
        return result

    zeros = [[jnp.zeros((ROWS, tile), jnp.float32)] * SLOTS for _ in range(K)]
    sums: list[Any] = lax.fori_loop(0, D // ROWS, rows, zeros)
    return sums


def gather(K: int, eps: float, centered: bool, bounds: Any, *refs: Any) -> None:
    """Gradients of K sources, and of directions, from the gradients of mixes in some slots.

    In: the slots, the sources, the directions by slot as [S, D] and [D, S], and the readers' top
    logits, sums and d_mix · mix as [3, 1, S, tile]. Out: the gradients. Scratch, in float32: mixes
    [K, D, tile]; dots of sources and directions, and their gradients, [K, S, tile]; 1/rms of the
    sources and its gradient, [2 K, 1, tile].

    `bounds`: the first slot, which is behind the sources, and the last plus 1; by slot the end of
    its reader's view, and the number of its sources.
    """
    slots, values, rest = refs[:SLOTS], refs[SLOTS : SLOTS + K], refs[SLOTS + K :]
    directions_SD, directions_DS, stats, *d_values = rest[: 3 + K]
    d_directions, mixes, dots, d_dots, rows = rest[3 + K :]
    step, D = pl.program_id(2), directions_SD.shape[1]
    # Products of matrices by parts of the width: what lies between them takes up fast memory.
    height = 128 if D % 128 == 0 else D
    parts = [pl.ds(start, height) for start in range(0, D, height)]
    scales, d_scales = [rows.at[k] for k in range(K)], [rows.at[K + k] for k in range(K)]

    @pl.when((step == 0) & (pl.program_id(1) == 0))
    def _start_row() -> None:
        d_directions[...] = jnp.zeros_like(d_directions)

    @pl.when(step == 0)
    def _start() -> None:
        for total in (mixes, d_dots, rows):
            total[...] = jnp.zeros_like(total)
        for k in range(K):
            square, dots[k, :, :] = jnp.zeros_like(scales[k][...]), jnp.zeros_like(dots[k, :, :])
            for part in parts:
                value = values[k][0, 0, part, :].astype(jnp.float32)
                square += jnp.sum(value * value, axis=0, keepdims=True) / D
                dots[k, :, :] += _dot(directions_SD[:, part], value, 0)
            if eps == 0:
                square = jnp.where(square > 0, square, 1.0)
            scales[k][...] = lax.rsqrt(square + eps)

    first = bounds[0] + step * SLOTS

    @pl.when(first < bounds[1])
    def _add() -> None:
        places = [first + place for place in range(SLOTS)]
        readers = [_reader(place, K, bounds, stats) for place in places]
        weights: list[list[Any]] = [[] for _ in range(K)]
        factors: list[list[Any]] = [[] for _ in range(K)]
        for k in range(K):
            for reader in readers:
                logit = dots[k, reader.row, :] * scales[k][...]
                u = jnp.exp(jnp.where(reader.seen[k], logit - reader.top, -jnp.inf))
                weights[k].append(u / reader.total)
                factors[k].append(reader.center(u, k) if centered else weights[k][-1])

        sums = _mix_and_dot(slots, values, mixes, factors)
        for k in range(K):
            d_scale = d_scales[k][...]
            for place, reader, weight, part in zip(
                places, readers, weights[k], sums[k], strict=True
            ):
                d_factor = jnp.sum(part, axis=0, keepdims=True)
                chosen = reader.seen[k] & (reader.count > 1)
                d_logit = jnp.where(chosen, weight * (d_factor - reader.c), 0.0)
                d_scale += d_logit * dots[k, reader.row, :]

                @pl.when(place < bounds[1])
                def _store(k: int = k, reader: Any = reader, d_logit: Any = d_logit) -> None:
                    d_dots[k, reader.row, :] = d_logit * scales[k][...]

            d_scales[k][...] = d_scale

    @pl.when(step == pl.num_programs(2) - 1)
    def _end() -> None:
        for k in range(K):
            drift = d_scales[k][...] * scales[k][...] ** 3 / D
            for part in parts:
                value = values[k][0, 0, part, :].astype(jnp.float32)
                d_directions[0, :, part] += _dot(d_dots[k, :, :], value, 1)
                pulled = _dot(directions_DS[part, :], d_dots[k, :, :], 0)
                d_value = mixes[k, part, :] + pulled - drift * value
                d_values[k][0, 0, part, :] = d_value.astype(d_values[k].dtype)
