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
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deltares_jax.models import kernel_bodies, variants
from deltares_jax.models.kernel_bodies import ROWS, SLOTS

_LANES = 128
_TILE_BYTES = 3 << 18  # of a slot's part in fast memory
_FAST_MEMORY = 24 << 20

INTERPRET = False  # runs the kernels as plain XLA, where there is no TPU


def choose(model: Any, platform: str, row_tokens: int) -> str:
    """What `model.residual.kernel` means on a platform, on rows of so many tokens a device.

    Where sources grow with every sublayer `auto` is these kernels on TPU if the shape allows it,
    else `direct`, whose memory grows linearly with depth; with blocks it is `batched`.

    Raises:
      ValueError: they are asked for, and cannot run there or on that shape.
    """
    name, grows = model.residual.kernel, variants.VARIANTS[model.residual.variant].grows
    if name not in ("auto", "pallas") or grows == "never":
        return name
    reason = ""
    if platform != "tpu":
        reason = f"platform {platform}, it needs tpu"
    elif model.scan == "blocks":
        reason = "model.scan=blocks, it needs unrolled"
    elif model.dtype == "float64":
        reason = "model.dtype=float64, it needs bfloat16 or float32"
    elif model.width % ROWS:
        reason = f"model.width={model.width}, it needs a multiple of {ROWS}"
    elif row_tokens % _LANES:
        reason = f"{row_tokens} tokens of a row on a device, it needs a multiple of {_LANES}"
    if name == "pallas" and reason:
        raise ValueError(f"model.residual.kernel=pallas does not go with {reason}")
    if grows == "block":
        return "batched"
    return "direct" if reason else "pallas"


