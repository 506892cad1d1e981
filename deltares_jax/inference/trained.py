"""A checkpoint of a run on a mesh of this machine's devices, whatever mesh it was trained on."""

import dataclasses
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.data import tokens
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import sharding
from deltares_jax.training import checkpoint, metrics, programs
from deltares_jax.training import workdir as workdir_lib

# Of the machine and of training; a loaded model takes what the machine in use is best at.
_FRESH = ("distributed", "train.platform", "model.attention", "model.residual.kernel", "model.scan")


@dataclasses.dataclass
class Trained:
    """A model and where it lies.

    Attributes:
      folder: of its run.
      step: its completed updates.
      config: of its run, from `saved_config`.
      params: its parameters, cut over the mesh; layers are stacked as [L, …].
      mesh: of the devices.
    """

    folder: pathlib.Path
    step: int
    config: FrozenConfigDict
    params: Any
    mesh: Mesh

    @property
    def parts(self) -> int:
        """Into how many parts a batch is cut; its size is a multiple of this."""
        return math.prod(self.mesh.shape[axis] for axis in mesh_lib.BATCH_AXES)

    def batch_size(self, asked: int) -> int:
        """The smallest batch of at least `asked` rows that the mesh divides."""
        return -(-asked // self.parts) * self.parts

    def put(self, rows: np.ndarray) -> jax.Array:
        """Rows [B, …], the same on every process, as an array over all devices."""
        place = sharding.batch_sharding(self.mesh)
        return jax.make_array_from_callback(rows.shape, place, lambda index: rows[index])

    def describe(self) -> str:
        """The checkpoint and the devices, in a line."""
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1)
        device = self.mesh.devices.flat[0]
        variant = self.config.model.residual.variant
        on = f"{self.mesh.size} {device.platform}" + (f" ({axes})" if axes else "")
        return f"{workdir_lib.shown(self.folder)}: {variant}, step {self.step}, on {on}"


def find(path: str, step: str) -> tuple[pathlib.Path, int]:
    """The run's folder and the step that `--workdir` and `--step` mean.

    Args:
      path: a run's folder, or one of its checkpoints.
      step: a number, `last`, `best` (the lowest held-out loss in metrics.jsonl), or empty for the
        checkpoint that the path names, else the last.

    Raises:
      ValueError: there is no such run or step, or no held-out loss is known.
    """
    if not path:
        raise ValueError("--workdir is missing; for example --workdir=runs/debug")
    if step not in ("", "last", "best") and not step.isdecimal():
        raise ValueError(f"--step={step!r} must be a number, last or best")
    try:
        folder, newest = workdir_lib.locate(path, int(step) if step.isdecimal() else None)
    except ValueError as error:
        raise ValueError(f"--workdir={path}: {error}") from None
    steps = checkpoint.Checkpointer(folder).steps()
    if step == "last":
        return folder, steps[-1]
    if step != "best":
        return folder, newest
    _, held_out = metrics.read_rows(folder)
    losses = {s: held_out[s]["eval_loss"] for s in steps if s in held_out}
    losses = {s: loss for s, loss in losses.items() if loss is not None}
    if not losses:
        raise ValueError(
            f"--step=best: no held-out loss of the steps {steps} is in "
            f"{folder / workdir_lib.METRICS}; use --step=last"
        )
    return folder, min(losses, key=lambda s: (losses[s], -s))


def parse_mesh(text: str) -> dict[str, int]:
    """`"fsdp=4,tensor=2"` as sizes of all axes; those that are not named are 1.

    Raises:
      ValueError: the form is another, there is no such axis, or two take the rest.
    """
    sizes = dict.fromkeys(mesh_lib.AXES, 1)
    for item in text.split(","):
        match = re.fullmatch(r"(\w+)=(-1|[1-9]\d*)", item.strip())
        if not match or match[1] not in sizes:
            raise ValueError(
                f"--mesh={text!r}: {item!r} must have the form AXIS=SIZE, with an axis of "
                f"{', '.join(mesh_lib.AXES)} and a size of at least 1, or -1 for the rest"
            )
        sizes[match[1]] = int(match[2])
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"--mesh={text!r}: one axis at most may be -1")
    return sizes


def saved_config(folder: pathlib.Path, step: int) -> FrozenConfigDict:
    """The config of a checkpoint, without what is of the machine that it was trained on.

    Raises:
      ValueError: the checkpoint is damaged, or of another version.
    """
    reader = checkpoint.Checkpointer(folder)
    try:
        config = config_lib.from_dict(reader.read_meta(step)["config"])
    except checkpoint.DamagedError as error:
        raise ValueError(f"{error}; there are steps {reader.steps()}") from error
    except ValueError as error:
        place = workdir_lib.shown(reader.folder / str(step))
        raise ValueError(f"{place} was saved by another version: {error}") from error
    default = config_lib.flatten(config_lib.default())
    for key, value in default.items():
        if key.startswith(_FRESH):
            config.update_from_flattened_dict({key: value})
    config.model.remat = "full"  # with scan=auto, the smallest program; nothing is differentiated
    config.train.accumulation = 1
    return config_lib.resolve(config)


def tokenizer(config: FrozenConfigDict) -> tokens.Tokenizer:
    """The tokenizer of a run.

    Raises:
      ValueError: it is not there, or has more tokens than the model.
    """
    found = tokens.get_tokenizer(config.data.tokenizer)
    if found.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"data.tokenizer={config.data.tokenizer!r} has {found.vocab_size} tokens, the model "
            f"{config.model.vocab_size} (model.vocab_size): it was trained with another"
        )
    return found


def changed(config: FrozenConfigDict, values: dict[str, Any]) -> FrozenConfigDict:
    """A checked config with other values of some dotted keys."""
    other = config_lib.from_dict(config.to_dict())
    other.update_from_flattened_dict(values)
    return config_lib.resolve(other)


def load(
    folder: pathlib.Path,
    step: int,
    config: FrozenConfigDict,
    mesh: str = "",
    devices: Sequence[jax.Device] | None = None,
) -> Trained:
    """Loads a checkpoint onto devices.

    Args:
      folder: of the run.
      step: of the checkpoint.
      config: from `saved_config`.
      mesh: as for `parse_mesh`; when empty the run's own, else all devices along `fsdp`, else along
        `data`: the first that goes with them.
      devices: all when None.

    Raises:
      ValueError: the devices or the model do not go with the mesh, or the checkpoint is damaged.
    """
    programs.set_up_jax(config)
    devices = mesh_lib.find_devices(config, devices)
    mesh_of_devices = mesh_lib.make_mesh(_shape(config, mesh, len(devices)), devices)
    state, shardings = programs.abstract_state(config, mesh_of_devices)
    wanted = {"params": checkpoint.abstract(state.params, shardings.params)}
    try:
        params = checkpoint.Checkpointer(folder).restore(step, wanted)["params"]
    except checkpoint.DamagedError as error:
        raise ValueError(str(error)) from error
    return Trained(folder, step, config, params, mesh_of_devices)


def _shape(config: FrozenConfigDict, mesh: str, count: int) -> dict[str, int]:
    alone = dict.fromkeys(mesh_lib.AXES, 1)
    asked = (
        [parse_mesh(mesh)] if mesh else [config.mesh, alone | {"fsdp": -1}, alone | {"data": -1}]
    )
    for last, sizes in enumerate(asked, 1):
        try:
            shape = mesh_lib.mesh_shape(sizes, count)
            mesh_lib.check_cuts(config, shape)
        except ValueError:
            if last == len(asked):
                raise
        else:
            break
    return shape
