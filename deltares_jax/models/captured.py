"""What readers do, recorded beside a forward pass; and sources taken from them, for analysis.

B batch, T sequence, D width, L layers, S sources.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import variants
from deltares_jax.models.routing_ops import Sources, mix, statistics_dtype

KEEP = "keep"  # beside the parameters of a reader: a boolean for each weight in `Observed`


class Observed(NamedTuple):
    """What one reader does; stacked as [L, …] for those of all layers.

    weights_SBT: over (null source, every slot, stream), 0 where the reader has no such source; None
      where nothing is routed. The model's last reader has the slots alone.
    stream_BT: norm of the stream beside it, over D; None where none is kept.
    routed_BT: norm of what it adds to the stream, gated; of what the sublayer reads where that is
      the mix alone. None where nothing is routed.
    """

    weights_SBT: Any
    stream_BT: Any
    routed_BT: Any


class Captured(NamedTuple):
    """Of a forward pass.

    attn, mlp: the readers of all layers, stacked. final: the model's last reader, or None.
    sources: every slot, [S, B, T, D] or a tuple of them; None without sources.
    """

    attn: Observed
    mlp: Observed
    final: Observed | None
    sources: Any


def norm(x_BTD: jax.Array) -> jax.Array:
    """Euclidean norms over the last axis, in float32 or wider."""
    wide = x_BTD.astype(statistics_dtype(x_BTD.dtype))
    return jnp.sqrt(jnp.sum(jnp.square(wide), axis=-1))


def widen(weights_SBT: jax.Array, at: int, missing: int) -> jax.Array:
    """Weights with zeros for the slots that a reader does not have yet, inserted at an index."""
    head, tail = jnp.split(weights_SBT, [at])
    zeros_SBT = jnp.zeros((missing, *weights_SBT.shape[1:]), weights_SBT.dtype)
    return jnp.concatenate([head, zeros_SBT, tail])


def observe(weights_SBT: Any, stream_BTD: Any, routed_BTD: Any) -> Observed:
    """Of a reader: its weights, the stream beside it, and its routed term, each may be None."""
    if routed_BTD is not None and not routed_BTD.ndim:  # of a reader without sources
        routed_BTD = jnp.broadcast_to(routed_BTD, stream_BTD.shape)
    norms = (None if x is None else norm(x) for x in (stream_BTD, routed_BTD))
    return Observed(weights_SBT, *norms)


def left(
    config: FrozenConfigDict, keep_S: jax.Array, groups: list[Sources], stream_BTD: Any
) -> list[Sources]:
    """The sources that a mask leaves to a reader; a softmax over them is renormalised.

    A reader without any reads what the baseline's sublayer would: the stream, which is the sum of
    its sources where the variant keeps none.

    Args:
      config: of the model.
      keep_S: as the weights of `Observed`.
      groups: all that it has, the null source first.
      stream_BTD: beside it.
    """
    row = variants.VARIANTS[config.residual.variant]
    sizes = [group.valid_S.size for group in groups]
    live = int(row.live != "never")  # slots that the reader does not have yet lie before it
    ends = (keep_S[: sum(sizes) - live], keep_S[keep_S.size - live :])
    kept_S, rest = jnp.concatenate(ends), []
    for group, size in zip(groups, sizes, strict=True):
        rest.append(group._replace(valid_S=group.valid_S & kept_S[:size]))
        kept_S = kept_S[size:]
    if row.routing == "replace":
        plain_BTD = stream_BTD
        if row.stream != "accumulate":
            parts = [mix(g.values_SBTD, g.valid_S[:, None, None].astype(float)) for g in groups]
            total_BTD = functools.reduce(jnp.add, parts)
            plain_BTD = total_BTD.astype(groups[0].values_SBTD.dtype)
        none_1 = ~jnp.any(jnp.concatenate([group.valid_S for group in rest]), keepdims=True)
        rest.append(Sources(plain_BTD[None], none_1))
    return rest
