"""A run's folder at gs://: checkpoints are in the bucket, all else in a mirror on this machine.

A bucket knows no append, no lock and no rename. So what a run appends to, replaces or locks is in a
local folder, which process 0 copies to the bucket before each checkpoint and at the end, and from
it at the start. Orbax writes checkpoints to the bucket itself; one is whole once it has its mark.
"""

import contextlib
import hashlib
import importlib.util
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import fsspec
from etils import epath

from deltares_jax import config as config_lib
from deltares_jax.printing import one_line

MARK = "commit_success.txt"  # by Orbax, where it cannot rename
_ADDRESS = ".address"
_OWN = {_ADDRESS, ".lock", ".roll-call"}


def open_mirror(flag: str, address: str) -> pathlib.Path:
    """The local folder of a run in a bucket, which is tried for writing.

    Raises:
      ValueError: the bucket cannot be written.
    """
    address = address.rstrip("/")
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError(f"{flag}={address} needs gcsfs: pip install 'deltares-jax[gcs]'")
    os.environ["EPATH_USE_TF"] = "false"
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # else tracebacks of what is tried again
    # TensorStore writes there, too.
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    name = hashlib.sha256(address.encode()).hexdigest()[:16]
    mirror = config_lib.cache_folder() / "runs" / name
    try:
        mirror.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag}={address}: {mirror} cannot be made: {error.strerror}") from None
    partial = mirror / f"{_ADDRESS}.{os.getpid()}"  # another process may read it now
    partial.write_text(address)
    partial.replace(mirror / _ADDRESS)
    with _guarded(flag, address, "written"):
        probe = home(mirror) / f".writable.{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    return mirror


@contextlib.contextmanager
def _guarded(flag: str, address: str, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of credentials, network and rights: of many types
        raise ValueError(f"{flag}={address} cannot be {what}: {one_line(error)}") from error


def home(folder: pathlib.Path) -> Any:
    """Where a run's checkpoints are kept: in the bucket of a mirror, else in the folder itself."""
    address = folder / _ADDRESS
    if is_remote(folder) or not address.is_file():
        return folder
    return epath.Path(address.read_text())


def is_remote(path: pathlib.Path) -> bool:
    """Whether a path is in a bucket."""
    return str(path).startswith("gs://")


def whole(step: Any) -> bool:
    """Whether the folder of a checkpoint holds all of it."""
    return not is_remote(step) or (step / MARK).exists()


def remove(step: Any) -> None:
    """Removes a checkpoint from a bucket; a part of it never passes for the whole."""
    (step / MARK).unlink(missing_ok=True)
    step.rmtree()


def move(step: Any, place: Any) -> Any:
    """Moves a checkpoint that cannot be read; returns where to."""
    fsspec.filesystem("gs").mv(str(step), str(place), recursive=True)
    return place


def shown(path: pathlib.Path) -> str:
    """The address of a path in a mirror, or nothing."""
    for folder in (path, *path.parents):
        if not is_remote(folder) and (folder / _ADDRESS).is_file():
            return str(home(folder) / path.relative_to(folder))
    return ""


@contextlib.contextmanager
def mirrored(folder: pathlib.Path, on: bool) -> Iterator[None]:
    """What the bucket has comes to the mirror, and goes back at the end; for process 0 alone.

    Raises:
      ValueError: the bucket cannot be read or written.
    """
    if not on or home(folder) is folder:
        yield
        return
    address = str(home(folder))
    with _guarded("--workdir", address, "read"):
        _pull(folder)
    try:
        yield
    finally:
        with _guarded("--workdir", address, "written"):
            push(folder)


def _pull(folder: pathlib.Path) -> None:
    # The bucket's state counts: another machine may have gone on with the run.
    for path in folder.iterdir():
        if path.name not in _OWN:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    there = home(folder)
    if there.is_dir():
        for path in there.iterdir():
            if not path.is_dir():
                (folder / path.name).write_bytes(path.read_bytes())


def push(folder: pathlib.Path) -> None:
    """Copies the files of a mirror to its bucket; nothing for other folders."""
    there = home(folder)
    if there is folder:
        return
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in _OWN:
            (there / path.relative_to(folder).as_posix()).write_bytes(path.read_bytes())
