"""Routing of a checkpoint on held-out rows and on a text, in numbers.

B batch, T sequence, S sources.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.data import pipeline
from deltares_jax.data.rows import Rows
from deltares_jax.inference.trained import Trained, changed
from deltares_jax.models import readings, transformer, variants
from deltares_jax.parallel import sharding
from deltares_jax.training import programs

_INPUTS = ("inputs", "positions", "segments")


def _config(trained: Trained) -> FrozenConfigDict:
    """The trained config in the form of the depth loop that captures with the least program."""
    config = changed(trained.config, {"model.scan": "blocks"})
    device = trained.mesh.devices.flat[0]
    return programs.for_platform(config, device.platform, trained.mesh.shape["tensor"])


def _jit(trained: Trained, function: Any) -> Any:
    whole = NamedSharding(trained.mesh, PartitionSpec())
    return jax.jit(functools.partial(function, _config(trained).model), out_shardings=whole)


def _sums(config: Any, params: Any, batch: dict[str, Any], counts_BT: Any) -> readings.Sums:
    inputs = (batch[key] for key in _INPUTS)
    captured = transformer.apply(config, params, *inputs, capture=True).routing
    assert captured is not None
    return readings.sums(config, captured, counts_BT, details=True)


def measure(trained: Trained, rows: Rows, count: int, batch_size: int) -> dict[str, Any]:
    """The table of `readings.table` on the first rows of a set, with details.

    Beside it `order`, the names of all sources; `histogram`, `readings.BINS` counts of largest
    weights, over all readers with at least two sources and all tokens; and `cosines`: by distance
    in layers the mean, lowest and highest cosine similarity of pairs of sources, and their count.

    Args:
      trained: the model.
      rows: of the set.
      count: how many of them.
      batch_size: rows at a time, a multiple of `Trained.parts`.
    """
    program, config = _jit(trained, _sums), trained.config.model
    total: Any = None
    done = 0
    for batch in pipeline.eval_batches(rows, count, batch_size):
        counts_BT = np.zeros(batch["inputs"].shape, np.float32)
        counts_BT[: count - done] = 1.0  # the last batch is filled up
        done += len(counts_BT)
        inputs = {key: trained.put(batch[key]) for key in _INPUTS}
        with sharding.activate(trained.mesh):
            part = program(trained.params, inputs, trained.put(counts_BT))
        part = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(part))
        total = part if total is None else jax.tree.map(np.add, total, part)
    found = readings.table(config, total) | {"order": readings.order(config)}
    readers = readings.readers(config)
    choice = [n for n, reader in enumerate(readers) if len(reader.sources) > 1]
    found["histogram"] = total["histogram"][choice].sum(axis=0).tolist() if choice else None
    found["cosines"] = _by_distance(config, total) if found["sources"] else []
    return found


def _by_distance(config: FrozenConfigDict, total: readings.Sums) -> list[dict[str, Any]]:
    residual = config.residual
    slots = variants.slot_names(residual.variant, config.num_layers, residual.num_blocks)
    depths = [(slots.index(name), depth) for name, depth in readings.source_depths(config).items()]
    by_distance: dict[float, list[float]] = {}
    for k, (j, after) in enumerate(depths):
        for i, before in depths[:k]:
            cosine = float(total["cosine"][i, j] / total["tokens"])
            by_distance.setdefault(after - before, []).append(cosine)
    return [
        {
            "distance": distance,
            "mean": float(np.mean(values)),
            "lowest": min(values),
            "highest": max(values),
            "pairs": len(values),
        }
        for distance, values in sorted(by_distance.items())
    ]


def of_text(trained: Trained, ids: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
    """Weights [S, T] by reader on one document of T ids, in the order of its sources.

    Args:
      trained: the model.
      ids: at most `data.seq_len` of them.
      names: of readers that have sources.
    """
    length, used = trained.config.data.seq_len, len(ids)

    def program(config: Any, params: Any, *inputs: Any) -> dict[str, jax.Array]:
        captured = transformer.apply(config, params, *inputs, capture=True).routing
        assert captured is not None
        by_reader = transformer.routing_by_reader(config, captured)
        return {name: by_reader[name][:, 0] for name in names}

    # Filled up behind the text, where it is not seen, to rows that every mesh divides.
    row_T = np.pad(np.asarray(ids, np.int32), (0, length - used))
    inputs = (row_T, np.arange(length, dtype=np.int32), np.ones(length, np.int32))
    rows = [trained.put(np.tile(values, (trained.parts, 1))) for values in inputs]
    with sharding.activate(trained.mesh):
        found = jax.device_get(_jit(trained, program)(trained.params, *rows))
    return {name: np.asarray(w, jnp.float32)[:, :used] for name, w in found.items()}
