"""The compiled steps of a run, and the settings of JAX that they are compiled under."""

import functools
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.data import pipeline
from deltares_jax.models import attention, routing_kernels
from deltares_jax.parallel import chips, sharding
from deltares_jax.parallel import report as report_lib
from deltares_jax.training import metrics, step

# Of YNNPACK the matrix products alone: its sums take longer than the loops that XLA writes.
_CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}


def set_up_jax(config: FrozenConfigDict) -> None:
    """Switches on float64 and the compile cache, as the config asks."""
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if config.train.compile_cache == "off":
        jax.config.update("jax_compilation_cache_dir", None)
        return
    if config.train.compile_cache == "auto" and os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    path = pathlib.Path(config.train.compile_cache)
    try:
        path = config_lib.cache_folder() / "xla" if str(path) == "auto" else path
        path = path.expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        metrics.say(f"warning: train.compile_cache={path} cannot be written ({why}); going on")
        return
    jax.config.update("jax_compilation_cache_dir", str(path))


def for_platform(config: FrozenConfigDict, platform: str, tensor: int = 1) -> FrozenConfigDict:
    """The config with the attention and the routing kernel that it means on a platform.

    Args:
      config: from `config.resolve`.
      platform: of the devices.
      tensor: into how many parts the rows are cut.

    Raises:
      ValueError: what is named, or `model.remat=offload`, does not run there.
    """
    model = config.model
    if model.remat == "offload" and platform == "cpu":
        raise ValueError(
            "model.remat=offload keeps what it saves in the host's memory, where that of cpu is "
            "already; use model.remat=full"
        )
    values = config.to_dict()
    name = attention.choose(model.attention, platform, config.data.seq_len, model.dtype)
    values["model"]["attention"] = name
    name = routing_kernels.choose(model, platform, config.data.seq_len // tensor)
    values["model"]["residual"]["kernel"] = name
    return FrozenConfigDict(values)


def abstract_batch(config: FrozenConfigDict, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a batch of `size` rows."""
    T = config.data.seq_len
    row = pipeline.Rows(np.zeros(T + 1, np.int32), T, end_of_text=-1)[0]
    return {k: jax.ShapeDtypeStruct((size, *v.shape), v.dtype) for k, v in row.items()}


def abstract_state(config: FrozenConfigDict, mesh: Mesh) -> tuple[step.TrainState, Any]:
    """Shapes and dtypes of the train state, and its shardings on the mesh."""
    state = jax.eval_shape(functools.partial(step.init_state, config))
    return state, sharding.state_shardings(state, mesh)


def report(
    config: FrozenConfigDict, mesh: Mesh, state: step.TrainState, shardings: Any
) -> list[str]:
    """What each device will hold; see `parallel.report.lines`, also for what it refuses."""
    batch = abstract_batch(config, config.train.batch_size)
    return report_lib.lines(config, mesh, state, shardings, batch)


def lower_train(config: FrozenConfigDict, mesh: Mesh) -> Any:
    """The train step, lowered for the mesh's devices, which need not be there."""
    state, shardings = abstract_state(config, mesh)
    config = for_platform(config, mesh.devices.flat[0].platform, mesh.shape["tensor"])
    train = jax.jit(
        functools.partial(step.train_step, config),
        in_shardings=(shardings, sharding.batch_sharding(mesh)),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    with sharding.activate(mesh):
        return train.lower(state, abstract_batch(config, config.train.batch_size))


def lower_eval(config: FrozenConfigDict, mesh: Mesh) -> Any:
    """The evaluation step, likewise."""
    state, shardings = abstract_state(config, mesh)
    config = for_platform(config, mesh.devices.flat[0].platform, mesh.shape["tensor"])
    evaluate = jax.jit(
        functools.partial(step.eval_step, config),
        in_shardings=(shardings.params, sharding.batch_sharding(mesh)),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
    with sharding.activate(mesh):
        return evaluate.lower(state.params, abstract_batch(config, config.eval.batch_size))


def compiler_options(chip: chips.Chip | None) -> dict[str, str]:
    """The options that programs for a chip are compiled with; none for CPUs and GPUs."""
    return dict(chip.compiler_options) if chip else {}


def compile_for(lowered: Any, mesh: Mesh, more: dict[str, Any] | None = None) -> Any:
    """Compiles a lowered step with the options of the mesh's chips, and with more of them."""
    device = mesh.devices.flat[0]
    options = compiler_options(chips.by_device_kind(device.device_kind)) | (more or {})
    if device.platform == "cpu":
        try:
            return lowered.compile(compiler_options=_CPU_OPTIONS | options)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):  # XLAs do not all have it
                raise
    return lowered.compile(compiler_options=options or None)


class Programs:
    """The compiled train and evaluation steps of a run, and how batches reach the devices.

    Args:
      config: the resolved config.
      mesh: of the devices.
      waiting: calls the function that it is given, which compiles, and returns what that returns.
    """

    def __init__(
        self,
        config: FrozenConfigDict,
        mesh: Mesh,
        waiting: Callable[[Callable[[], Any]], Any] = lambda compiled: compiled(),
    ):
        began = time.perf_counter()
        self._batch_sharding = sharding.batch_sharding(mesh)
        # Which part of a batch this process reads, and of how many parts.
        self.place = sharding.part_of_process(self._batch_sharding, mesh.size)
        train = lower_train(config, mesh)
        self.train = waiting(lambda: compile_for(train, mesh))
        if config.eval.every:
            evaluate = lower_eval(config, mesh)
            self.evaluate = waiting(lambda: compile_for(evaluate, mesh))
        self._vote = _Vote(mesh)
        self.compile_seconds = time.perf_counter() - began
        self.peak_bytes = peak_bytes(self.train, mesh.devices.flat[0].platform)

    def agree(self, *mine: bool) -> tuple[bool, ...]:
        """Which of some questions any process answered with yes, the same on each of them.

        With several processes the answers are those of the call before, so that none waits.
        """
        return self._vote(mine)

    def put(self, batch: pipeline.Batch) -> step.Batch:
        """A host's part of a batch as arrays over all devices."""
        _, parts = self.place
        return {
            key: jax.make_array_from_process_local_data(
                self._batch_sharding, value, (len(value) * parts, *value.shape[1:])
            )
            for key, value in batch.items()
        }


class _Vote:
    """See `Programs.agree`."""

    def __init__(self, mesh: Mesh):
        self._mesh, self._pending = mesh, None
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._any = jax.jit(lambda votes: votes.max(axis=0), out_shardings=everywhere)

    def __call__(self, mine: tuple[bool, ...]) -> tuple[bool, ...]:
        if jax.process_count() == 1:
            return mine
        before, own = self._pending, self._mesh.local_mesh.size
        votes = jax.make_array_from_process_local_data(
            NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names)),
            np.tile(np.asarray(mine, np.int32), (own, 1)),
        )
        self._pending = self._any(votes)
        if before is None:
            return (False,) * len(mine)
        return tuple(bool(vote) for vote in jax.device_get(before))


def peak_bytes(compiled: Any, platform: str) -> int:
    """Bytes a device that a program needs; 0 where the platform does not tell."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    if platform != "cpu":  # there the peak leaves the temporaries out
        return analysis.peak_memory_in_bytes
    kept = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + kept
