"""Files of a model hub over HTTP: listed, downloaded, resumed and checked.

The address is that of the environment variable HF_ENDPOINT; the paths are those of the Hugging Face
hub. What may pass (404 while a mirror catches up, 429, 5xx, a lost connection) is tried again with
growing pauses.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import requests

_PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds, between five attempts
_TIMEOUT = (10, 60)  # seconds, to connect and to receive something
_CHUNK = 1 << 16
_MAY_PASS = {404, 408, 429}  # and 5xx

Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file of a repository; sha256 is empty where the hub does not tell it."""

    path: str
    url: str
    size: int
    sha256: str


class _MayPassError(Exception):
    """Worth another attempt."""


def _endpoint() -> str:
    address = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"HF_ENDPOINT={address} must begin with http:// or https://")
    return address


def is_repository(name: str) -> bool:
    """Whether a name has the form of a hub id, OWNER/NAME."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None


def _attempts(url: str, attempt: Callable[[], Any]) -> Any:
    for number, pause in enumerate((*_PAUSES, None), start=1):
        try:
            return attempt()
        except (requests.RequestException, _MayPassError) as error:
            reason = str(error) if isinstance(error, _MayPassError) else _short(error)
            if pause is None:
                raise ValueError(
                    f"{url}: {reason}, {number} times; check the network, the address "
                    f"(HF_ENDPOINT={_endpoint()}) and the name, then give the same command again"
                ) from None
            print(
                f"{url}: {reason}; attempt {number + 1} of {len(_PAUSES) + 1} in {pause:g} s",
                file=sys.stderr,
            )
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _short(error: requests.RequestException) -> str:
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection was cut"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return type(error).__name__


def _get(url: str, start: int = 0) -> requests.Response:
    headers = {"Accept-Encoding": "identity"}  # lengths are then those of the files
    if start:
        headers["Range"] = f"bytes={start}-"
    response = requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT)
    if response.status_code in _MAY_PASS or response.status_code >= 500:
        raise _MayPassError(f"HTTP {response.status_code}")
    if not response.ok:
        hint = ""
        if response.status_code in (401, 403):
            hint = "; check the name: so the hub answers for what is not there or not public"
        raise ValueError(f"{url}: HTTP {response.status_code} {response.reason}{hint}")
    return response


def list_files(
    repository: str, revision: str, folder: str, kind: Literal["datasets", "models"] = "datasets"
) -> list[RemoteFile]:
    """The files of a repository below a folder, sorted by path.

    Raises:
      ValueError: the hub does not answer, or the folder holds no files.
    """
    base = f"{_endpoint()}/api/{kind}/{repository}/tree/{revision}/{folder}".rstrip("/")
    files_of = f"{_endpoint()}/{'' if kind == 'models' else f'{kind}/'}{repository}"
    url: str | None = f"{base}?recursive=true"
    files = []

    def page() -> tuple[list[dict[str, Any]], str | None]:
        with _get(str(url)) as response:
            try:
                return response.json(), response.links.get("next", {}).get("url")
            except ValueError:
                raise _MayPassError("the answer is no JSON") from None

    while url:
        entries, url = _attempts(url, page)
        for entry in entries:
            if entry["type"] == "file":
                path = entry["path"]
                files.append(
                    RemoteFile(
                        path,
                        f"{files_of}/resolve/{revision}/{path}",
                        entry["size"],
                        (entry.get("lfs") or {}).get("oid", "").removeprefix("sha256:"),
                    )
                )
    if not files:
        raise ValueError(f"{base} holds no files")
    return sorted(files, key=lambda file: file.path)


def download(file: RemoteFile, target: pathlib.Path, advance: Advance = lambda count: None) -> None:
    """Downloads a file, going on where an earlier attempt or run ended, and checks it.

    Args:
      file: what to fetch.
      target: where to.
      advance: is told the bytes that came in.

    Raises:
      ValueError: the hub does not answer, or sends something else than it listed.
    """
    partial = target.with_name(f"{target.name}.download")

    def attempt() -> None:
        have = partial.stat().st_size if partial.exists() else 0
        if have and have > file.size:  # also where the size is unknown
            partial.unlink()
            have = 0
        if have != file.size:
            _receive(file.url, partial, have, advance)
        _check(file, partial)
        partial.replace(target)

    if not target.exists():
        _attempts(file.url, attempt)


def _receive(url: str, partial: pathlib.Path, have: int, advance: Advance) -> None:
    with _get(url, have) as response:
        ranged = response.status_code == 206
        expected = int(response.headers.get("Content-Length", -1))
        received = 0
        with partial.open("ab" if ranged else "wb") as out:
            for chunk in response.iter_content(_CHUNK):
                out.write(chunk)
                received += len(chunk)
                advance(len(chunk))
        if received < expected:
            raise _MayPassError("the connection was cut")


def _check(file: RemoteFile, partial: pathlib.Path) -> None:
    size = partial.stat().st_size
    if size < file.size:
        raise _MayPassError(f"{size} of {file.size} bytes came")
    if size > file.size >= 0 or (file.sha256 and file_sha256(partial) != file.sha256):
        partial.unlink()
        raise _MayPassError("the sha256 is not the one that the hub lists")


def file_sha256(path: pathlib.Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_file(repository: str, name: str, folder: pathlib.Path) -> pathlib.Path:
    """A small file of a model's repository (revision main), downloaded to a folder once.

    Raises:
      OSError: the folder cannot be written.
      ValueError: the hub does not answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    if not target.exists():
        own = target.with_name(f"{name}.{os.getpid()}.partial")  # others may want it now, too
        url = f"{_endpoint()}/{repository}/resolve/main/{name}"
        download(RemoteFile(name, url, -1, ""), own)
        own.replace(target)
    return target
