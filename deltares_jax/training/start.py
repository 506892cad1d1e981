"""Where a run starts: its own newest checkpoint, else `init_from`, else its seed."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config_resume
from deltares_jax.training import checkpoint, step
from deltares_jax.training import workdir as workdir_lib

_NEW = {"rows_seen": 0, "tokens_seen": 0, "skipped": 0, "spikes": 0, "clock": {}}


@dataclasses.dataclass
class Start:
    """A start that was found.

    Attributes:
      step: completed updates; above 0 optimizer and position go on.
      meta: what the checkpoint says of the run: position, clock, config.
      text: in words, for the log.
      changes: lines on what differs from the config of the checkpoint.
      run: whose checkpoint it is; None without one.
      at: its step there.
      own: whether the run goes on with its own checkpoint.
      damaged: own checkpoints that are newer but cannot be read, and why.
    """

    step: int
    meta: dict[str, Any]
    text: str
    changes: list[str]
    run: pathlib.Path | None = None
    at: int = 0
    own: bool = False
    damaged: dict[int, str] = dataclasses.field(default_factory=dict)


def find(
    config: FrozenConfigDict, folder: pathlib.Path, damaged: dict[int, str] | None = None
) -> Start:
    """Looks for the start of a run.

    Args:
      config: the resolved config.
      folder: of the run.
      damaged: own checkpoints that are known to be unreadable.

    Raises:
      ValueError: the checkpoint is of another model, or of a run that may not be changed so; or
        there are checkpoints, and none can be read.
    """
    reader, damaged = checkpoint.Checkpointer(folder), dict(damaged or {})
    for at in reversed(reader.steps()):
        try:
            if at not in damaged:
                return _own(config, folder, at, reader.read_meta(at), damaged)
        except checkpoint.DamagedError as error:
            damaged[at] = str(error)
    if damaged:
        raise ValueError(
            f"no checkpoint of {workdir_lib.shown(folder)} can be read: "
            f"{'; '.join(damaged.values())}. To begin anew give another --workdir"
        )
    if not config.init_from:
        return Start(0, dict(_NEW), "fresh start (no own checkpoint, no init_from)", [])
    return _other(config)


def _own(
    config: FrozenConfigDict,
    folder: pathlib.Path,
    at: int,
    meta: dict[str, Any],
    damaged: dict[int, str],
) -> Start:
    if at == 0:
        raise ValueError(
            f"{folder} holds weights to start from, and no run; give another --workdir and "
            f"--config.init_from={workdir_lib.shown(folder)}"
        )
    text = f"resumed at step {at}"
    if config.init_from:
        text += f" (own checkpoints come first; init_from={config.init_from} is not used)"
    changes = config_resume.changed_on_resume(meta["config"], config)
    return Start(at, {**_NEW, **meta}, text, changes, folder, at, True, damaged)


def _other(config: FrozenConfigDict) -> Start:
    try:
        run, at = workdir_lib.locate(*workdir_lib.split_step(config.init_from))
    except ValueError as error:
        raise ValueError(
            f"init_from={config.init_from}: {error}; it must be a run, or what "
            "deltares_jax.convert import made of a model of Qwen3"
        ) from None
    try:
        saved = checkpoint.Checkpointer(run).read_meta(at)
    except checkpoint.DamagedError as error:
        raise _damaged(config, run, error) from None
    changes = config_resume.changed_on_init(saved["config"], config)
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
    text = f"goes on from {name}, with optimizer and position (no own checkpoint)"
    return Start(at, {**_NEW, **saved, "clock": {}}, text, changes, run, at)


def _damaged(
    config: FrozenConfigDict, run: pathlib.Path, error: checkpoint.DamagedError
) -> ValueError:
    """Another run's steps are for the user to choose, and for its own run to clear away."""
    steps = workdir_lib.steps(run)
    return ValueError(f"init_from={config.init_from}: {error}; RUN@STEP names another of {steps}")


def check_data(config: FrozenConfigDict, start: Start, fingerprint: str) -> None:
    """Sets the position back where the run goes on with other rows than before.

    Raises:
      ValueError: that is not allowed.
    """
    if not start.step:
        return
    meta = start.meta
    if meta["data"] != fingerprint and not config.data.allow_change:
        raise ValueError(
            f"this run cannot be resumed with other data: its fingerprint was {meta['data'][:12]}, "
            f"that of {config.data.mixture or config.data.source} is {fingerprint[:12]} (prepared "
            "anew, or another interpreter's library?); data.allow_change=True begins it anew"
        )
    before = (meta["data"], meta["config"]["data"]["seq_len"], meta["config"]["train"]["seed"])
    if before != (fingerprint, config.data.seq_len, config.train.seed):
        line = f"data: row {meta['rows_seen']} of the old → the first row of the new order"
        start.changes.append(line)
        meta["rows_seen"] = 0


def restore(
    config: FrozenConfigDict,
    folder: pathlib.Path,
    start: Start,
    fingerprint: str,
    abstract_state: Any,
    shardings: Any,
    all_can: Callable[[bool], bool],
) -> tuple[Start, step.TrainState]:
    """The start that can be read, and its state on the devices of the shardings.

    Args:
      config: the resolved config.
      folder: of the run.
      start: from `find`.
      fingerprint: of the data.
      abstract_state: shapes and dtypes.
      shardings: of the state.
      all_can: see `Checkpointer.restore`.

    Raises:
      ValueError: the checkpoint holds other arrays, or none can be read.
    """
    wanted = checkpoint.abstract(abstract_state, shardings)
    while True:
        check_data(config, start, fingerprint)
        try:
            state = _state(config, start, wanted, shardings, all_can)
        except checkpoint.DamagedError as error:
            if start.run and not start.own:
                raise _damaged(config, start.run, error) from None
            start = find(config, folder, {**start.damaged, start.at: str(error)})
        else:
            return start, state


def _state(
    config: FrozenConfigDict,
    start: Start,
    wanted: step.TrainState,
    shardings: Any,
    all_can: Callable[[bool], bool],
) -> step.TrainState:
    if start.run is None:
        return jax.jit(functools.partial(step.init_state, config), out_shardings=shardings)()
    reader = checkpoint.Checkpointer(start.run)
    if not start.step:
        params = reader.restore(start.at, {"params": wanted.params}, all_can)["params"]
        fresh = jax.jit(
            functools.partial(step.fresh, config), out_shardings=shardings, donate_argnums=0
        )
        return fresh(params)
    fields = {"step": wanted.step, "params": wanted.params, "opt_state": wanted.opt_state}
    if config.train.spike_factor and "norms" in reader.arrays(start.at):
        fields["norms"] = wanted.norms
    read = reader.restore(start.at, fields, all_can)
    if "norms" not in read:  # the guard is off, or was
        norms = functools.partial(step.no_norms, config)
        read["norms"] = jax.jit(norms, out_shardings=shardings.norms)()
    return step.TrainState(**read)


def set_aside(start: Start, folder: pathlib.Path) -> list[str]:
    """Moves unreadable own checkpoints out of the way; lines that say so."""
    lines = []
    for at, why in sorted(start.damaged.items()):
        place = f"{checkpoint.DAMAGED}/"
        if jax.process_index() == 0:
            place = workdir_lib.shown(checkpoint.Checkpointer(folder).set_aside(at))
        lines.append(f"warning: {why}; skipped, and moved to {place}")
    return lines
