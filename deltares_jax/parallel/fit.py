"""Whether a config works on so many devices, and on which meshes it would."""

import math

from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.parallel import mesh as mesh_lib


def data_parallel_size(shape: dict[str, int]) -> int:
    """Devices, or groups of them, that get rows of their own."""
    return math.prod(shape[axis] for axis in mesh_lib.BATCH_AXES)


def working_meshes(config: FrozenConfigDict, num_devices: int) -> list[dict[str, int]]:
    """Overrides of `mesh` that make the config work, the least tensor parallelism first.

    Only `tensor` = 1, 2, 4, … is tried; the axis that takes the rest stays, or `fsdp` becomes it.
    """
    asked = {axis: config.mesh[axis] for axis in mesh_lib.AXES}
    found = []
    for power in range(num_devices.bit_length()):
        axes = {**asked, "tensor": 2**power}
        if -1 not in axes.values():
            axes["fsdp"] = -1
        try:
            mesh_lib.check_fits(config, mesh_lib.mesh_shape(axes, num_devices))
        except ValueError:
            continue
        found.append({axis: size for axis, size in axes.items() if size != asked[axis]})
    return found


def check_fits(config: FrozenConfigDict, shape: dict[str, int], where: str) -> None:
    """As `mesh.check_fits`, and names meshes that work, if any does.

    Args:
      config: the config.
      shape: sizes of the mesh's axes.
      where: the devices in words, for the message.

    Raises:
      ValueError: the mesh does not divide the batch or the model.
    """
    try:
        mesh_lib.check_fits(config, shape)
    except ValueError as error:
        meshes = [
            " ".join(f"--config.mesh.{axis}={size}" for axis, size in mesh.items())
            for mesh in working_meshes(config, math.prod(shape.values()))
        ]
        if not meshes:
            raise
        batch = config.train.batch_size
        raise ValueError(
            f"{error}; for {batch} sequences on {where}: {' or '.join(meshes)} works"
        ) from None
