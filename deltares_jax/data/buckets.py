"""Prepared data sets in a bucket: copied whole to the cache folder, once a machine, and checked.

Records are read by their place in a file, which array_record does in local files alone.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import pathlib
from typing import Any

import fsspec

from deltares_jax import config as config_lib
from deltares_jax.data import manifest, parts, progress
from deltares_jax.printing import one_line

_NEEDS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}  # a module, and the extra that brings it


def fetch(asked: str, address: str) -> pathlib.Path:
    """The local copy of the data set at an address, made if need be.

    Args:
      asked: who names it, for errors.
      address: of its folder.

    Raises:
      ValueError: there is none, it cannot be read, or what came is not what its manifest lists.
    """
    files = _Files(asked, address)
    text = files.read(manifest.MANIFEST)
    folder = config_lib.cache_folder() / "buckets" / hashlib.sha256(text).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("a") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / manifest.MANIFEST).exists():
                _copy(files, text, folder)
    except OSError as error:
        raise ValueError(f"{asked}: {address} cannot be copied to {folder}: {error}") from None
    return folder


def holds(asked: str, address: str) -> bool:
    """Whether the folder at an address is a data set itself.

    Raises:
      ValueError: the bucket cannot be read.
    """
    return manifest.MANIFEST in _Files(asked, address).sizes()


def require(asked: str, address: str) -> str:
    """The scheme of an address, `gs` or `s3`, whose package is there.

    Raises:
      ValueError: it is not installed.
    """
    scheme = address.split("://")[0]
    module, extra = _NEEDS[scheme]
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{asked}: {address} needs {module}: pip install 'deltares-jax[{extra}]'")
    logging.getLogger(module).setLevel(logging.CRITICAL)  # else tracebacks of what is tried again
    return scheme


class _Files:
    """The files of a folder in a bucket."""

    def __init__(self, asked: str, address: str):
        self.asked, self.address = asked, address.rstrip("/")
        scheme = require(asked, address)
        self._system: Any = self._guarded(
            lambda: fsspec.filesystem(scheme, use_listings_cache=False)
        )

    def _guarded(self, function: Any) -> Any:
        try:
            return function()
        except FileNotFoundError:
            raise
        except Exception as error:  # of credentials, network and rights: of many types
            raise ValueError(
                f"{self.asked}: {self.address} cannot be read: {one_line(error)}"
            ) from error

    def read(self, name: str) -> bytes:
        """All of a file that has to be there."""
        try:
            return self._guarded(lambda: self._system.cat_file(f"{self.address}/{name}"))
        except FileNotFoundError:
            raise ValueError(
                f"{self.asked}: {self.address} holds no prepared data set ({name} is missing)"
            ) from None

    def sizes(self) -> dict[str, int]:
        """The files by name, and their bytes; empty where there is no such folder."""
        try:
            listed = self._guarded(lambda: self._system.ls(self.address, detail=True))
        except FileNotFoundError:
            return {}
        return {
            entry["name"].rsplit("/", 1)[-1]: entry["size"]
            for entry in listed
            if entry["type"] == "file"
        }

    def get(self, name: str, path: pathlib.Path) -> None:
        """Copies a file."""
        self._guarded(lambda: self._system.get_file(f"{self.address}/{name}", str(path)))


def _copy(files: _Files, text: bytes, folder: pathlib.Path) -> None:
    """Copies a data set, its manifest last, so that a folder with one is whole."""
    partial = folder / f"{manifest.MANIFEST}.{os.getpid()}.partial"
    partial.write_bytes(text)
    try:
        made = manifest.parse(partial)
    except ValueError as error:
        raise ValueError(f"{files.asked}: the manifest of {files.address}: {error}") from None
    shards = {s["file"]: s for split in made["shards"].values() for s in split}
    sizes = {n: s for n, s in files.sizes().items() if not n.startswith(".")} | {
        name: shard["size"] for name, shard in shards.items()
    }
    del sizes[manifest.MANIFEST]
    progress.note(f"copying {files.address}, {sum(sizes.values()) / 1e6:,.1f} MB, to {folder}")
    for name in sizes:
        path = folder / name
        if name in shards and not parts.shard_fault(path, shards[name]):
            continue  # by a copy that was interrupted
        try:
            files.get(name, path)
        except FileNotFoundError:
            path.unlink(missing_ok=True)
        if name in shards and (fault := parts.shard_fault(path, shards[name])):
            raise ValueError(f"{files.asked}: {files.address}: {fault}; copy it there again")
    partial.replace(folder / manifest.MANIFEST)
