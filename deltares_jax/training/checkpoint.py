"""Checkpoints: state, position, clock and config as one atomic, asynchronous unit (Orbax).

`<workdir>/checkpoints/<step>/` is there whole or not at all; it holds two items:

  state  a tree of arrays: `params`, and beside them `opt_state` and `step`. Weights that were
         made otherwise, at step 0, may leave the latter two out.
  meta   JSON: `version` (of this layout), `step`, `config` (the resolved one, nested); of a run
         also `rows_seen`, `tokens_seen`, `seconds` (its clock) and `data` (their fingerprint).
"""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from deltares_jax.training import workdir as workdir_lib

META_VERSION = 1
_SHOWN = 5  # arrays that a message lists


class SaveError(Exception):
    """A checkpoint could not be written."""


class Checkpointer:
    """Saves to and restores from `<workdir>/checkpoints/<step>`, keeping the newest few.

    `keep=None` is for reading: it removes and creates nothing.
    """

    def __init__(self, workdir: pathlib.Path, keep: int | None):
        self.folder = workdir / workdir_lib.CHECKPOINTS
        self._failed = False
        read_only = keep is None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Starts a save of the state after `step` updates; it is complete or absent on disk."""
        meta = {"version": META_VERSION, "step": step, **meta}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        self._guard(self._manager.save, step, args=args)

    def read_meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the state: step, rows_seen, tokens_seen, config and so on."""
        return _read(self.folder / str(step), meta=ocp.args.JsonRestore())["meta"]

    def arrays(self, step: int) -> dict[str, str]:
        """Type and shape of every array of a step, by its path: `float32[2, 3]`."""
        tree = ocp.PyTreeCheckpointHandler().metadata(self.folder / str(step) / "state").tree
        return _arrays(tree)

    def restore(self, step: int, wanted: Any) -> Any:
        """The state of a step, or parts of it, in the given shapes, dtypes and shardings.

        Args:
          step: one of `steps()`.
          wanted: a tree of `jax.ShapeDtypeStruct` with the state's field names at its top; fields
            that it leaves out are not read.

        Raises:
          ValueError: the step holds other arrays.
        """
        saved, asked = self.arrays(step), _arrays(wanted)
        fields = {name.split("/")[0] for name in asked}
        saved = {name: text for name, text in saved.items() if name.split("/")[0] in fields}
        if saved != asked:
            names = sorted(n for n in saved | asked if saved.get(n) != asked.get(n))
            pairs = [f"{n}: {saved.get(n, 'absent')} → {asked.get(n, 'absent')}" for n in names]
            more = f" and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
            raise ValueError(
                f"{self.folder / str(step)} holds other arrays than this run's (saved → asked): "
                f"{'; '.join(pairs[:_SHOWN])}{more}"
            )
        restore = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        return _read(self.folder / str(step), state=restore)["state"]

    def wait(self) -> None:
        """Returns when nothing is being saved any more; raises what a background save raised."""
        self._guard(self._manager.wait_until_finished)

    def close(self) -> None:
        """Waits for running saves and frees the threads."""
        try:
            self._manager.close()
        except Exception:
            if not self._failed:  # else it was raised before
                raise

    def _guard(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # disk full, read-only, quota: of many types
            self._failed = True
            first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise SaveError(f"nothing could be saved under {self.folder}: {first}") from error


def _read(folder: pathlib.Path, **items: Any) -> Any:
    reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    return reader.restore(folder, args=ocp.args.Composite(**items))


def _arrays(tree: Any) -> dict[str, str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def newest(workdir: pathlib.Path) -> tuple[int, dict[str, Any]] | None:
    """The newest step of a run and what was saved beside its state; None for a new run."""
    if not (workdir / workdir_lib.CHECKPOINTS).is_dir():
        return None
    reader = Checkpointer(workdir, keep=None)
    try:
        step = reader.latest()
        if step is None:
            return None
        try:
            return step, reader.read_meta(step)
        except Exception as error:
            raise ValueError(
                f"checkpoint {reader.folder / str(step)} is damaged ({type(error).__name__}); "
                "remove that folder to go on from the one before"
            ) from error
    finally:
        reader.close()


def split_step(name: str) -> tuple[str, int | None]:
    """(RUN, step) of `RUN@step`; (RUN, None) without a step."""
    match = re.fullmatch(r"(.+)@(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def locate(path: str, step: int | None = None) -> tuple[pathlib.Path, int]:
    """The run and the step that are meant by a run's folder or by `RUN/checkpoints/STEP`.

    Args:
      path: the folder.
      step: which checkpoint of the run; the newest when None.

    Raises:
      ValueError: there is no such run or step.
    """
    run = pathlib.Path(path).expanduser().absolute()
    if run.parent.name == workdir_lib.CHECKPOINTS and run.name.isdigit():
        if step is not None and step != int(run.name):
            raise ValueError(f"{path} is step {run.name}, but step {step} was asked for")
        run, step = run.parents[1], int(run.name)
    if not (run / workdir_lib.CHECKPOINTS).is_dir():
        raise ValueError(f"{path} is no run: it has no {workdir_lib.CHECKPOINTS}/")
    reader = Checkpointer(run, keep=None)
    try:
        steps = reader.steps()
    finally:
        reader.close()
    if not steps or (step is not None and step not in steps):
        asked = "" if step is None else f" of step {step}"
        raise ValueError(f"{path} has no checkpoint{asked}; it has {steps or 'none'}")
    return run, steps[-1] if step is None else step


def abstract(state: Any, shardings: Any) -> Any:
    """Shapes and dtypes of a state together with its shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )
