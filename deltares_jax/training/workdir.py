"""The run's folder: checked before anything is compiled; what is in it besides checkpoints."""

import contextlib
import fcntl
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import jax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config_checks

CONFIG = "config.json"
RUN = "run.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"

_PACKAGES = ("deltares-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def open_workdir(path: str) -> pathlib.Path:
    """The absolute folder of a run, created and tried for writing.

    Raises:
      ValueError: it is a file, is not writable, or is a checkpoint's folder inside a run.
    """
    config_checks.local_folder("--workdir", path)
    workdir = pathlib.Path(path).expanduser().absolute()
    for parent in workdir.parents:
        if (parent / CHECKPOINTS).is_dir() or (parent / RUN).is_file():
            raise ValueError(
                f"--workdir={path} is inside the run {parent}; give the run's folder itself"
            )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe = workdir / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink(missing_ok=True)  # another host's process may have the same number
    except OSError as error:
        raise ValueError(f"--workdir={path} cannot be written: {error.strerror}") from None
    return workdir


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
    folder = workdir / CHECKPOINTS
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def newest_text(workdir: pathlib.Path) -> str:
    """What a run that ends now leaves, in words."""
    there = steps(workdir)
    return f"step {there[-1]} is the newest checkpoint" if there else "nothing was saved"


def shown(path: pathlib.Path) -> str:
    """A path as it is printed: relative where it lies below the current folder."""
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    """Writes JSON so that a reader sees the old or the new file, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values, indent=2) + "\n")
    partial.replace(path)


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
