"""The loss of every token of a batch, compiled once for each length.

B batch, T sequence.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.data.rows import Batch
from deltares_jax.inference.trained import Trained, changed
from deltares_jax.models import transformer
from deltares_jax.parallel import sharding
from deltares_jax.training import losses, programs

_INPUTS = ("inputs", "positions", "segments", "targets")
Tag = TypeVar("Tag")


def _scores(
    config: FrozenConfigDict, params: Any, inputs: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    tokens = (inputs["inputs"], inputs["positions"], inputs["segments"])
    hidden_BTD = transformer.apply(config.model, params, *tokens).hidden_BTD
    return losses.token_scores(hidden_BTD, transformer.head(params), inputs["targets"])


class Scorer:
    """Scores batches by a model on its mesh.

    Attributes:
      lengths: those that a program was made for.
    """

    def __init__(self, trained: Trained):
        self._trained = trained
        self.lengths: dict[int, Any] = {}

    def _program(self, length: int) -> Any:
        if length not in self.lengths:
            mesh = self._trained.mesh
            config = programs.for_platform(
                changed(self._trained.config, {"data.seq_len": length}),
                mesh.devices.flat[0].platform,
                mesh.shape["tensor"],
            )
            self.lengths[length] = jax.jit(
                functools.partial(_scores, config),
                out_shardings=NamedSharding(mesh, PartitionSpec()),
            )
        return self.lengths[length]

    def __call__(
        self, batches: Iterable[tuple[Tag, Batch]]
    ) -> Iterator[tuple[Tag, np.ndarray, np.ndarray]]:
        """Yields each batch's tag, its losses [B, T] in nats, and which targets are the likeliest.

        Args:
          batches: any tag and `inputs`, `positions`, `segments` and `targets`, [B, T] each, the
            same on every process; B is a multiple of `Trained.parts`.
        """
        waiting: Any = None
        for tag, batch in batches:
            inputs = {key: self._trained.put(batch[key]) for key in _INPUTS}
            with sharding.activate(self._trained.mesh):
                result = self._program(batch["inputs"].shape[1])(self._trained.params, inputs)
            if waiting is not None:  # the device has the next one while this is read
                yield waiting[0], *jax.device_get(waiting[1])
            waiting = tag, result
        if waiting is not None:
            yield waiting[0], *jax.device_get(waiting[1])
