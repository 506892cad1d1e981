"""Passes over a buffer of sources as Pallas kernels for TPU: each slot in a span is read once.

What XLA makes of the same sums reads every slot for every reader, those that are masked included,
in passes of their own for mixes and dot products. Here a grid runs over tiles of tokens and, inside
a tile, over the slots of the span; mixes and dot products of all readers are taken from a slot
while it is in fast memory. Sums are float32, in a fixed order.

Bytes moved for R readers of n slots: n slots in the compute dtype once, R mixes in float32 out; for
the dot products R other arrays in.

B batch, T sequence, D width, S slots, R readers, N tokens of a device, P slots of one grid step.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_ROWS = 16  # of a tile that stays in registers; bfloat16 is packed in 16 rows
_TILE_BYTES = 1 << 19  # of a slot's part in fast memory
_PART = 512  # of the width that stays in registers
_SLOTS = 4

INTERPRET = False  # runs the kernels as plain XLA, where there is no TPU


def refusal(tokens: int, width: int, dtype: str) -> str:
    """Why the kernels cannot take so many tokens a device of such a width; empty if they can."""
    if dtype == "float64":
        return "model.dtype=float64, they need bfloat16 or float32"
    if width % _LANES:
        return f"model.width={width}, they need a multiple of {_LANES}"
    if tokens % _ROWS:
        return f"{tokens} tokens a device, they need a multiple of {_ROWS}"
    return ""


def mix_all(buffer_SBTD: jax.Array, factors_RSBT: jax.Array, span: Any) -> jax.Array:
    """As `routing_ops.mix_all`."""
    return _run(buffer_SBTD, factors_RSBT, None, span)[0]


def mix_and_dot(
    buffer_SBTD: jax.Array, factors_RSBT: jax.Array, others_RBTD: jax.Array, span: Any
) -> tuple[jax.Array, jax.Array]:
    """As `routing_ops.mix_and_dot`."""
    mixes_RBTD, dots_RBTS = _run(buffer_SBTD, factors_RSBT, others_RBTD, span)
    return mixes_RBTD, jnp.moveaxis(dots_RBTS[..., : len(buffer_SBTD)], -1, 1)


def _run(buffer_SBTD: jax.Array, factors_RSBT: jax.Array, others: Any, span: Any) -> Any:
    """Runs the kernel on the tokens of each device."""
    factors_RBTS = jnp.moveaxis(factors_RSBT, 1, -1)
    lanes = -(-len(buffer_SBTD) // _LANES) * _LANES
    spare = lanes - len(buffer_SBTD)
    factors_RBTS = jnp.pad(factors_RBTS, [(0, 0)] * 3 + [(0, spare)])
    span_2 = jnp.stack([jnp.asarray(bound, jnp.int32) for bound in span])
    call = functools.partial(_local, interpret=INTERPRET)
    if jax.sharding.get_abstract_mesh().empty:
        return call(span_2, factors_RBTS, buffer_SBTD, others)
    tokens = nn.logical_to_mesh_axes((None, "batch", "length", None))
    whole = jax.sharding.PartitionSpec()
    outs = (tokens, None if others is None else tokens)
    sharded = jax.shard_map(
        call,
        in_specs=(whole, tokens, tokens, None if others is None else tokens),
        out_specs=outs,
        check_vma=False,
    )
    return sharded(span_2, factors_RBTS, buffer_SBTD, others)


def _tile(tokens: int, width: int, itemsize: int) -> int:
    """Tokens of a tile: the largest divisor whose slot stays below the limit."""
    most = max(_TILE_BYTES // (width * itemsize) // _ROWS, 1)
    rows = tokens // _ROWS
    return _ROWS * max(n for n in range(1, min(most, rows) + 1) if rows % n == 0)


def _local(
    span_2: jax.Array, factors_RBTS: jax.Array, buffer_SBTD: jax.Array, others: Any, interpret: bool
) -> Any:
    """Mixes [R, B, T, D] and dot products [R, B, T, lanes] (None without others) of one device."""
    S, B, T, D = buffer_SBTD.shape
    R, N, lanes = len(factors_RBTS), B * T, factors_RBTS.shape[-1]
    tile = _tile(N, D, buffer_SBTD.dtype.itemsize)
    step_slots = min(_SLOTS, S)

    def slot(place: int) -> Callable[..., Any]:
        def index(i: Any, step: Any, span: Any) -> Any:
            # Past the span the last slot again: what is there already is not fetched.
            number = jnp.minimum(span[0] + step * step_slots + place, span[1] - 1)
            return jnp.maximum(number, 0), i, 0

        return index

    def of_tile(i: Any, step: Any, span: Any) -> Any:
        return 0, i, 0

    factor_spec = pl.BlockSpec((R, tile, lanes), of_tile)
    mix_spec = pl.BlockSpec((R, tile, D), of_tile)
    slot_specs = [pl.BlockSpec((1, tile, D), slot(place)) for place in range(step_slots)]
    wide_mix = jax.ShapeDtypeStruct((R, N, D), jnp.float32)
    dots = jax.ShapeDtypeStruct((R, N, lanes), jnp.float32)
    flat = buffer_SBTD.reshape(S, N, D)
    arguments = [factors_RBTS.reshape(R, N, lanes), *[flat] * step_slots]
    if others is not None:
        arguments.append(others.reshape(R, N, D))
    has_dots = others is not None
    results = pl.pallas_call(
        functools.partial(_kernel, step_slots, has_dots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(N // tile, math.ceil(S / step_slots)),
            in_specs=[factor_spec, *slot_specs, *[mix_spec] * has_dots],
            out_specs=[mix_spec, *[factor_spec] * has_dots],
        ),
        out_shape=[wide_mix, *[dots] * has_dots],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(S, R, N, D, buffer_SBTD.dtype.itemsize, has_dots),
        name="route_and_dot" if has_dots else "route",
        interpret=interpret,
    )(span_2, *arguments)
    mixes = results[0].reshape(R, B, T, D)
    return mixes, results[1].reshape(R, B, T, lanes) if has_dots else None


def _cost(S: int, R: int, N: int, D: int, itemsize: int, has_dots: bool) -> pl.CostEstimate:
    """Of the mean over all layers: half of the slots are in the span."""
    slots = S / 2
    arrays = R * (1 + has_dots)
    return pl.CostEstimate(
        flops=int(2 * slots * arrays * N * D),
        bytes_accessed=int(slots * N * D * itemsize + arrays * N * D * 4),
        transcendentals=0,
    )


def _kernel(step_slots: int, has_dots: bool, span: Any, factors: Any, *refs: Any) -> None:
    slots, rest = refs[:step_slots], refs[step_slots:]
    others, mixes, dots = (rest[0], rest[1], rest[2]) if has_dots else (None, rest[0], None)
    step = pl.program_id(1)
    R, tile, lanes = factors.shape
    D = mixes.shape[-1]
    part = max(n for n in range(_LANES, _PART + 1, _LANES) if D % n == 0)

    @pl.when(step == 0)
    def _start() -> None:
        mixes[...] = jnp.zeros_like(mixes)
        if dots is not None:
            dots[...] = jnp.zeros_like(dots)

    first = span[0] + step * step_slots

    @pl.when(first < span[1])
    def _add() -> None:
        def rows(number: Any, carry: None) -> None:
            here = pl.ds(number * _ROWS, _ROWS)
            lane = lax.broadcasted_iota(jnp.int32, (_ROWS, lanes), 1)
            places = [first + place for place in range(step_slots)]
            columns = [lane == jnp.where(place < span[1], place, -1) for place in places]
            weights = [
                [
                    jnp.sum(jnp.where(c, factors[r, here, :], 0.0), axis=1, keepdims=True)
                    for c in columns
                ]
                for r in range(R)
            ]
            sums = [[0.0] * step_slots for _ in range(R)]
            for start in range(0, D, part):
                there = pl.ds(start, part)
                values = [slot[0, here, there].astype(jnp.float32) for slot in slots]
                for r in range(R):
                    total = mixes[r, here, there]
                    for weight, value in zip(weights[r], values, strict=True):
                        total += weight * value
                    mixes[r, here, there] = total
                    if has_dots:
                        other = others[r, here, there].astype(jnp.float32)
                        for place, value in enumerate(values):
                            sums[r][place] += jnp.sum(value * other, axis=1, keepdims=True)
            if has_dots:
                for r in range(R):
                    row = dots[r, here, :]
                    for column, dot in zip(columns, sums[r], strict=True):
                        row = jnp.where(column, dot, row)
                    dots[r, here, :] = row

        lax.fori_loop(0, tile // _ROWS, rows, None)
