"""Checkpoints: state, position, clock and config as one atomic, asynchronous unit (Orbax).

`<workdir>/checkpoints/<step>/` is there whole or not at all; it holds two items:

  state  a tree of arrays: `params`, and beside them `opt_state` and `step` (and `norms`, of
         `train.spike_factor`). Weights that were made otherwise, at step 0, may leave those out.
  meta   JSON: `version` (of this layout), `step`, `config` (the resolved one, nested), `sums` (a
         checksum of every array's bits), `versions` (of the libraries); of a run also
         `rows_seen`, `tokens_seen`, `skipped`, `clock` (seconds by what they were spent on) and
         `data` (their fingerprint).
"""

import contextlib
import errno
import math
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from deltares_jax import config_resume
from deltares_jax.training import named_arrays, remote, s3
from deltares_jax.training import workdir as workdir_lib

META_VERSION = 1
DAMAGED = "damaged"  # where the run keeps what it could not read
_SHOWN = 5  # arrays that a message lists
_REMOVED = ".removed"


class SaveError(Exception):
    """A checkpoint could not be written."""


class DamagedError(Exception):
    """A checkpoint cannot be read; says which and why."""


def kept(
    steps: Iterable[int], keep: int, period: int, best: int, losses: dict[int, float]
) -> set[int]:
    """The steps that stay: the newest, every so many-th, and those of the lowest held-out loss.

    Args:
      steps: those that there are.
      keep: how many of the newest.
      period: multiples of it stay for good; 0 is none.
      best: how many of the lowest loss.
      losses: held-out loss by step, where it is known.
    """
    steps = sorted(steps)
    known = [s for s in steps if math.isfinite(losses.get(s, math.nan))]
    known.sort(key=lambda s: (losses[s], -s))
    every = {s for s in steps if period and s % period == 0}
    return {*steps[-keep:], *every, *known[:best]}


