"""Where a run starts: its own newest checkpoint, else `init_from`, else its seed."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.training import checkpoint, step
from deltares_jax.training import workdir as workdir_lib

_NEW = {"rows_seen": 0, "tokens_seen": 0, "seconds": 0.0}


@dataclasses.dataclass
class Start:
    """A start that was found.

    Attributes:
      step: completed updates.
      meta: what the checkpoint says of the run: position, clock, config.
      text: in words, for the log.
      changes: lines on what differs from the config of the checkpoint.
      run: whose checkpoint it is; None without one.
      at: its step there.
      own: whether the run goes on with its own checkpoint.
    """

    step: int
    meta: dict[str, Any]
    text: str
    changes: list[str]
    run: pathlib.Path | None = None
    at: int = 0
    own: bool = False

    @property
    def whole(self) -> bool:
        """Whether optimizer and position go on, too."""
        return self.step > 0


def find(config: FrozenConfigDict, folder: pathlib.Path) -> Start:
    """Looks for the start of a run.

    Raises:
      ValueError: the checkpoint is of another model, or of a run that may not be changed so.
    """
    own = checkpoint.newest(folder)
    if own is not None:
        at, meta = own
        if at == 0:
            raise ValueError(
                f"{folder} holds weights to start from, and no run; give another --workdir and "
                f"--config.init_from={workdir_lib.shown(folder)}"
            )
        text = f"resumed at step {at}"
        if config.init_from:
            text += f" (own checkpoints come first; init_from={config.init_from} is not used)"
        changes = config_lib.changed_on_resume(meta["config"], config)
        return Start(at, meta, text, changes, folder, at, own=True)
    if not config.init_from:
        return Start(0, dict(_NEW), "fresh start (no own checkpoint, no init_from)", [])
    return _other(config)


def _other(config: FrozenConfigDict) -> Start:
    try:
        run, at = checkpoint.locate(*checkpoint.split_step(config.init_from))
    except ValueError as error:
        raise ValueError(f"init_from={config.init_from}: {error}") from None
    reader = checkpoint.Checkpointer(run, keep=None)
    try:
        saved = reader.read_meta(at)
    finally:
        reader.close()
    changes = config_lib.changed_on_init(saved["config"], config)
    name = f"{workdir_lib.shown(run)}@{at}"
    if not config.init_optimizer:
        text = f"weights of {name}, the rest fresh (no own checkpoint)"
        return Start(0, dict(_NEW), text, [], run, at)
    if at == 0 or "rows_seen" not in saved:
        raise ValueError(
            f"init_optimizer=True, but {name} holds weights alone; use init_optimizer=False"
        )
    if at >= config.train.steps:
        raise ValueError(
            f"train.steps={config.train.steps} must exceed {at}, the step that "
            f"init_from={config.init_from} goes on from"
        )
    meta = {**saved, "seconds": 0.0}
    text = f"goes on from {name}, with optimizer and position (no own checkpoint)"
    return Start(at, meta, text, changes, run, at)


def make_state(
    config: FrozenConfigDict, start: Start, abstract_state: Any, shardings: Any
) -> step.TrainState:
    """The state of a start on the devices of the shardings.

    Raises:
      ValueError: the checkpoint holds other arrays.
    """
    wanted = checkpoint.abstract(abstract_state, shardings)
    if start.run is None:
        return _seeded(config, shardings)
    reader = checkpoint.Checkpointer(start.run, keep=None)
    try:
        if start.whole:
            return reader.restore(start.at, wanted)
        params = reader.restore(start.at, {"params": wanted.params})["params"]
    finally:
        reader.close()
    return _seeded(config, shardings).replace(params=params)


def _seeded(config: FrozenConfigDict, shardings: Any) -> step.TrainState:
    return jax.jit(functools.partial(step.init_state, config), out_shardings=shardings)()
