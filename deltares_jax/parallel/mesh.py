"""Devices, the mesh over them, and the checks that a config fits it."""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.parallel import host

AXES = ("replica", "data", "fsdp", "tensor")
BATCH_AXES = ("replica", "data", "fsdp")


def mesh_shape(mesh: Any, num_devices: int, origin: str = "that were found") -> dict[str, int]:
    """Axis sizes with -1 filled in.

    Args:
      mesh: sizes by axis, one of them -1 at most.
      num_devices: those to make up.
      origin: of the devices, in words.

    Raises:
      ValueError: the axes do not make up the number of devices.
    """
    shape = {axis: mesh[axis] for axis in AXES}
    fixed = math.prod(size for size in shape.values() if size != -1)
    text = " × ".join(f"mesh.{axis}={size}" for axis, size in shape.items())
    if num_devices % fixed or (-1 not in shape.values() and fixed != num_devices):
        raise ValueError(
            f"{text} does not make up the {num_devices} devices {origin}: "
            + _product_rule(shape, num_devices)
        )
    return {axis: num_devices // fixed if size == -1 else size for axis, size in shape.items()}


def _product_rule(shape: dict[str, int], num_devices: int) -> str:
    """What the sizes must multiply to, and the nearest that do."""
    fixed = math.prod(size for size in shape.values() if size != -1)
    if -1 in shape.values():
        divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        near = [n for n in divisors if n < fixed][-1:] + [n for n in divisors if n > fixed][:1]
        return (
            f"the product of the axes beside -1 is {fixed} and must divide {num_devices}; "
            f"nearest: {' or '.join(map(str, near))}"
        )
    others = {axis: fixed // size for axis, size in shape.items()}
    works = [f"mesh.{a}={num_devices // n}" for a, n in others.items() if num_devices % n == 0]
    text = f"the product is {fixed} and must be {num_devices}"
    return text + (f"; {' or '.join(works)} would do" if works else "")


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
    check_cuts(config, shape)


def check_cuts(config: FrozenConfigDict, shape: dict[str, int]) -> None:
    """Refuses a model dimension that the mesh does not divide.

    Raises:
      ValueError: names the key, its value and the axis.
    """
    model, devices = config.model, math.prod(shape.values())
    cut = {
        "model.num_kv_heads": model.num_kv_heads,
        "model.num_heads": model.num_heads,
        "model.mlp_width": model.mlp_width,
        "data.seq_len": config.data.seq_len,
    }
    tensor, parts = shape["tensor"], shape["fsdp"] * shape["tensor"]
    best = math.gcd(devices, *cut.values())
    for key, size in cut.items():
        if size % tensor:
            raise ValueError(
                f"{key}={size} must be a multiple of mesh.tensor={tensor}; the largest "
                f"mesh.tensor that cuts {', '.join(f'{k}={n}' for k, n in cut.items())} on "
                f"{devices} devices: {best}"
            )
    if model.width % parts:
        raise ValueError(
            f"model.width={model.width} must be a multiple of mesh.fsdp={shape['fsdp']} × "
            f"mesh.tensor={tensor} = {parts}; the largest fsdp × tensor that cuts it on {devices} "
            f"devices: {math.gcd(devices, model.width)}"
        )


def device_array(shape: dict[str, int], devices: Sequence[Any]) -> np.ndarray:
    """The devices in the mesh's shape, near ones along the last axes; `replica` across slices.

    Raises:
      ValueError: `replica` is no multiple of the number of TPU slices.
    """
    replica, *inside = shape.values()
    is_tpu = devices[0].platform == "tpu"  # elsewhere a host counts as a slice
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if is_tpu else 1
    if replica % slices:
        raise ValueError(
            f"mesh.replica={replica} must be a multiple of the {slices} slices of these "
            f"{len(devices)} devices: the other axes stay inside a slice"
        )
    # Splitting: an axis of 2 goes with a torus of 4 × 4 × 4, too.
    if slices > 1:
        within, across = (replica // slices, *inside), (slices, 1, 1, 1)
        return mesh_utils.create_hybrid_device_mesh(
            within, across, devices, allow_split_physical_axes=True
        )
    try:
        return mesh_utils.create_device_mesh(
            tuple(shape.values()), devices, allow_split_physical_axes=True
        )
    except AssertionError:  # two devices a chip on v4; their order is that of the chips
        return np.asarray(devices).reshape(tuple(shape.values()))


def make_mesh(shape: dict[str, int], devices: Sequence[Any]) -> Mesh:
    """The mesh over the devices, laid out for their network; see `device_array`."""
    axis_types = (jax.sharding.AxisType.Auto,) * len(shape)
    return Mesh(device_array(shape, devices), tuple(shape), axis_types=axis_types)


def find_devices(
    config: FrozenConfigDict, devices: Sequence[jax.Device] | None = None
) -> Sequence[jax.Device]:
    """The given devices, or all that JAX finds, of the platform that was asked for.

    Raises:
      ValueError: they are of another platform, or JAX can start none.
    """
    told = os.environ.get("JAX_PLATFORMS", "")
    host.run_in_caller()
    try:
        devices = devices or jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for cuda without a GPU
        first = (str(error).splitlines() or ["there is no such device"])[0]
        raise ValueError(f"JAX_PLATFORMS={told!r}: {first}") from error
    found, asked = devices[0].platform, config.train.platform
    text = f"train.platform={asked}"
    if not asked and found == "cpu" and "cpu" not in told.split(",")[:1]:
        asked, text = told, f"JAX_PLATFORMS={told}"  # it falls back to the last one of a list
    if asked and asked != found:
        sizes = [config.mesh[axis] for axis in AXES]
        count = "" if -1 in sizes else f" and a mesh of {math.prod(sizes)} devices"
        fix = (
            "start with JAX_PLATFORMS=cpu"
            if asked == "cpu"
            else "see that its driver and plugin are installed and that no other process holds it"
        )
        raise ValueError(
            f"{text}{count} was asked for, but JAX found {len(devices)} {found} "
            f"({devices[0].device_kind}); {fix}"
        )
    if found == "cpu":
        host.keep_freed_memory()
    return devices
