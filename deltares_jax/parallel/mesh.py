"""The device mesh, and the checks that a config fits it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections.config_dict.config_dict import FrozenConfigDict

AXES = ("replica", "data", "fsdp", "tensor")
BATCH_AXES = ("replica", "data", "fsdp")


def mesh_shape(mesh: Any, num_devices: int) -> dict[str, int]:
    """Axis sizes with -1 filled in.

    Raises:
      ValueError: the axes do not make up the number of devices.
    """
    shape = {axis: mesh[axis] for axis in AXES}
    fixed = math.prod(size for size in shape.values() if size != -1)
    text = " × ".join(f"mesh.{axis}={size}" for axis, size in shape.items())
    if num_devices % fixed or (-1 not in shape.values() and fixed != num_devices):
        raise ValueError(f"{text} does not make up the {num_devices} devices that were found")
    return {axis: num_devices // fixed if size == -1 else size for axis, size in shape.items()}


def check_fits(config: FrozenConfigDict, shape: dict[str, int]) -> None:
    """Refuses a batch or a model dimension that the mesh does not divide.

    Raises:
      ValueError: names the key, its value and the axis.
    """
    parts = math.prod(shape[axis] for axis in BATCH_AXES)
    batch, accumulation = config.train.batch_size, config.train.accumulation
    micro = f"train.batch_size={batch}"
    if accumulation > 1:
        micro += f" / train.accumulation={accumulation} = {batch // accumulation}"
    for text, size in (
        (micro, batch // accumulation),
        (f"eval.batch_size={config.eval.batch_size}", config.eval.batch_size),
    ):
        if size % parts:
            low, high = size // parts * parts, -(-size // parts) * parts
            near = f"{low} or {high}" if low else str(high)
            raise ValueError(
                f"{text} must be a multiple of the {parts} data-parallel devices "
                f"(replica × data × fsdp); nearest: {near}"
            )
    model = config.model
    for axis, keys in {
        "fsdp": ("width",),
        "tensor": ("vocab_size", "num_heads", "num_kv_heads", "mlp_width"),
    }.items():
        for key in keys:
            if model[key] % shape[axis]:
                raise ValueError(
                    f"model.{key}={model[key]} must be a multiple of mesh.{axis}={shape[axis]}"
                )


def make_mesh(shape: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh over the devices, laid out for their network."""
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        devices=devices,
        axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
    )
