"""The compiled steps of a run, and the settings of JAX that they are compiled under."""

import functools
import os
import pathlib
import time
from typing import Any

import jax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.data import pipeline
from deltares_jax.parallel import sharding
from deltares_jax.training import step


def set_up_jax(config: FrozenConfigDict) -> None:
    """Switches on float64 and the compile cache, as the config asks."""
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if config.train.compile_cache == "off" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    path = config_lib.cache_folder() / "xla"
    if config.train.compile_cache != "auto":
        path = pathlib.Path(config.train.compile_cache).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        print(f"warning: train.compile_cache={path} cannot be written ({error.strerror}); going on")
        return
    jax.config.update("jax_compilation_cache_dir", str(path))


class Programs:
    """The compiled train and evaluation steps, and how batches reach the devices."""

    def __init__(
        self, config: FrozenConfigDict, mesh: Any, state: Any, shardings: Any, row: pipeline.Batch
    ):
        began = time.perf_counter()
        self._batch_sharding = sharding.batch_sharding(mesh)

        def batch(size: int) -> dict[str, jax.ShapeDtypeStruct]:
            return {k: jax.ShapeDtypeStruct((size, *v.shape), v.dtype) for k, v in row.items()}

        with sharding.activate(mesh):
            train = jax.jit(
                functools.partial(step.train_step, config),
                in_shardings=(shardings, self._batch_sharding),
                out_shardings=(shardings, None),
                donate_argnums=0,
            )
            self.train = train.lower(state, batch(config.train.batch_size)).compile()
            evaluate = jax.jit(
                functools.partial(step.eval_step, config),
                in_shardings=(shardings.params, self._batch_sharding),
            )
            if config.eval.every:
                abstract = batch(config.eval.batch_size)
                self.evaluate = evaluate.lower(state.params, abstract).compile()
        self.compile_seconds = time.perf_counter() - began
        self.peak_bytes = _peak_bytes(self.train)

    def put(self, batch: pipeline.Batch) -> step.Batch:
        """A host's batch as arrays over all devices."""
        return {
            key: jax.make_array_from_process_local_data(self._batch_sharding, value)
            for key, value in batch.items()
        }


def _peak_bytes(compiled: Any) -> int:
    """Bytes a device that a program needs; 0 where the platform does not tell."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    if jax.default_backend() != "cpu":  # there the peak leaves the temporaries out
        return analysis.peak_memory_in_bytes
    kept = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + kept
