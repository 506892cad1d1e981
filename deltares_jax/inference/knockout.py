"""Held-out loss without one source, or without one reader: causal importance beside weight.

Done by a mask beside the parameters of the readers, see `models.captured.left`.

L layers, S' = (null source, every slot, stream).
"""

import dataclasses
import math
from typing import Any

import numpy as np

from deltares_jax.data.rows import Rows
from deltares_jax.inference import held_out
from deltares_jax.inference.scorer import Scorer
from deltares_jax.inference.trained import Trained, changed
from deltares_jax.models import readings, variants
from deltares_jax.models.captured import KEEP
from deltares_jax.printing import say

Masks = dict[str, np.ndarray]


def masks(config: Any) -> Masks:
    """A mask that takes nothing away: [L, S'] of attention and MLP readers, [S] of the last."""
    order = readings.order(config)
    found = {kind: np.ones((config.num_layers, len(order)), bool) for kind in variants.SUBLAYERS}
    if variants.VARIANTS[config.residual.variant].final_read:
        found["final"] = np.ones(len([name for name in order if name != "stream"]), bool)
    return found


def without_source(config: Any, name: str) -> Masks:
    """A mask that takes a source from every reader."""
    place, found = readings.order(config).index(name), masks(config)
    for mask in found.values():
        mask[..., place : place + 1] = False  # the last reader has no stream
    return found


def without_reader(config: Any, name: str) -> Masks:
    """A mask that takes all sources from one reader, which then reads the plain stream."""
    found = masks(config)
    if name == "final":
        found["final"][:] = False
    else:
        _, layer, kind = name.split(".")
        found[kind][int(layer)] = False
    return found


def masked(params: Any, masks: Masks) -> Any:
    """Parameters with a mask beside those of each reader."""
    layers = dict(params["layers"])
    for kind in variants.SUBLAYERS:
        reader = layers[f"{kind}_reader"]
        layers[f"{kind}_reader"] = {**reader, "routing": {**reader["routing"], KEEP: masks[kind]}}
    result = {**params, "layers": layers}
    if "final" in masks:
        last = params["final_reader"]
        result["final_reader"] = {**last, "routing": {**last["routing"], KEEP: masks["final"]}}
    return result


def run(
    trained: Trained, rows: Rows, tokens: int, batch_size: int, table: dict[str, Any]
) -> dict[str, Any]:
    """Losses on the first tokens of a set, one evaluation for each source and each reader.

    Args:
      trained: the model, of a variant that routes.
      rows: of the set.
      tokens: how many.
      batch_size: rows at a time.
      table: from `measured.measure`, for the weights beside the losses.

    Returns:
      `loss` of the whole model, `targets`, and `sources` and `readers` with name, label, `loss`
      without it, `difference`, and `beside`: the mean weight of the source over its readers, or
      the reader's routed ratio.
    """
    config = trained.config.model
    # Other forms of the depth loop do not read through the seam, where the mask is.
    model = dataclasses.replace(trained, config=changed(trained.config, {"model.scan": "blocks"}))
    scorer = Scorer(model)

    def loss(masks: Masks) -> held_out.HeldOut:
        model.params = masked(trained.params, masks)
        return held_out.evaluate(model, scorer, rows, tokens, batch_size)

    routed = [reader for reader in table["readers"] if reader["sources"]]
    names = [n for n in table["order"] if any(n in reader["sources"] for reader in routed)]
    whole = loss(masks(config))
    say(f"knockout: {len(names)} sources and {len(routed)} readers, an evaluation each")

    def row(name: str, masks: Masks, beside: float | None) -> dict[str, Any]:
        mean = loss(masks).mean
        if not math.isfinite(mean):
            raise ValueError(f"without {name} the loss is {mean}: it cannot be drawn")
        of = {"name": name, "label": readings.label(name)}
        return of | {"loss": mean, "difference": mean - whole.mean, "beside": beside}

    def weight(name: str) -> float:
        having = [r for r in routed if name in r["sources"]]
        return float(np.mean([r["weights"][r["sources"].index(name)] for r in having]))

    return {
        "loss": whole.mean,
        "targets": whole.tokens,
        "sources": [row(n, without_source(config, n), weight(n)) for n in names],
        "readers": [
            row(r["name"], without_reader(config, r["name"]), r["routed_ratio"]) for r in routed
        ],
    }
