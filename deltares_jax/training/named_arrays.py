"""The arrays of a tree by name: shapes to compare, and checksums."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deltares_jax.parallel import sharding


def by_name(tree: Any) -> dict[str, Any]:
    """Leaves by their path, `params/layers/attn/query`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {sharding.path_name(path): leaf for path, leaf in leaves}


def shapes(tree: Any) -> dict[str, str]:
    """Type and shape of every leaf: `float32[2, 3]`."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in by_name(tree).items()}


@jax.jit
def _sums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    def one(x: jax.Array) -> jax.Array:
        whole = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
        return jnp.sum(lax.bitcast_convert_type(x, whole), dtype=jnp.uint32)

    return {name: one(x) for name, x in leaves.items()}


def sums(state: Any) -> dict[str, int]:
    """A checksum of the bits of every leaf, the same on every mesh."""
    return {name: int(x) for name, x in jax.device_get(_sums(by_name(state))).items()}
