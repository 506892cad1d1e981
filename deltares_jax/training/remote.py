"""A run's folder in a bucket: checkpoints are there, all else is in a mirror on this machine.

A bucket knows no append, no lock and no rename. So what a run appends to, replaces or locks is in a
local folder, which process 0 copies to the bucket before each checkpoint and at the end, and from
it at the start. Orbax writes checkpoints to the bucket itself; one is whole once it has its mark.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import fsspec
from etils import epath

from deltares_jax import config as config_lib
from deltares_jax import config_checks
from deltares_jax.data import buckets
from deltares_jax.printing import one_line
from deltares_jax.training import s3

MARK = "commit_success.txt"  # by Orbax, where it cannot rename
_ADDRESS = ".address"
_OWN = {_ADDRESS, ".lock", ".roll-call"}
_LARGE = {"checkpoints", "damaged"}  # in the bucket alone


def open_mirror(flag: str, address: str) -> pathlib.Path:
    """The local folder of a run in a bucket, which is tried for writing.

    Raises:
      ValueError: the bucket cannot be written.
    """
    mirror = _mirror(flag, address, "")
    with _guarded(f"{flag}={address}", "written"):
        probe = home(mirror) / f".writable.{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    return mirror


def open_copy(address: str) -> pathlib.Path:
    """A local folder with what a run in a bucket has beside its checkpoints, to read.

    It is not the mirror, which a run of this machine may be using.

    Raises:
      ValueError: the bucket cannot be read.
    """
    copy = _mirror("", address, ".read")
    with _guarded(address, "read"):
        _pull(copy)
    return copy


def _mirror(flag: str, address: str, end: str) -> pathlib.Path:
    address = address.rstrip("/")
    asked = f"{flag}={address}" if flag else address
    scheme = buckets.require(flag or "a run", address)
    os.environ["EPATH_USE_TF"] = "false"
    # TensorStore writes there, too.
    fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False
    if scheme == "s3":
        s3.enable()
    name = hashlib.sha256(address.encode()).hexdigest()[:16]
    mirror = config_lib.cache_folder() / "runs" / f"{name}{end}"
    try:
        mirror.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{asked}: {mirror} cannot be made: {error.strerror}") from None
    _replace(mirror / _ADDRESS, address.encode())
    return mirror


def _replace(path: pathlib.Path, content: bytes) -> None:
    """Writes a file, which another process may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


@contextlib.contextmanager
def _guarded(asked: str, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of credentials, network and rights: of many types
        raise ValueError(f"{asked} cannot be {what}: {one_line(error)}") from error


def home(folder: pathlib.Path) -> Any:
    """Where a run's checkpoints are kept: in the bucket of a mirror, else in the folder itself."""
    address = folder / _ADDRESS
    if is_remote(folder) or not address.is_file():
        return folder
    return epath.Path(address.read_text())


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in a bucket."""
    return config_checks.in_bucket(str(path))


def whole(step: Any) -> bool:
    """Whether the folder of a checkpoint holds all of it."""
    return not is_remote(step) or (step / MARK).exists()


def remove(step: Any) -> None:
    """Removes a checkpoint from a bucket; a part of it never passes for the whole."""
    (step / MARK).unlink(missing_ok=True)
    step.rmtree()


def move(step: Any, place: Any) -> Any:
    """Moves a checkpoint that cannot be read; returns where to."""
    system = fsspec.filesystem(str(step).split("://")[0])
    inside = str(step).split("://")[1]
    for name in system.find(str(step)):
        system.cp_file(name, f"{place}{name.removeprefix(inside)}")
    remove(step)
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
    asked = f"--workdir={home(folder)}"
    with _guarded(asked, "read"):
        # The bucket's state counts: another machine may have gone on with the run.
        for path in folder.iterdir():
            if path.name not in _OWN:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        _pull(folder)
    try:
        yield
    finally:
        with _guarded(asked, "written"):
            push(folder)


def _pull(folder: pathlib.Path) -> None:
    root = home(folder)
    for path in _files(root) if root.is_dir() else ():
        _replace(folder / str(path.relative_to(root)), path.read_bytes())


def _files(folder: Any) -> Iterator[Any]:
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif path.name not in _LARGE:
            yield from _files(path)


def push(folder: pathlib.Path) -> None:
    """Copies the files of a mirror to its bucket; nothing for other folders."""
    there = home(folder)
    if there is folder:
        return
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in _OWN:
            (there / path.relative_to(folder).as_posix()).write_bytes(path.read_bytes())


def push_file(path: pathlib.Path) -> None:
    """Copies a file of a mirror to its bucket; nothing for other folders.

    Raises:
      ValueError: the bucket cannot be written.
    """
    if address := shown(path):
        with _guarded(address, "written"):
            epath.Path(address).write_bytes(path.read_bytes())
