"""What is sharded along which mesh axis: one table of logical axes, one of parameters."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deltares_jax.parallel.mesh import BATCH_AXES

# Logical axis → mesh axes. Names that are not listed are not sharded.
RULES = (
    ("batch", BATCH_AXES),
    ("rows", ("replica", "data")),  # a batch whose columns are cut by the other axes
    ("length", "tensor"),
    ("width", "fsdp"),
    ("columns", ("fsdp", "tensor")),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
)

# Parameter, by the end of its path → logical axes. All others are small and replicated.
PARAMETERS = {
    # Along the width, so that any number of tokens goes with any mesh.
    "embedding": ("tokens", "columns"),
    "head": ("tokens", "columns"),
    "attn/query": ("layers", "width", "heads", "head_dim"),
    "attn/key": ("layers", "width", "heads", "head_dim"),
    "attn/value": ("layers", "width", "heads", "head_dim"),
    "attn/out": ("layers", "heads", "head_dim", "width"),
    "mlp/gate": ("layers", "width", "mlp"),
    "mlp/up": ("layers", "width", "mlp"),
    "mlp/down": ("layers", "mlp", "width"),
}


def path_name(path: Any) -> str:
    """`layers/attn/query` for the path of a leaf."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def state_shardings(abstract_state: Any, mesh: Mesh) -> Any:
    """A sharding for every leaf of a state, optimizer moments like their parameter."""
    rules = dict(RULES)

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = f"/{path_name(path)}"
        axes = next((a for end, a in PARAMETERS.items() if name.endswith(f"/{end}")), ())
        if len(axes) != leaf.ndim:
            axes = ()
        return NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in axes)))

    return jax.tree_util.tree_map_with_path(one, abstract_state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Batches [B, T] are cut along B."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def part_of_process(place: NamedSharding, size: int) -> tuple[int, int]:
    """(part, parts): which of how many equal parts of an array's rows this process holds.

    Args:
      place: how the array is cut; processes along an axis that does not cut rows hold the same.
      size: of all rows.

    Raises:
      ValueError: its devices hold rows that are no such part.
    """
    spans = {
        (index[0].start or 0, size if index[0].stop is None else index[0].stop)
        for index in place.addressable_devices_indices_map((size,)).values()
        if index is not None
    }
    first, last = min(spans)[0], max(stop for _, stop in spans)
    held = last - first
    if sum(stop - start for start, stop in spans) != held or first % held or size % held:
        raise ValueError(
            f"the devices of process {jax.process_index()} hold rows {sorted(spans)} of {size}, no "
            f"equal part; order the axes {', '.join(BATCH_AXES)} so that a host has neighbours"
        )
    return first // held, size // held


def parts(axis: str) -> int:
    """Over how many devices the mesh in use cuts a logical axis; 1 without a mesh."""
    names = dict(RULES)[axis]
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(n, 1) for n in ((names,) if isinstance(names, str) else names))


@contextlib.contextmanager
def activate(mesh: Mesh) -> Iterator[None]:
    """Lets the models' logical constraints refer to this mesh while they are traced."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        yield
