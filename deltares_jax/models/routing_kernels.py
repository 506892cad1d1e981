"""Passes over a buffer of sources as Pallas kernels for TPU: each slot in a span is read once.

What XLA makes of the same sums reads every slot for every reader, those that are masked included,
in passes of their own for mixes and dot products. Here a grid runs over tiles of tokens and, inside
a tile, over the slots of the span; mixes and dot products of all readers are taken from a slot
while it is in fast memory. Sums are float32, in a fixed order.

Bytes moved for R readers of n slots: n slots in the compute dtype once, R mixes in float32 out; for
the dot products R other arrays in.

Tokens lie along the lanes, as the compiler lays out the stream between matmuls: a buffer that is
[S, B, T, D] to jax is [S, B, D, T] here, without a copy.

B batch, T sequence, D width, S slots, R readers.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deltares_jax.models import variants

_LANES = 128
_ROWS = 16  # of the width that stay in registers; bfloat16 is packed by 16
_TILE_BYTES = 3 << 18  # of a slot's part in fast memory
_SLOTS = 4  # of one grid step
_FAST_MEMORY = 24 << 20

INTERPRET = False  # runs the kernels as plain XLA, where there is no TPU


def choose(model: Any, platform: str, row_tokens: int) -> str:
    """What `model.residual.kernel` means on a platform, on rows of so many tokens a device.

    `auto` is these kernels on TPU where sources grow with every sublayer and the shape allows it,
    else `batched` where there is routing.

    Raises:
      ValueError: they are asked for, and cannot run there or on that shape.
    """
    name, grows = model.residual.kernel, variants.VARIANTS[model.residual.variant].grows
    if name not in ("auto", "pallas") or grows == "never":
        return name
    reason = ""
    if platform != "tpu":
        reason = f"platform {platform}, it needs tpu"
    elif model.dtype == "float64":
        reason = "model.dtype=float64, it needs bfloat16 or float32"
    elif model.width % _ROWS:
        reason = f"model.width={model.width}, it needs a multiple of {_ROWS}"
    elif row_tokens % _LANES:
        reason = f"{row_tokens} tokens of a row on a device, it needs a multiple of {_LANES}"
    if name == "pallas" and reason:
        raise ValueError(f"model.residual.kernel=pallas does not go with {reason}")
    return "batched" if reason or grows == "block" else "pallas"


def mix_all(buffer_SBTD: jax.Array, factors_RSBT: jax.Array, span: Any) -> jax.Array:
    """As `routing_ops.mix_all`."""
    return _run(buffer_SBTD, factors_RSBT, None, span)[0]


def mix_and_dot(
    buffer_SBTD: jax.Array, factors_RSBT: jax.Array, others_RBTD: jax.Array, span: Any
) -> tuple[jax.Array, jax.Array]:
    """As `routing_ops.mix_and_dot`."""
    mixes_RBTD, dots_RBST = _run(buffer_SBTD, factors_RSBT, others_RBTD, span)
    return mixes_RBTD, jnp.swapaxes(dots_RBST, 1, 2)


def _run(buffer_SBTD: jax.Array, factors_RSBT: jax.Array, others_RBTD: Any, span: Any) -> Any:
    """Mixes [R, B, T, D] and dot products [R, B, S, T] (None without others)."""
    arrays = [jnp.swapaxes(buffer_SBTD, 2, 3), jnp.swapaxes(factors_RSBT, 1, 2)]
    if others_RBTD is not None:
        arrays.append(jnp.swapaxes(others_RBTD, 2, 3))
    bounds_2 = jnp.stack([jnp.asarray(bound, jnp.int32) for bound in span])
    call = functools.partial(_local, interpret=INTERPRET)
    if not jax.sharding.get_abstract_mesh().empty:
        along = nn.logical_to_mesh_axes((None, "batch", None, "length"))
        whole = jax.sharding.PartitionSpec()
        call = jax.shard_map(
            call,
            in_specs=(whole, *[along] * len(arrays)),
            out_specs=(along,) * (len(arrays) - 1),
            check_vma=False,
        )
    results = call(bounds_2, *arrays)
    return jnp.swapaxes(results[0], 2, 3), results[1] if len(results) > 1 else None


def _local(
    bounds_2: jax.Array,
    buffer_SBDT: jax.Array,
    factors_RBST: jax.Array,
    *others_RBDT: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """As `_run`, of one device, in the kernel's order of axes."""
    S, B, D, T = buffer_SBDT.shape
    R = len(factors_RBST)
    fits = [n for n in range(_LANES, T + 1, _LANES) if T % n == 0]
    itemsize = buffer_SBDT.dtype.itemsize
    tile = max([n for n in fits if n * D * itemsize <= _TILE_BYTES], default=fits[0])

    def slot(place: int) -> Any:
        def index(b: Any, t: Any, step: Any, bounds: Any) -> Any:
            # Past the span the last slot again: what is there already is not fetched.
            number = jnp.minimum(bounds[0] + step * _SLOTS + place, bounds[1] - 1)
            return jnp.maximum(number, 0), b, 0, t

        return pl.BlockSpec((1, 1, D, tile), index)

    def of_tile(height: int) -> Any:
        return pl.BlockSpec((R, 1, height, tile), lambda b, t, step, bounds: (0, b, 0, t))

    shapes = [jax.ShapeDtypeStruct((R, B, n, T), jnp.float32) for n in (D, S)]
    dots = len(others_RBDT)
    results = pl.pallas_call(
        functools.partial(_kernel, bool(dots)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, T // tile, math.ceil(S / _SLOTS)),
            in_specs=[*map(slot, range(_SLOTS)), of_tile(S), *[of_tile(D)] * dots],
            out_specs=[of_tile(D), of_tile(S)][: 1 + dots],
        ),
        out_shape=shapes[: 1 + dots],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_FAST_MEMORY,
        ),
        cost_estimate=_cost(S, R, B * T * D, itemsize, dots),
        name="route_and_dot" if dots else "route",
        interpret=interpret,
    )(bounds_2, *[buffer_SBDT] * _SLOTS, factors_RBST, *others_RBDT)
    return tuple(results)


