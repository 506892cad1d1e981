"""What a device of the mesh will hold, known before anything is compiled."""

import math
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.parallel import sharding

_LARGE_BYTES = 4 * 2**20  # norms, queries and gates of the largest recipe stay well below
_NAMED = 6  # arrays in one line


def human_bytes(number: float) -> str:
    """KiB, MiB or GiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number / 2**10:.1f} KiB"


def shard_bytes(leaf: Any, sharding: jax.sharding.Sharding) -> int:
    """Bytes of an array that one device holds."""
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def device_bytes(tree: Any, shardings: Any) -> int:
    """Bytes of all arrays of a tree that one device holds."""
    return sum(jax.tree.leaves(jax.tree.map(shard_bytes, tree, shardings)))


def replicated(state: Any, shardings: Any, mesh: Mesh) -> list[str]:
    """Large arrays that more devices hold than must: path, shape and bytes on each.

    Those that cut weights (fsdp × tensor) must each hold another part; without any, all devices
    hold everything.
    """
    weights = mesh.shape["fsdp"] * mesh.shape["tensor"]
    parts = weights if weights > 1 else mesh.size
    leaves = jax.tree_util.tree_leaves_with_path(state)
    found = []
    for (path, leaf), place in zip(leaves, jax.tree.leaves(shardings), strict=True):
        held = shard_bytes(leaf, place)
        if held > _LARGE_BYTES and held * parts > leaf.size * leaf.dtype.itemsize:
            found.append(f"{sharding.path_name(path)} {list(leaf.shape)} {human_bytes(held)}")
    return found


def lines(
    config: FrozenConfigDict, mesh: Mesh, state: Any, shardings: Any, batch: Any
) -> list[str]:
    """Devices, mesh, and what each of them holds.

    Args:
      config: the resolved config.
      mesh: the device mesh.
      state: the train state, shapes and dtypes alone.
      shardings: those of the state.
      batch: a batch, shapes and dtypes alone.

    Raises:
      ValueError: the mesh cuts weights, but large arrays are left uncut, and
        `mesh.allow_replicated` is off.
    """
    device = mesh.devices.flat[0]
    place = sharding.batch_sharding(mesh)
    held = {
        "parameters": device_bytes(state.params, shardings.params),
        "optimizer": device_bytes(state.opt_state, shardings.opt_state),
        "batch": device_bytes(batch, jax.tree.map(lambda _: place, batch)),
    }
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    sizes = ", ".join(f"{name} {human_bytes(number)}" for name, number in held.items())
    asked = config.train.platform or "any"
    result = [
        f"devices: {mesh.size} {device.platform} ({device.device_kind}); train.platform: {asked}",
        f"mesh: {axes}; on each device: {sizes}",
    ]
    large = replicated(state, shardings, mesh)
    if not large:
        return result
    more = f" and {len(large) - _NAMED} more" if len(large) > _NAMED else ""
    names = f"{'; '.join(large[:_NAMED])}{more}"
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    if fsdp * tensor > 1 and not config.mesh.allow_replicated:
        raise ValueError(
            f"mesh.fsdp={fsdp} × mesh.tensor={tensor} would leave arrays above "
            f"{human_bytes(_LARGE_BYTES)} replicated: {names}; "
            "mesh.allow_replicated=True accepts that"
        )
    return [*result, f"replicated, bytes on each device: {names}"]