def fits(model: Any, readers: int) -> bool:
    """Whether `read` has room in fast memory for so many readers of a model.

    Blocks lie there twice, as the next one is fetched meanwhile; a direction takes a whole lane.
    """
    itemsize = jnp.dtype(model.dtype).itemsize
    block = max(_LANES * model.width, _TILE_BYTES // itemsize)
    mixes = readers + int(model.residual.centered)
    needed = 2 * block * (SLOTS * itemsize + mixes * 4) + 2 * readers * model.width * _LANES * 4
    return needed < _FAST_MEMORY


def read(
    buffer_SBTD: jax.Array,
    direction_RD: jax.Array,
    span: tuple[Any, Any],
    end_R: jax.Array,
    eps: float,
    centered: bool,
) -> tuple[list[jax.Array], jax.Array, jax.Array, Any]:
    """As `routing_loops.read`."""
    D = buffer_SBTD.shape[-1]
    R = len(direction_RD)
    bounds = jnp.stack([jnp.asarray(bound, jnp.int32) for bound in (*span, *end_R)])
    scaled_R1D1 = direction_RD.astype(jnp.float32)[:, None, :, None]
    outs = ["mix"] * (R + centered) + ["row", "row"]
    kernel = functools.partial(kernel_bodies.read, R, eps, D)
    results = _call("route", kernel, bounds, buffer_SBTD, [scaled_R1D1], ["same"], outs, R)
    mixes = [jnp.swapaxes(mix[0], 1, 2) for mix in results[: R + centered]]
    top_RBT, sum_RBT = (row[:, :, 0] for row in results[-2:])
    return mixes[:R], top_RBT, sum_RBT, mixes[R] if centered else None


def mix_and_dot(
    buffer_SBTD: jax.Array, factors_RSBT: jax.Array, others_RBTD: jax.Array, span: Any
) -> tuple[list[jax.Array], jax.Array]:
    """As `routing_loops.mix_and_dot`."""
    R = len(factors_RSBT)
    bounds = jnp.stack([jnp.asarray(bound, jnp.int32) for bound in span])
    arrays = [jnp.swapaxes(factors_RSBT, 1, 2), jnp.swapaxes(others_RBTD, 2, 3)]
    outs = ["mix"] * R + ["slots"]
    results = _call(
        "route_back",
        kernel_bodies.mix_and_dot,
        bounds,
        buffer_SBTD,
        arrays,
        ["slots", "mix"],
        outs,
        R,
    )
    return [jnp.swapaxes(mix[0], 1, 2) for mix in results[:R]], jnp.swapaxes(results[R], 1, 2)


def _call(
    name: str,
    kernel: Any,
    bounds: jax.Array,
    buffer_SBTD: jax.Array,
    arrays: list[jax.Array],
    ins: list[str],
    outs: list[str],
    R: int,
) -> tuple[jax.Array, ...]:
    """Runs a kernel on the tokens of each device.

    Arrays are [R, B, height, T] with a height of D (`mix`), S (`slots`) or 1 (`row`), or the same
    for all tokens (`same`); a `mix` that is put out holds one reader.
    """
    local = functools.partial(_local, name, kernel, ins, outs, R)
    buffer_SBDT = jnp.swapaxes(buffer_SBTD, 2, 3)
    if not jax.sharding.get_abstract_mesh().empty:
        along = nn.logical_to_mesh_axes((None, "batch", None, "length"))
        whole = jax.sharding.PartitionSpec()
        specs = [whole if kind == "same" else along for kind in ins]
        local = jax.shard_map(
            local,
            in_specs=(whole, along, *specs),
            out_specs=(along,) * len(outs),
            check_vma=False,
        )
    results: tuple[jax.Array, ...] = local(bounds, buffer_SBDT, *arrays)
    return results


def _local(
    name: str,
    kernel: Any,
    ins: list[str],
    outs: list[str],
    R: int,
    bounds: jax.Array,
    buffer_SBDT: jax.Array,
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    S, B, D, T = buffer_SBDT.shape
    itemsize = buffer_SBDT.dtype.itemsize
    fits = [n for n in range(_LANES, T + 1, _LANES) if T % n == 0]
    tile = max([n for n in fits if n * D * itemsize <= _TILE_BYTES], default=fits[0])
    heights = {"mix": D, "slots": S, "row": 1}

    def slot(place: int) -> Any:
        def index(b: Any, t: Any, step: Any, bounds: Any) -> Any:
            # Past the span the last slot again: what is there already is not fetched.
            number = jnp.minimum(bounds[0] + step * SLOTS + place, bounds[1] - 1)
            return jnp.maximum(number, 0), b, 0, t

        return pl.BlockSpec((1, 1, D, tile), index)

    def spec(kind: str, readers: int = R) -> Any:
        if kind == "same":
            return pl.BlockSpec((R, 1, D, 1), lambda b, t, step, bounds: (0, 0, 0, 0))
        shape = (readers, 1, heights[kind], tile)
        return pl.BlockSpec(shape, lambda b, t, step, bounds: (0, b, 0, t))

    readers = [1 if kind == "mix" else R for kind in outs]
    pairs = list(zip(outs, readers, strict=True))
    moved: float = sum(B * T * heights[kind] * n * 4 for kind, n in pairs)
    moved += sum(a.size * a.dtype.itemsize for a in arrays) + S / 2 * B * T * D * itemsize
    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, T // tile, math.ceil(S / SLOTS)),
            in_specs=[*map(slot, range(SLOTS)), *map(spec, ins)],
            out_specs=[spec(kind, n) for kind, n in pairs],
        ),
        out_shape=[jax.ShapeDtypeStruct((n, B, heights[k], T), jnp.float32) for k, n in pairs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_FAST_MEMORY,
        ),
        # Of the mean over the layers, where half of the slots are in the span.
        cost_estimate=pl.CostEstimate(
            flops=2 * S * R * B * T * D, bytes_accessed=int(moved), transcendentals=0
        ),
        name=name,
        interpret=INTERPRET,
    )(bounds, *[buffer_SBDT] * SLOTS, *arrays)
    return tuple(results)
