"""Routing of a run in progress: a program of its own on the run's first rows, between steps.

B batch, T sequence.
"""

import contextlib
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.data import pipeline
from deltares_jax.data.dataset import Data
from deltares_jax.models import readings, transformer
from deltares_jax.parallel import report, sharding
from deltares_jax.training import programs as programs_lib
from deltares_jax.training import step

# Number of `readings.table` → name in metrics.jsonl, before that of the reader.
NAMES = {
    "max_weight": "routing_max_weight",
    "entropy": "routing_entropy",
    "effective_sources": "routing_effective_sources",
    "embedding_weight": "routing_embedding_weight",
    "routed_ratio": "routing_ratio",
    "stream_norm": "stream_norm",
}


def measure(config: FrozenConfigDict, params: Any, batch: step.Batch) -> readings.Sums:
    """`readings.sums` over all tokens of a batch."""
    inputs = (batch["inputs"], batch["positions"], batch["segments"])
    captured = transformer.apply(config.model, params, *inputs, capture=True).routing
    assert captured is not None
    return readings.sums(config.model, captured, jnp.ones(inputs[0].shape, jnp.float32))


def row(config: FrozenConfigDict, sums: readings.Sums) -> dict[str, float | None]:
    """What is logged, as `routing_max_weight/layer_03_attention` and `source_norm/block_1`.

    `routing_max_weight/mean` and the like are those of all readers with at least two sources. None
    for what is not finite; what is not defined is left out.
    """
    table = readings.table(config.model, sums)
    values: dict[str, float] = {}
    for key, name in NAMES.items():
        known = [reader for reader in table["readers"] if reader[key] is not None]
        values |= {f"{name}/{_tag(config, r['name'])}": r[key] for r in known}
        choice = [reader[key] for reader in known if len(reader["sources"]) > 1]
        if choice:
            values[f"{name}/mean"] = sum(choice) / len(choice)
    values |= {f"source_norm/{_tag(config, s['name'])}": s["norm"] for s in table["sources"]}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _tag(config: FrozenConfigDict, name: str) -> str:
    """A label without spaces, whose numbers sort as words do."""
    digits = len(str(config.model.num_layers - 1))
    words = readings.label(name).split()
    return "_".join(word.zfill(digits) if word.isdigit() else word for word in words)


class Probe:
    """Measures the parameters of a run every `metrics.routing_every` steps.

    Always on the same rows, those that the run's order begins with, as many as a micro-batch has.

    Args:
      config: the resolved config.
      mesh: of the devices.
      programs: of the run.
      data: of the run.
    """

    def __init__(
        self, config: FrozenConfigDict, mesh: Mesh, programs: programs_lib.Programs, data: Data
    ):
        began = time.perf_counter()
        self._config, self._every = config, config.metrics.routing_every
        self.rows = config.train.batch_size // config.train.accumulation
        batches = pipeline.train_batches(data.rows, data.order, self.rows, 0, *programs.place)
        with contextlib.closing(batches):
            self._batch = programs.put(next(batches))
        values = config.to_dict()
        values["model"]["scan"] = "blocks"  # the smallest program, where nothing is differentiated
        platform = mesh.devices.flat[0].platform
        fitting = programs_lib.for_platform(
            FrozenConfigDict(values), platform, mesh.shape["tensor"]
        )
        state, shardings = programs_lib.abstract_state(config, mesh)
        function = jax.jit(
            functools.partial(measure, fitting),
            in_shardings=(shardings.params, sharding.batch_sharding(mesh)),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        with sharding.activate(mesh):
            lowered = function.lower(state.params, self._batch)
        self._program = programs_lib.compile_for(lowered, mesh)
        self._peak_bytes = programs_lib.peak_bytes(self._program, platform)
        self._compile_seconds = time.perf_counter() - began

    def __call__(self, number: int, params: Any) -> readings.Sums | None:
        """Starts the measurement of the parameters after a step; None where it is not due."""
        return self._program(params, self._batch) if number % self._every == 0 else None

    def row(self, sums: readings.Sums) -> dict[str, float | None]:
        """See `row`; waits for the device."""
        return row(self._config, jax.device_get(sums))

    def cost(self, params: Any) -> str:
        """Measures once and says how long it took."""
        began = time.perf_counter()
        jax.block_until_ready(self._program(params, self._batch))
        seconds = time.perf_counter() - began
        return (
            f"routing on {self.rows} rows every {self._every} steps: {seconds:.3g} s each, "
            f"{report.human_bytes(self._peak_bytes)} a device; "
            f"compiled in {self._compile_seconds:.2g} s"
        )
