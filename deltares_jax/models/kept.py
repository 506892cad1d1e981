"""Sublayers and their derivatives, and what is kept between as arrays that a loop can stack."""

from collections.abc import Callable
from typing import Any

import jax
from flax import struct
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models.layers import Context, apply_sublayer


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


class Sublayers:
    """The sublayers of one model, whose backward passes run apart from the forward passes.

    policy: what is kept of a sublayer, as for `jax.checkpoint`; None for everything.
    """

    def __init__(self, config: FrozenConfigDict, policy: Any):
        self.config, self.policy = config, policy

    def apply(self, kind: str, params: Any, x_BTD: jax.Array, context: Context) -> Any:
        """The output of a layer's sublayer, and what is kept of it; None where nothing is."""
        if self.config.remat == "full":
            return apply_sublayer(self.config, params, kind, x_BTD, context), None

        def function(params: Any, x_BTD: jax.Array, context: Context) -> jax.Array:
            return apply_sublayer(self.config, params, kind, x_BTD, context)

        if self.policy is not None:
            function = jax.checkpoint(function, policy=self.policy, prevent_cse=False)
        return differentiate(function, (_own(params, kind), x_BTD), context)

    def derivative(
        self, kind: str, params: Any, x_BTD: jax.Array, context: Context, kept: Any
    ) -> Callable[..., tuple[Any, jax.Array]]:
        """From the gradient of the output to those of the sublayer's parameters and of x."""
        args = (_own(params, kind), x_BTD)
        pull: Any
        if kept is None:

            def function(params: Any, x_BTD: jax.Array) -> jax.Array:
                return apply_sublayer(self.config, params, kind, x_BTD, context)

            pull = jax.vjp(function, *args)[1]
        else:
            pull = load(kept, args, context)
        return pull


def _own(params: Any, kind: str) -> Any:
    return {name: params[name] for name in (f"{kind}_norm", kind)}
