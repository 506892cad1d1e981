"""The bodies of the routing kernels: one grid step, a tile of tokens and some slots.

Tokens lie along the lanes. Operands are references to blocks in fast memory: SLOTS slots
[1, 1, D, tile], then what `routing_kernels` hands over and takes back, as [R, 1, height, tile].

D width, R readers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

ROWS = 16  # of the width that stay in registers; bfloat16 is packed by 16
SLOTS = 4  # of one grid step


def _values(slots: Any, number: Any) -> list[jax.Array]:
    """Some rows of the slots of a step, in float32."""
    return [slot[0, 0, pl.ds(number * ROWS, ROWS), :].astype(jnp.float32) for slot in slots]


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


def mix_and_dot(bounds: Any, *refs: Any) -> None:
    """Adds some slots to the mixes, and takes their dot products with the others."""
    slots, (factors, others, *mixes, dots) = refs[:SLOTS], refs[SLOTS:]
    step, (R, _, D, tile) = pl.program_id(2), others.shape

    @pl.when(step == 0)
    def _start() -> None:
        for out in (*mixes, dots):
            out[...] = jnp.zeros_like(out)

    first = bounds[0] + step * SLOTS
    places = [first + place for place in range(SLOTS)]

    @pl.when(first < bounds[1])
    def _add() -> None:
        last = factors.shape[2] - 1
        weights = [
            [
                jnp.where(p < bounds[1], factors[r, 0, pl.ds(jnp.minimum(p, last), 1), :], 0.0)
                for p in places
            ]
            for r in range(R)
        ]

        def rows(number: Any, sums: Any) -> Any:
            here, values = pl.ds(number * ROWS, ROWS), _values(slots, number)
            result = []
            for r in range(R):
                total, other = mixes[r][0, 0, here, :], others[r, 0, here, :].astype(jnp.float32)
                for weight, value in zip(weights[r], values, strict=True):
                    total += weight * value
                mixes[r][0, 0, here, :] = total
                result.append([s + v * other for s, v in zip(sums[r], values, strict=True)])
            return result

        zeros = [[jnp.zeros((ROWS, tile), jnp.float32)] * SLOTS for _ in range(R)]
        sums = lax.fori_loop(0, D // ROWS, rows, zeros)
        for place, p in enumerate(places):

            @pl.when(p < bounds[1])
            def _store(place: int = place, p: Any = p) -> None:
                for r in range(R):
                    dot = jnp.sum(sums[r][place], axis=0, keepdims=True)
                    dots[r, 0, pl.ds(p, 1), :] = dot
