"""What captured routing means in numbers: the one place for live curves and reports.

All numbers are means over tokens. Of a reader with weights a_1 … a_S on its S sources:

- `max_weight`: the largest weight of a token, max a_i; 1/S where routing has collapsed.
- `entropy`: −Σ a_i ln a_i over ln S, that of equal weights; not defined for one source.
- `effective_sources`: exp(−Σ a_i ln a_i), from 1 to S.
- `embedding_weight`: the weight on the embedding, where it is a source.
- `stream_norm`: Euclidean norm over D of the stream beside the reader; with `attnres_block` that
  of the running block sum, which is empty at the start of a block.
- `routed_norm`: of the routed term, which is what it adds to the stream (gated, centred); with
  variants that read the mix alone, of the mix.
- `routed_ratio`: norm of the routed term over norm of the stream, token by token.

Of sources: `norm`, and the cosine similarity of two of them.

B batch, T sequence, D width, L layers, R readers, S' = (null source, every slot, stream), S slots.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import variants
from deltares_jax.models.captured import Captured, norm

BINS = 50  # of the histogram of largest weights, over 0 … 1
Sums = dict[str, Any]
KINDS = {"attn": "attention", "mlp": "MLP"}


class Reader(NamedTuple):
    """A reader as the table of variants has it.

    name: `layers.3.mlp` or `final`. label: for people. depth: in layers; the last reader is at L.
    sources: their names, those of its S'. indices: their places in S'. has_stream: there is a
    stream beside it.
    """

    name: str
    label: str
    depth: float
    sources: list[str]
    indices: list[int]
    has_stream: bool


def label(name: str) -> str:
    """`layer 3 MLP` of `layers.3.mlp`, `layers.3.mlp.out` or `layers.3.mlp.stream`; `block 2`."""
    words = name.split(".")
    if words[0] == "layers":
        return f"layer {words[1]} {KINDS[words[2]]}"
    return f"block {words[1]}" if words[0] == "blocks" else {"final": "last read"}.get(name, name)


def order(config: FrozenConfigDict) -> list[str]:
    """Names of S'."""
    residual, row = config.residual, variants.VARIANTS[config.residual.variant]
    slots = variants.slot_names(residual.variant, config.num_layers, residual.num_blocks)
    live = ["stream"] * (row.live != "never")
    return ["null"] * residual.null_source + slots + live


def readers(config: FrozenConfigDict) -> list[Reader]:
    """All readers in the order of the depth; those without sources, too."""
    residual, row = config.residual, variants.VARIANTS[config.residual.variant]
    shape = (residual.variant, config.num_layers, residual.num_blocks)
    names, places = variants.source_names(*shape, residual.null_source), order(config)
    found = []
    for number, (name, _, layer, sublayer) in enumerate(variants.sites(*shape)):
        empty = row.stream == "restart" and layer == sublayer == 0
        has_stream = row.stream != "discard" and not empty
        sources = names.get(name, [])
        indices = [places.index(source) for source in sources]
        found.append(Reader(name, label(name), number / 2, sources, indices, has_stream))
    if row.final_read:
        indices = [places.index(source) for source in names["final"]]
        last = Reader("final", label("final"), config.num_layers, names["final"], indices, False)
        found.append(last)
    return found


def source_depths(config: FrozenConfigDict) -> dict[str, float]:
    """The slots that some reader reads, and how many layers were made when they were."""
    residual, L = config.residual, config.num_layers
    read = {source for reader in readers(config) for source in reader.sources}
    lengths = variants.block_lengths(residual.variant, L, residual.num_blocks)
    depths = {}
    for name in variants.slot_names(residual.variant, L, residual.num_blocks):
        words = name.split(".")
        if words[0] == "layers":
            depths[name] = int(words[1]) + (0.5 if words[2] == "attn" else 1.0)
        else:
            ends = sum(lengths[: int(words[1]) + 1]) if words[0] == "blocks" else 0
            depths[name] = float(ends)
    return {name: depth for name, depth in depths.items() if name in read}


def _stack(attn: jax.Array, mlp: jax.Array) -> jax.Array:
    """Of the readers in the order of the depth, [2L, …], from those of each kind."""
    both = jnp.stack([attn, mlp], axis=1)
    return both.reshape(-1, *both.shape[2:])


