"""A checkpoint as a model to call, for notebooks and analysis.

    from deltares_jax import load
    model = load("runs/debug")
    model.logits([[100, 101, 102]])

B batch, T sequence, V vocabulary, S sources.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.models import transformer
from deltares_jax.training import checkpoint, step
from deltares_jax.training import workdir as workdir_lib


class Model:
    """A trained model.

    Attributes:
      config: the resolved config of its run.
      params: its parameters on one device; layers are stacked as [L, …].
      step: the completed updates.
    """

    def __init__(self, config: FrozenConfigDict, params: Any, step: int):
        self.config, self.params, self.step = config, params, step

    @functools.cached_property
    def _forward(self) -> Any:
        @functools.partial(jax.jit, static_argnums=2)
        def forward(params: Any, ids_BT: jax.Array, capture: bool) -> Any:
            positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
            inputs = (ids_BT, positions_BT, jnp.ones_like(ids_BT))
            output = transformer.apply(self.config.model, params, *inputs, capture=capture)
            if capture:
                return transformer.routing_by_reader(self.config.model, output.routing)
            head_VD = transformer.head(params).astype(output.hidden_BTD.dtype)
            return jnp.einsum(
                "btd,vd->btv", output.hidden_BTD, head_VD, preferred_element_type=jnp.float32
            )

        return forward

    def _check(self, ids: Any) -> np.ndarray:
        ids_BT = np.asarray(ids)
        vocab = self.config.model.vocab_size
        if ids_BT.ndim != 2 or not ids_BT.size or not np.issubdtype(ids_BT.dtype, np.integer):
            raise ValueError(
                f"ids of shape {ids_BT.shape} and type {ids_BT.dtype} must be integers [B, T]"
            )
        if ids_BT.min() < 0 or ids_BT.max() >= vocab:
            raise ValueError(
                f"ids from {ids_BT.min()} to {ids_BT.max()} must lie in [0, {vocab}), "
                "model.vocab_size"
            )
        return ids_BT.astype(np.int32)

    def logits(self, ids: Any) -> np.ndarray:
        """Next-token logits, float32 [B, T, V], of token ids [B, T]; each row is one document."""
        return np.asarray(self._forward(self.params, self._check(ids), False), np.float32)

    def routing(self, ids: Any) -> dict[str, np.ndarray]:
        """Routing weights by reader, float32 [S, B, T] each, of token ids [B, T].

        Readers are `layers.<l>.attn`, `layers.<l>.mlp` (l from 0) and `final`; the order of the
        sources is that of `variants.source_names`. Readers without a source have no entry.
        """
        weights = self._forward(self.params, self._check(ids), True)
        return {reader: np.asarray(w_SBT, np.float32) for reader, w_SBT in weights.items()}


def load(path: str | os.PathLike[str], step: int | None = None) -> Model:
    """Loads a run's checkpoint onto one device.

    Args:
      path: a run's folder, or one of its checkpoints (`RUN/checkpoints/STEP`).
      step: which checkpoint of the run; the newest when None.

    Raises:
      ValueError: there is no such run or step, or it is damaged.
    """
    run, step = workdir_lib.locate(os.fspath(path), step)
    checkpoints = checkpoint.Checkpointer(run)
    try:
        config = config_lib.resolve(config_lib.from_dict(checkpoints.read_meta(step)["config"]))
        return Model(config, _restore_params(checkpoints, config, step), step)
    except checkpoint.DamagedError as error:
        raise ValueError(f"{error}; it has steps {checkpoints.steps()}") from error


def _restore_params(checkpoints: checkpoint.Checkpointer, config: FrozenConfigDict, at: int) -> Any:
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    params = jax.eval_shape(functools.partial(step.init_state, config)).params
    device = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: device, params)
    return checkpoints.restore(at, {"params": checkpoint.abstract(params, shardings)})["params"]
