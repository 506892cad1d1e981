"""Passes over a buffer of sources as Pallas kernels for TPU: each slot in a span is read once.

What XLA makes of the same sums reads every slot for every reader, those that are masked included,
in passes of their own for mixes and dot products. Here a grid runs over tiles of tokens and, inside
a tile, over the slots of the span; mixes and dot products of all readers are taken from a slot
while it is in fast memory. Sums are float32, in a fixed order.

Bytes moved for R readers of n slots: n slots in the compute dtype once, R mixes in float32 out.
Back, for K sources that n readers see: n slots and K sources once, K gradients out, all in the
compute dtype.

Tokens lie along the lanes, as the compiler lays out the stream between matmuls: a buffer that is
[S, B, T, D] to jax is [S, B, D, T] here, without a copy.

B batch, T sequence, D width, S slots, R readers.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deltares_jax.models import kernel_bodies, variants
from deltares_jax.models.kernel_bodies import ROWS, SLOTS

_LANES = 128
_TILE_BYTES = 3 << 18  # of a slot's part in fast memory
_FAST_MEMORY = 28 << 20

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
    return needed < _FAST_MEMORY - (4 << 20)  # left to the compiler


def put(buffer_SBTD: jax.Array, values: list[jax.Array], slot: Any) -> jax.Array:
    """As `routing_loops.put`, as plain copies in memory."""

    def local(slot_1: jax.Array, buffer_SBDT: jax.Array, *values: jax.Array) -> jax.Array:
        K, anywhere = len(values), pl.BlockSpec(memory_space=pl.ANY)
        moved = 2 * K * math.prod(values[0].shape) * buffer_SBDT.dtype.itemsize
        result: jax.Array = pl.pallas_call(
            functools.partial(kernel_bodies.put, K),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(1,),
                in_specs=[anywhere] * (K + 1),
                out_specs=anywhere,
                scratch_shapes=[pltpu.SemaphoreType.DMA((K,))],
            ),
            out_shape=jax.ShapeDtypeStruct(buffer_SBDT.shape, buffer_SBDT.dtype),
            input_output_aliases={K + 1: 0},
            cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=moved, transcendentals=0),
            name="route_put",
            interpret=INTERPRET,
        )(slot_1, *values, buffer_SBDT)
        return result

    slot_1 = jnp.asarray(slot, jnp.int32)[None]
    arrays = [jnp.swapaxes(buffer_SBTD, 2, 3), *(jnp.swapaxes(value, 1, 2) for value in values)]
    along, whole = _placement()
    if along is not None:
        value = jax.sharding.PartitionSpec(*along[1:])
        specs = (whole, along, *[value] * len(values))
        local = jax.shard_map(local, in_specs=specs, out_specs=along, check_vma=False)
    return jnp.swapaxes(local(slot_1, *arrays), 2, 3)


def _placement() -> tuple[Any, Any]:
    """How [n, B, height, T] is cut over the mesh, None without one, and what is not cut."""
    whole = jax.sharding.PartitionSpec()
    if jax.sharding.get_abstract_mesh().empty:
        return None, whole
    return nn.logical_to_mesh_axes((None, "batch", None, "length")), whole


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
    call = _Call(
        name="route",
        body=functools.partial(kernel_bodies.read, R, eps, D),
        ins=["same"],
        outs=[(1, D, jnp.float32)] * (R + centered) + [(R, 1, jnp.float32)] * 2,
    )
    *mixes, top_RB1T, sum_RB1T = call.run(bounds, buffer_SBTD, [scaled_R1D1])
    mixes = [jnp.swapaxes(mix[0], 1, 2) for mix in mixes]
    return mixes[:R], top_RB1T[:, :, 0], sum_RB1T[:, :, 0], mixes[R] if centered else None


def gather(
    buffer_SBTD: jax.Array,
    slot: Any,
    count: int,
    direction_RD: jax.Array,
    end_R: np.ndarray,
    count_R: np.ndarray,
    stats: tuple[jax.Array, jax.Array, jax.Array],
    eps: float,
    centered: bool,
) -> tuple[list[jax.Array], jax.Array]:
    """As `routing_loops.gather`."""
    S, D = len(buffer_SBTD), buffer_SBTD.shape[-1]
    by_slot = [np.pad(numbers, (1, S - 1 - len(numbers))) for numbers in (end_R, count_R)]
    span = [jnp.asarray(bound, jnp.int32)[None] for bound in (slot + count, S)]
    bounds = jnp.concatenate([*span, *(jnp.asarray(n, jnp.int32) for n in by_slot)])
    rows = (1, S - 1 - len(direction_RD))
    direction_SD = jnp.pad(direction_RD.astype(jnp.float32), (rows, (0, 0)))
    stats_3BST = jnp.swapaxes(jnp.pad(jnp.stack(stats), ((0, 0), rows, (0, 0), (0, 0))), 1, 2)
    call = _Call(
        name="route_back",
        body=functools.partial(kernel_bodies.gather, count, eps, centered),
        ins=["same", "same", "token"],
        outs=[(1, D, buffer_SBTD.dtype)] * count,
        sums=(direction_SD.shape,),
        scratch=((count, D), (count, S), (count, S), (2 * count, 1)),
        sources=count,
    )
    arrays = [direction_SD, direction_SD.T, stats_3BST]
    *d_values, d_direction_SD = call.run(bounds, buffer_SBTD, arrays)
    d_values = [jnp.swapaxes(d_value[0], 1, 2) for d_value in d_values]
    return d_values, d_direction_SD[1 : 1 + len(direction_RD)]


class _Call(NamedTuple):
    """A kernel over tiles of tokens and, inside a tile, over the slots of a span.

    ins: of each array but the buffer, `token` for [n, B, height, T], or `same` for all tokens.
    outs: (n, height, dtype) of what comes out as [n, B, height, T].
    sums: shapes of what comes out summed over all tokens.
    scratch: (n, height) of what a tile has in fast memory, as [n, height, tile] in float32.
    sources: how many slots before the span the kernel reads, too.
    """

    name: str
    body: Any
    ins: list[str]
    outs: list[tuple[int, int, Any]]
    sums: tuple[tuple[int, ...], ...] = ()
    scratch: tuple[tuple[int, int], ...] = ()
    sources: int = 0

    def run(
        self, bounds: jax.Array, buffer_SBTD: jax.Array, arrays: list[jax.Array]
    ) -> tuple[jax.Array, ...]:
        """What the kernel puts out, on the tokens of each device."""
        buffer_SBDT = jnp.swapaxes(buffer_SBTD, 2, 3)
        along, whole = _placement()
        if along is None:
            return self._run(bounds, buffer_SBDT, *arrays)
        axes = jax.tree.leaves([axis for axis in along if axis is not None])

        def local(*args: jax.Array) -> tuple[jax.Array, ...]:
            results = self._run(*args)
            n = len(self.outs)
            return *results[:n], *(jax.lax.psum(total, axes) for total in results[n:])

        run = jax.shard_map(
            local,
            in_specs=(whole, along, *(whole if kind == "same" else along for kind in self.ins)),
            out_specs=(along,) * len(self.outs) + (whole,) * len(self.sums),
            check_vma=False,
        )
        results: tuple[jax.Array, ...] = run(bounds, buffer_SBDT, *arrays)
        return results

    def _run(
        self, bounds: jax.Array, buffer_SBDT: jax.Array, *arrays: jax.Array
    ) -> tuple[jax.Array, ...]:
        S, B, D, T = buffer_SBDT.shape
        itemsize = buffer_SBDT.dtype.itemsize
        fits = [n for n in range(_LANES, T + 1, _LANES) if T % n == 0]
        tile = max([n for n in fits if n * D * itemsize <= _TILE_BYTES], default=fits[0])

        def slot(place: int) -> Any:
            def index(b: Any, t: Any, step: Any, bounds: Any) -> Any:
                # Past the span the last slot again: what is there already is not fetched.
                number = jnp.minimum(bounds[0] + step * SLOTS + place, bounds[1] - 1)
                return jnp.maximum(number, 0), b, 0, t

            return pl.BlockSpec((1, 1, D, tile), index)

        def source(k: int) -> Any:
            def index(b: Any, t: Any, step: Any, bounds: Any) -> Any:
                return bounds[0] - self.sources + k, b, 0, t

            return pl.BlockSpec((1, 1, D, tile), index)

        def by_token(n: int, height: int) -> Any:
            return pl.BlockSpec((n, 1, height, tile), lambda b, t, step, bounds: (0, b, 0, t))

        def same(array: jax.Array) -> Any:
            zeros = (0,) * array.ndim
            one = pl.Buffered(1)
            return pl.BlockSpec(array.shape, lambda b, t, step, bounds: zeros, pipeline_mode=one)

        def by_row(shape: tuple[int, ...]) -> Any:
            zeros = (0,) * len(shape)
            return pl.BlockSpec((1, *shape), lambda b, t, step, bounds: (b, *zeros))

        specs = [
            same(array) if kind == "same" else by_token(len(array), array.shape[2])
            for kind, array in zip(self.ins, arrays, strict=True)
        ]
        shapes: list[Any] = [
            jax.ShapeDtypeStruct((n, B, height, T), dtype) for n, height, dtype in self.outs
        ]
        shapes += [jax.ShapeDtypeStruct((B, *shape), jnp.float32) for shape in self.sums]
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in [*arrays, *shapes])
        # Of the mean over the layers, where half of the slots are in the span.
        moved += int((self.sources + S / 2) * B * T * D * itemsize)
        results = pl.pallas_call(
            self.body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(B, T // tile, math.ceil(S / SLOTS)),
                in_specs=[*map(slot, range(SLOTS)), *map(source, range(self.sources)), *specs],
                out_specs=[
                    *(by_token(n, height) for n, height, _ in self.outs),
                    *map(by_row, self.sums),
                ],
                scratch_shapes=[pltpu.VMEM((n, h, tile), jnp.float32) for n, h in self.scratch],
            ),
            out_shape=shapes,
            compiler_params=pltpu.CompilerParams(
                # What is summed over the tokens of a row wants one tile after the other.
                dimension_semantics=("parallel", "arbitrary", "arbitrary"),
                vmem_limit_bytes=_FAST_MEMORY,
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * S * B * T * sum(n * height for n, height, _ in self.outs),
                bytes_accessed=moved,
                transcendentals=0,
            ),
            name=self.name,
            interpret=INTERPRET,
        )(bounds, *[buffer_SBDT] * (SLOTS + self.sources), *arrays)
        n = len(self.outs)
        return *results[:n], *(jnp.sum(total, axis=0) for total in results[n:])
