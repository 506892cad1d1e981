"""Checkpoints: state, position, clock and config as one atomic, asynchronous unit (Orbax)."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from deltares_jax.training import workdir as workdir_lib

META_VERSION = 1


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
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        return self._manager.restore(step, args=args)["meta"]

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state of a step, in the shapes, dtypes and shardings of `abstract_state`."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        return self._manager.restore(step, args=args)["state"]

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


def abstract(state: Any, shardings: Any) -> Any:
    """Shapes and dtypes of a state together with its shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )
