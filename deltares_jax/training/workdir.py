"""The run's folder: checked before anything is compiled; what is in it besides checkpoints."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import jax
from etils import epath
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config_checks, printing
from deltares_jax.training import remote, signals

CONFIG = "config.json"
RUN = "run.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
KEPT = "hf"  # of an imported model: its config.json, and what goes with the weights

_PACKAGES = ("deltares-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def _try_writing(folder: pathlib.Path, given: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink(missing_ok=True)  # another host's process may have the same number
    except OSError as error:
        raise ValueError(f"{given} cannot be written: {error.strerror}") from None


def open_workdir(path: str, flag: str = "--workdir") -> pathlib.Path:
    """The absolute folder of a run, created and tried for writing.

    Args:
      path: of the folder; of one in a bucket that of its mirror on this machine.
      flag: that gave it, for errors.

    Raises:
      ValueError: it is a file, is not writable, or is a checkpoint's folder inside a run.
    """
    if flag == "--workdir" and remote.is_remote(path):
        return remote.open_mirror(flag, path)
    config_checks.local_folder(flag, path)
    workdir = pathlib.Path(path).expanduser().absolute()
    for parent in workdir.parents:
        if os.path.isdir(parent / CHECKPOINTS) or os.path.isfile(parent / RUN):
            raise ValueError(
                f"{flag}={path} is inside the run {parent}; give the run's folder itself"
            )
    _try_writing(workdir, f"{flag}={path}")
    return workdir


@contextlib.contextmanager
def faults(workdir: pathlib.Path) -> Iterator[None]:
    """Says in words what the file system refuses a run.

    Raises:
      ValueError: there is no right to a file.
      signals.Stop: there is no room for the log or another small file.
    """
    try:
        yield
    except PermissionError as error:
        raise ValueError(
            f"{error.filename or shown(workdir)}: {error.strerror}; give the user of this process "
            f"(uid {os.geteuid()}) the right to it"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        text = f"nothing could be written to {workdir}: {error.strerror}; {newest_text(workdir)}"
        raise signals.Stop(text, signals.CANNOT_SAVE) from error


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Keeps a second process of this machine out of the run.

    Raises:
      ValueError: another process trains there.
    """
    with (workdir / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--workdir={shown(workdir)} is in use by another process; wait for it, or give "
                "another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def steps(workdir: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints of a run, oldest first."""
    folder = remote.home(workdir) / CHECKPOINTS
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.name.isdigit()]
    return sorted(int(path.name) for path in found if remote.whole(path))


def newest_text(workdir: pathlib.Path) -> str:
    """What a run that ends now leaves, in words."""
    there = steps(workdir)
    return f"step {there[-1]} is the newest checkpoint" if there else "nothing was saved"


def split_step(name: str) -> tuple[str, int | None]:
    """(RUN, step) of `RUN@step`; (RUN, None) without a step."""
    match = re.fullmatch(r"(.+)@(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def locate(path: str, step: int | None = None) -> tuple[pathlib.Path, int]:
    """The run and the step that are meant by a run's folder or by `RUN/checkpoints/STEP`.

    Args:
      path: the folder; in a bucket, what is beside the checkpoints is copied to this machine.
      step: which checkpoint of the run; the newest when None.

    Raises:
      ValueError: there is no such run or step, or a bucket cannot be read.
    """
    away = remote.is_remote(path)
    run: Any = epath.Path(path) if away else pathlib.Path(path).expanduser().absolute()
    if run.parent.name == CHECKPOINTS and run.name.isdigit():
        if step is not None and step != int(run.name):
            raise ValueError(f"{path} is step {run.name}, but step {step} was asked for")
        run, step = run.parents[1], int(run.name)
    if away:
        run = remote.open_copy(str(run))
    if not (remote.home(run) / CHECKPOINTS).is_dir():
        raise ValueError(f"{path} is no run: it has no {CHECKPOINTS}/")
    there = steps(run)
    if not there or (step is not None and step not in there):
        asked = "" if step is None else f" of step {step}"
        raise ValueError(f"{path} has no checkpoint{asked}; it has {there or 'none'}")
    return run, there[-1] if step is None else step


def shown(path: pathlib.Path) -> str:
    """A path as it is printed: relative below the current folder; of a bucket its address."""
    if address := remote.shown(path):
        return address
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    """Writes JSON so that a reader sees the old or the new file, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values, indent=2) + "\n")
    partial.replace(path)


def results_path(workdir: pathlib.Path, kind: str, step: int) -> pathlib.Path:
    """Where results on a checkpoint go; tried for writing before they are computed.

    Raises:
      ValueError: nothing can be written there.
    """
    folder = workdir / kind
    _try_writing(folder, shown(folder))
    return folder / f"step_{step}.json"


def write_results(path: pathlib.Path, values: dict[str, Any]) -> None:
    """Writes results, and says so.

    Raises:
      Stop: they cannot be written.
    """
    try:
        write_json(path, values)
        remote.push_file(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or printing.one_line(error)
        why = f"{shown(path)} cannot be written: {reason}"
        raise signals.Stop(why, printing.UNEXPECTED) from None
    printing.say(f"written: {shown(path)}")


def _commit() -> str:
    root = pathlib.Path(__file__).resolve().parents[2]
    try:
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def versions() -> dict[str, str]:
    """Of Python and the libraries that a run depends on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {"python": platform.python_version(), **found}


def carry_kept(source: pathlib.Path | None, folder: pathlib.Path) -> None:
    """Copies what goes with an imported model from the run that another one starts from."""
    if source and source != folder and (source / KEPT).is_dir():
        shutil.copytree(source / KEPT, folder / KEPT, dirs_exist_ok=True)


def write_run_files(
    workdir: pathlib.Path, config: FrozenConfigDict, devices: Sequence[jax.Device]
) -> None:
    """Writes `config.json` and `run.json`: versions, commit, command line, devices."""
    write_json(workdir / CONFIG, config.to_dict())
    run = {
        "versions": versions(),
        "commit": _commit(),
        "command": [sys.executable, *sys.orig_argv[1:]],
        "devices": {"count": len(devices), "kind": devices[0].device_kind},
        "host": platform.node(),
    }
    write_json(workdir / RUN, run)
