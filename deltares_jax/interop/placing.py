"""Tensors from files of weights to parameters on devices.

A tensor goes from its file to its place on the devices before the next is read, so the host holds
one file at a time beside what the devices keep there.
"""

import collections
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.interop import files, hf_config, names
from deltares_jax.models import transformer
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import sharding
from deltares_jax.training import checkpoint, optim


def _mesh(model: FrozenConfigDict) -> Mesh:
    """As many of the devices as cut the width evenly, along fsdp."""
    devices = mesh_lib.find_devices(FrozenConfigDict(config_lib.default()))
    count = math.gcd(model.width, len(devices))
    shape = dict.fromkeys(mesh_lib.AXES, 1) | {"fsdp": count}
    return mesh_lib.make_mesh(shape, devices[:count])


def abstract(model: FrozenConfigDict) -> Any:
    """Shapes, dtypes and shardings of the parameters over this machine's devices."""
    shapes = names.abstract_params(model)
    return checkpoint.abstract(shapes, sharding.state_shardings(shapes, _mesh(model)))


def by_path(params: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {sharding.path_name(path): leaf for path, leaf in leaves}


@functools.partial(jax.jit, donate_argnums=0)
def _insert(leaf: jax.Array, part: jax.Array, layer: int) -> jax.Array:
    return lax.dynamic_update_index_in_dim(leaf, part, layer, 0)


def _fresh(model: FrozenConfigDict, like: Any) -> dict[str, jax.Array]:
    """By path: routing parameters at their start, stacks of layers at zero until they are read."""
    places = {
        name: leaf.sharding
        for name, leaf in by_path(like).items()
        if optim.is_routing(name) or name.startswith("layers/")
    }

    def make() -> dict[str, jax.Array]:
        start = by_path(transformer.init(model, jax.random.key(0)))
        return {n: start[n] if optim.is_routing(n) else jnp.zeros_like(start[n]) for n in places}

    return jax.jit(make, out_shardings=places)()


def _read(file: Any, name: str, at: files.Stored) -> np.ndarray:
    """A tensor as float32, which holds the values of all accepted types."""
    array = file.get_tensor(name).astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"{at.file}: {name} holds values that are not finite")
    return array


def load(
    model: FrozenConfigDict, stored: dict[str, files.Stored], wanted: dict[str, names.Tensor]
) -> Any:
    """The parameters on the devices, tensor by tensor, file by file.

    Args:
      model: the `model` section of the config.
      stored: where the tensors are; routing parameters that are not there are at their start.
      wanted: from `names.tensors`.

    Raises:
      ValueError: a value is not finite.
    """
    like = abstract(model)
    leaves = _fresh(model, like)
    places = {path: leaf.sharding for path, leaf in by_path(like).items()}
    inside = collections.defaultdict(list)
    for name in sorted(wanted.keys() & stored.keys()):
        inside[stored[name].file].append(name)
    for path, of_file in inside.items():
        with safetensors.safe_open(path, "np") as file:
            for name in of_file:
                tensor, place = wanted[name], places[wanted[name].leaf]
                array = tensor.to_ours(_read(file, name, stored[name]))
                if tensor.layer is None:
                    leaves[tensor.leaf] = jax.block_until_ready(jax.device_put(array, place))
                    continue
                of_layer = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
                part = jax.device_put(array, of_layer)
                leaves[tensor.leaf] = _insert(leaves[tensor.leaf], part, tensor.layer)
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[sharding.path_name(path)], like)


def check_tied_head(stored: dict[str, files.Stored]) -> None:
    """Refuses a checkpoint of tied embeddings whose head is another matrix.

    Raises:
      ValueError: names both tensors.
    """
    at, embedding = stored[names.HEAD], stored[names.EMBEDDING]
    with (
        safetensors.safe_open(at.file, "np") as one,
        safetensors.safe_open(embedding.file, "np") as other,
    ):
        head_VD = _read(one, names.HEAD, at)
        if not np.array_equal(head_VD, _read(other, names.EMBEDDING, embedding)):
            raise ValueError(
                f"{at.file}: {names.HEAD} differs from {names.EMBEDDING}, but {hf_config.FILE} "
                "says tie_word_embeddings=true; set it to false to keep both"
            )
