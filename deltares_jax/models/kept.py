"""What a sublayer keeps for its backward pass, as arrays that a loop can stack."""

from collections.abc import Callable
from typing import Any

import jax
from flax import struct


@struct.dataclass
class Kept:
    """The residuals of one `jax.vjp` without those that are its arguments.

    arrays: the others. treedef: of the whole derivative. argument: for each of its leaves the
    number of the argument's leaf that it is, or −1.
    """

    arrays: tuple[jax.Array, ...]
    treedef: Any = struct.field(pytree_node=False)
    argument: tuple[int, ...] = struct.field(pytree_node=False)


def differentiate(
    function: Callable[..., Any], args: tuple[Any, ...], constants: Any
) -> tuple[Any, Kept]:
    """`function(*args, constants)`, and what its derivative by args needs beyond both."""
    value, pull = jax.vjp(lambda *args: function(*args, constants), *args)
    leaves, treedef = jax.tree.flatten(pull)
    known = jax.tree.leaves((args, constants))
    argument = tuple(next((i for i, k in enumerate(known) if k is leaf), -1) for leaf in leaves)
    arrays = tuple(leaf for leaf, i in zip(leaves, argument, strict=True) if i < 0)
    return value, Kept(arrays, treedef, argument)


def load(kept: Kept, args: tuple[Any, ...], constants: Any) -> Callable[..., tuple[Any, ...]]:
    """The derivative as `jax.vjp` returned it, on the same arguments."""
    known, others = jax.tree.leaves((args, constants)), iter(kept.arrays)
    leaves = [next(others) if i < 0 else known[i] for i in kept.argument]
    pull: Callable[..., tuple[Any, ...]] = jax.tree.unflatten(kept.treedef, leaves)
    return pull