def _cost(S: int, R: int, size: int, itemsize: int, dots: int) -> pl.CostEstimate:
    """Of the mean over the layers, where half of the slots are in the span."""
    slots = S / 2
    return pl.CostEstimate(
        flops=int(2 * slots * R * (1 + dots) * size),
        bytes_accessed=int((slots * itemsize + R * 4 + dots * R * itemsize) * size),
        transcendentals=0,
    )


def _kernel(has_dots: bool, bounds: Any, *refs: Any) -> None:
    slots, (factors, *rest) = refs[:_SLOTS], refs[_SLOTS:]
    others: Any
    dots: Any
    others, mixes, dots = rest if has_dots else (None, rest[0], None)
    step = pl.program_id(2)
    R, _, D, tile = mixes.shape

    @pl.when(step == 0)
    def _start() -> None:
        mixes[...] = jnp.zeros_like(mixes)
        if has_dots:
            dots[...] = jnp.zeros_like(dots)

    first = bounds[0] + step * _SLOTS
    places = [first + place for place in range(_SLOTS)]

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
            here = pl.ds(number * _ROWS, _ROWS)
            values = [slot[0, 0, here, :].astype(jnp.float32) for slot in slots]
            for r in range(R):
                total = mixes[r, 0, here, :]
                for weight, value in zip(weights[r], values, strict=True):
                    total += weight * value
                mixes[r, 0, here, :] = total
            if not has_dots:
                return sums
            wide = [others[r, 0, here, :].astype(jnp.float32) for r in range(R)]
            return [
                [total + value * wide[r] for total, value in zip(sums[r], values, strict=True)]
                for r in range(R)
            ]

        zeros = [[jnp.zeros((_ROWS, tile), jnp.float32)] * _SLOTS for _ in range(R * has_dots)]
        sums = lax.fori_loop(0, D // _ROWS, rows, zeros)
        if has_dots:
            for place, p in enumerate(places):

                @pl.when(p < bounds[1])
                def _store(place: int = place, p: Any = p) -> None:
                    for r in range(R):
                        dot = jnp.sum(sums[r][place], axis=0, keepdims=True)
                        dots[r, 0, pl.ds(p, 1), :] = dot