def sums(
    config: FrozenConfigDict, captured: Captured, counts_BT: jax.Array, details: bool = False
) -> Sums:
    """Sums over the tokens that count; pure, to be jitted.

    Args:
      config: of the model.
      captured: by it.
      counts_BT: 1.0 for each token that counts, else 0.0.
      details: also `histogram` [R, BINS] of largest weights, and `cosine` [S, S] of the sources.

    Returns:
      `tokens`; by reader [R], the last read included: `max_weight`, `entropy` (in nats),
      `effective_sources`, `routed_norm`, `stream_norm`, `routed_ratio`; `weights` [R, S'];
      `source_norm` [S]. What a variant does not have is absent.
    """
    both, last = (captured.attn, captured.mlp), captured.final
    counts_1BT = counts_BT[None]

    def total(x_RBT: jax.Array) -> jax.Array:
        return jnp.sum(x_RBT * counts_1BT, axis=(-2, -1))

    result: Sums = {"tokens": jnp.sum(counts_BT)}
    stream_RBT = None
    if both[0].stream_BT is not None:
        stream_RBT = _stack(*(o.stream_BT for o in both))
        result["stream_norm"] = total(stream_RBT)
    if both[0].weights_SBT is None:
        return result
    weights_RSBT = _stack(*(o.weights_SBT for o in both))
    routed_RBT = _stack(*(o.routed_BT for o in both))
    if stream_RBT is not None:
        safe_RBT = jnp.where(stream_RBT > 0, stream_RBT, 1.0)
        result["routed_ratio"] = total(jnp.where(stream_RBT > 0, routed_RBT / safe_RBT, 0.0))
    if last is not None:
        missing = weights_RSBT.shape[1] - last.weights_SBT.shape[0]  # it does not see the stream
        own_SBT = jnp.pad(last.weights_SBT, ((0, missing), (0, 0), (0, 0)))
        weights_RSBT = jnp.concatenate([weights_RSBT, own_SBT[None]])
        routed_RBT = jnp.concatenate([routed_RBT, last.routed_BT[None]])
    logs_RSBT = jnp.log(jnp.where(weights_RSBT > 0, weights_RSBT, 1.0))
    entropy_RBT = -jnp.sum(weights_RSBT * logs_RSBT, axis=1)
    max_RBT = jnp.max(weights_RSBT, axis=1)
    result |= {
        "max_weight": total(max_RBT),
        "entropy": total(entropy_RBT),
        "effective_sources": total(jnp.exp(entropy_RBT)),
        "routed_norm": total(routed_RBT),
        "weights": jnp.sum(weights_RSBT * counts_1BT[None], axis=(-2, -1)),
    }
    sources = captured.sources
    sources_SBTD = jnp.stack(sources) if isinstance(sources, tuple) else sources
    norms_SBT = norm(sources_SBTD)
    result["source_norm"] = total(norms_SBT)
    if details:
        result["histogram"] = _histogram(max_RBT, counts_BT)
        result["cosine"] = _cosines(sources_SBTD, norms_SBT, counts_BT)
    return result


def _histogram(x_RBT: jax.Array, counts_BT: jax.Array) -> jax.Array:
    """How many tokens have x in each bin, [R, BINS]."""
    bins_RBT = jnp.minimum((x_RBT * BINS).astype(jnp.int32), BINS - 1)
    by_bin = lax.map(
        lambda b: jnp.sum((bins_RBT == b) * counts_BT[None], axis=(-2, -1)), jnp.arange(BINS)
    )
    return by_bin.T


def _cosines(values_SBTD: jax.Array, norms_SBT: jax.Array, counts_BT: jax.Array) -> jax.Array:
    """Sums of the cosine similarity of all pairs of sources, [S, S]; 0 for a source of norm 0."""
    inverse_SBT = jnp.where(norms_SBT > 0, 1 / jnp.where(norms_SBT > 0, norms_SBT, 1.0), 0.0)

    def with_one(xs: Any) -> jax.Array:  # source by source: a wide copy of all may not fit
        value_BTD, scale_BT = xs
        products = value_BTD[None].astype(norms_SBT.dtype) * values_SBTD.astype(norms_SBT.dtype)
        dots_SBT = jnp.sum(products, axis=-1) * inverse_SBT * scale_BT[None]
        return jnp.sum(dots_SBT * counts_BT[None], axis=(-2, -1))

    return lax.map(with_one, (values_SBTD, inverse_SBT))


def table(config: FrozenConfigDict, sums: Sums) -> dict[str, Any]:
    """The numbers of every reader and source, from sums on the host; None where not defined.

    `readers`: name, label, depth, sources, weights (of its sources), and the numbers that the
    module describes; `sources`: name, label, depth, norm; `tokens`.
    """
    count = float(sums["tokens"])
    means = {key: np.asarray(value, np.float64) / count for key, value in sums.items()}
    rows = []
    for number, reader in enumerate(readers(config)):
        has, S = bool(reader.sources), len(reader.sources)
        weights = means["weights"][number][reader.indices] if has else np.zeros(0)
        embedding = reader.sources.index("embedding") if "embedding" in reader.sources else None

        def mean(key: str, defined: bool = True, n: int = number) -> float | None:
            return float(means[key][n]) if defined and key in means else None

        entropy = mean("entropy", S > 1)
        rows.append(
            {
                "name": reader.name,
                "label": reader.label,
                "depth": reader.depth,
                "sources": reader.sources,
                "weights": weights.tolist(),
                "max_weight": mean("max_weight", has),
                "entropy": None if entropy is None else entropy / math.log(S),
                "effective_sources": mean("effective_sources", has),
                "embedding_weight": None if embedding is None else float(weights[embedding]),
                "stream_norm": mean("stream_norm", reader.has_stream),
                "routed_norm": mean("routed_norm", has),
                "routed_ratio": mean("routed_ratio", has and reader.has_stream),
            }
        )
    slots = variants.slot_names(
        config.residual.variant, config.num_layers, config.residual.num_blocks
    )
    found = [
        {
            "name": name,
            "label": label(name),
            "depth": depth,
            "norm": float(means["source_norm"][slots.index(name)]),
        }
        for name, depth in source_depths(config).items()
    ]
    return {"tokens": int(count), "readers": rows, "sources": found}