class Checkpointer:
    """Saves to and restores from `<workdir>/checkpoints/<step>`.

    Args:
      workdir: the run's folder.
      keep: how many of the newest to keep; None for reading, which removes and creates nothing.
      period: see `kept`.
      best: see `kept`.

    Attributes:
      losses: held-out loss by step, for `best`.
      cleaned: names of leftovers of interrupted saves that were removed.
    """

    def __init__(
        self, workdir: pathlib.Path, keep: int | None = None, period: int = 0, best: int = 0
    ):
        self._workdir = workdir
        self.folder: Any = remote.home(workdir) / workdir_lib.CHECKPOINTS
        self.losses: dict[int, float] = {}
        self.cleaned: list[str] = []
        self._rules = (keep or 0, period, best)
        self._failed = False
        self._writer: Any = None
        if keep is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                there = list(self.folder.iterdir()) if self.folder.is_dir() else []
                self.cleaned = [p.name for p in there if _is_leftover(p)]
                for name in self.cleaned:
                    if remote.is_remote(self.folder):
                        remote.remove(self.folder / name)
                        continue
                    shutil.rmtree(self.folder / name, ignore_errors=True)
            whole, items = s3.writer_options(self.folder)
            self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**items), **whole)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or not issubclass(kind, KeyboardInterrupt):  # which waits for nothing
            self.close()

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        return workdir_lib.steps(self.folder.parent)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Starts a save of the state after `step` updates; it is complete or absent on disk.

        Raises:
          SaveError: this save cannot begin, or the one before has failed.
        """
        self.wait()
        meta = {
            "version": META_VERSION,
            "step": step,
            "sums": named_arrays.sums(state),
            "versions": workdir_lib.versions(),
            **meta,
        }
        if jax.process_index() == 0:
            self._guard(remote.push, self._workdir)
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        self._guard(self._writer.save, self.folder / str(step), args=args)

    def check(self) -> None:
        """Raises `SaveError` if the save in the background has failed; does not wait."""
        self._guard(self._writer.check_for_errors)

    def wait(self) -> None:
        """Returns when nothing is being saved any more, and removes what need not be kept.

        Raises:
          SaveError: the save has failed.
        """
        self._guard(self._writer.wait_until_finished)
        if jax.process_index() == 0:
            steps = self.steps()
            for step in set(steps) - kept(steps, *self._rules, self.losses):
                self._guard(self._remove, step)

    def _remove(self, step: int) -> None:
        if remote.is_remote(self.folder):
            remote.remove(self.folder / str(step))
            return
        gone = self.folder / f"{step}{_REMOVED}"
        (self.folder / str(step)).rename(gone)  # a part of a step must not pass for the whole
        shutil.rmtree(gone)

    def close(self) -> None:
        """Waits for running saves and frees the threads."""
        if self._writer is not None:
            try:
                self._writer.close()
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

    def read_meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the state: step, rows_seen, tokens_seen, config and so on.

        Raises:
          DamagedError: it cannot be read, or is of another layout.
        """
        with self._reading(step):
            place = self.folder / str(step) / "meta"
            meta = ocp.JsonCheckpointHandler().restore(place, args=ocp.args.JsonRestore())
            version = meta["version"]
        if version != META_VERSION:
            raise DamagedError(
                f"{self.folder / str(step)} is of format {version}, this version reads "
                f"{META_VERSION}"
            )
        with self._reading(step):
            meta["config"] = config_resume.completed(meta["config"])
        return meta

    def arrays(self, step: int) -> dict[str, str]:
        """Type and shape of every array of a step, by its path: `float32[2, 3]`."""
        with self._reading(step):
            return named_arrays.shapes(
                ocp.PyTreeCheckpointHandler().metadata(self.folder / str(step) / "state").tree
            )

    def restore(
        self, step: int, wanted: Any, all_can: Callable[[bool], bool] = lambda well: well
    ) -> Any:
        """The state of a step, or parts of it, in the given shapes, dtypes and shardings.

        Args:
          step: one of `steps()`.
          wanted: a tree of `jax.ShapeDtypeStruct` with the state's field names at its top; fields
            that it leaves out are not read.
          all_can: tells the other processes whether this one could read it; whether all could.

        Raises:
          ValueError: the step holds other arrays.
          DamagedError: it cannot be read, or its bits are not those that were saved.
          PermissionError: this user may not read it.
        """
        saved, asked = self.arrays(step), named_arrays.shapes(wanted)
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
        args = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        damage = None
        try:
            sums = self.read_meta(step).get("sums", {})
            with self._reading(step):
                # The handler itself: a checkpointer would wait for the others, which may fail.
                place = self.folder / str(step) / "state"
                state = ocp.PyTreeCheckpointHandler().restore(place, args=args)
        except DamagedError as error:
            damage = error
        if not all_can(damage is None):
            raise damage or DamagedError(
                f"{self.folder / str(step)} is damaged: another process cannot read its part"
            )
        found = named_arrays.sums(state)
        wrong = sorted(name for name in found if sums.get(name, found[name]) != found[name])
        if wrong:
            raise DamagedError(
                f"{self.folder / str(step)} is damaged: {wrong[0]} is not what was saved"
            )
        return state

    def set_aside(self, step: int) -> pathlib.Path:
        """Moves a step that cannot be read out of the way of a new one; returns where to."""
        home = self.folder.parent / DAMAGED
        home.mkdir(exist_ok=True)
        number = 0
        while (place := home / (f"{step}-{number}" if number else str(step))).exists():
            number += 1
        if remote.is_remote(place):
            return remote.move(self.folder / str(step), place)
        return (self.folder / str(step)).rename(place)

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except (jax.errors.JaxRuntimeError, PermissionError, MemoryError):
            raise  # no fault of what was saved
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0][:120]
            if first.startswith("PERMISSION_DENIED"):  # by TensorStore
                path = str(self.folder / str(step))
                raise PermissionError(errno.EACCES, "Permission denied", path) from error
            raise DamagedError(
                f"{self.folder / str(step)} is damaged ({type(error).__name__}: {first})"
            ) from error


def _is_leftover(path: pathlib.Path) -> bool:
    begun = path.name.endswith(_REMOVED) or ".orbax-checkpoint-tmp" in path.name
    return begun or not remote.whole(path)


def abstract(state: Any, shardings: Any) -> Any:
    """Shapes and dtypes of a state together with its shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )
