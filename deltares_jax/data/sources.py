"""Where documents come from: each source lists its files in a fixed order, as parts of work.

A part is the unit that is prepared in one go, into one shard a split: a file that holds many
documents, or a run of small files.
"""

import dataclasses
import glob
import hashlib
import os
import pathlib
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Sequence

from deltares_jax.data import documents, hub

# Folders of the standard library that hold tests, other people's code or no source text.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_VENDORED = {"_vendor", "_bundled", "ensurepip"}

SPLITS = ("train", "validation")
FINEWEB_EDU = "fineweb_edu"
_FINEWEB_REPOSITORY = "HuggingFaceFW/fineweb-edu"
# The sample whose last file is held out; elsewhere documents are, by their name.
_HELD_OUT = {"sample-10BT": "013_"}
_GROUP_BYTES = 1 << 28  # of files with one document each


@dataclasses.dataclass(frozen=True)
class File:
    """An input file: its name in the source, its size in bytes, and where it is."""

    name: str
    size: int
    where: pathlib.Path | hub.RemoteFile


@dataclasses.dataclass(frozen=True)
class Part:
    """Files that become one shard a split; `split` is empty where documents decide."""

    number: int
    files: tuple[File, ...]
    split: str = ""


@dataclasses.dataclass(frozen=True)
class Source:
    """Everything that is read, and how documents are held out.

    Attributes:
      name: as `data.source` gives it.
      revision: of the repository or interpreter; empty for files.
      parts: in the order of the text.
      column: that holds the text, for files of records.
      id_column: that names documents; empty for file and number of the record.
      held_out: one document in this many goes to validation, by the hash of its name.
      notes: what the user should know of what was left out.
    """

    name: str
    revision: str
    parts: tuple[Part, ...]
    column: str = "text"
    id_column: str = ""
    held_out: int = 20
    notes: tuple[str, ...] = ()

    def split(self, part: Part, document: str) -> str:
        """The split of a document."""
        if part.split:
            return part.split
        digest = hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()
        return SPLITS[int.from_bytes(digest[:8], "big") % self.held_out == 0]


def py_stdlib_version() -> str:
    """The interpreter whose standard library is read, for example `cpython-3.11.7`."""
    return f"{platform.python_implementation().lower()}-{platform.python_version()}"


def py_stdlib() -> Source:
    """The `.py` files of the running interpreter's standard library, sorted by path.

    Tests and vendored folders are left out; every 20th file, by the hash of its path, is held out.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if (_SKIPPED | _VENDORED).isdisjoint(name.parts[:-1]) and path.is_file():
            files.append(File(name.as_posix(), path.stat().st_size, path))
    if not files:
        raise ValueError(
            f"py_stdlib: no .py files under {root}; this interpreter comes without its sources, "
            "use one that has them"
        )
    files.sort(key=lambda file: file.name)
    return Source("py_stdlib", py_stdlib_version(), _parts(files))


def text(paths: Sequence[str], column: str) -> Source:
    """Files of your own: folders (searched through), files or globs, in the order given.

    `.txt` is one document a file; `.jsonl`, `.jsonl.gz`, `.jsonl.zst` one a line, and `.parquet`
    one a row, with the text in `column`. One document in 20 is held out, by the hash of its name.

    Raises:
      ValueError: a path holds no such file or cannot be read, or a file comes twice.
    """
    files: dict[pathlib.Path, File] = {}
    others: list[pathlib.Path] = []
    known = ", ".join(documents.SUFFIXES)
    for pattern in paths:
        if not pattern:  # which would be the working folder
            raise ValueError(f"--path={','.join(paths)} has a comma too many")
        root = pathlib.Path(os.path.expanduser(pattern))
        matches = [root]
        if not root.exists():  # a name that exists may hold the letters of a glob
            matches = sorted(map(pathlib.Path, glob.glob(str(root), recursive=True)))
            root = pathlib.Path(re.split(r"[*?\[]", str(root))[0] + "x").parent
        elif root.is_file():
            root = root.parent
        wrong = [p for p in matches if p.is_file() and not p.name.endswith(documents.SUFFIXES)]
        if wrong:
            raise ValueError(f"--path={pattern}: {wrong[0]} must end in one of {known}")
        # Once each: ** gives folders and what is in them.
        every = dict.fromkeys(path for match in matches for path in _files_of(match))
        found = [path for path in every if path.name.endswith(documents.SUFFIXES)]
        others += [path for path in every if not path.name.endswith(documents.SUFFIXES)]
        if not found:
            raise ValueError(f"--path={pattern} holds no files that end in {known}")
        for path in found:
            if path.resolve() in files:
                raise ValueError(f"--path={','.join(paths)} names {path} twice")
            name = path.relative_to(root).as_posix()
            files[path.resolve()] = File(name, path.stat().st_size, path.absolute())
    notes = []
    if others:
        count, first = len(others), others[0]
        notes.append(f"left out under --path: {count} of other kinds or linked, such as {first}")
    return Source("text", "", _parts(list(files.values())), column, notes=tuple(notes))


def _files_of(match: pathlib.Path) -> list[pathlib.Path]:
    """The files in a folder, sorted, and links that are not followed; a file as it is."""
    if not match.is_dir():
        return [match]

    def refuse(error: OSError) -> None:
        raise ValueError(f"--path: {error.filename} cannot be read: {error.strerror}")

    found = []
    for folder, folders, names in os.walk(match, onerror=refuse):
        linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [pathlib.Path(folder, name) for name in names + linked]
    return sorted(found)


def fineweb_edu(
    config: str, path: str = "", revision: str = "main", numbers: Sequence[range] = ()
) -> Source:
    """Parquet files of FineWeb-Edu, from the hub or from a local folder of them.

    File 013 of sample-10BT is held out, and always read; of other configs one document in 100, by
    the hash of its id.

    Args:
      config: `sample-10BT`, `sample-100BT`, `sample-350BT`, `default`, or a crawl such as
        `CC-MAIN-2024-10`.
      path: a local folder; the hub when empty.
      revision: branch, tag or commit of the hub's repository.
      numbers: which files, counted from 0; all when empty.

    Raises:
      ValueError: there are no such files, or the hub does not answer.
    """
    if not re.fullmatch(r"sample-(10|100|350)BT|default|CC-MAIN-\d{4}-\d{2}", config):
        raise ValueError(
            f"--source={FINEWEB_EDU}/{config} must be {FINEWEB_EDU}/ and sample-10BT, "
            "sample-100BT, sample-350BT, default, or a crawl such as CC-MAIN-2024-10"
        )
    sample = config.removeprefix("sample-")
    folder = f"sample/{sample}" if sample != config else f"data/{config}"
    folder = "data" if config == "default" else folder
    if path:
        root = pathlib.Path(os.path.expanduser(path)).absolute()
        whole = [name for name in ("data", "sample") if (root / name).is_dir()]
        if (root / folder).is_dir():
            root /= folder
        elif whole:  # the repository, of which other files are another config
            raise ValueError(f"--path={path} holds {whole[0]}/, but no {folder}/ for {config}")
        files = [
            File(p.relative_to(root).as_posix(), p.stat().st_size, p)
            for p in sorted(root.rglob("*.parquet"))
        ]
        revision = ""
    else:
        files = [
            File(remote.path, remote.size, remote)
            for remote in hub.list_files(_FINEWEB_REPOSITORY, revision, folder)
            if remote.path.endswith(".parquet")
        ]
    if not files:
        raise ValueError(f"fineweb_edu/{config}: no .parquet files under {path or folder}")
    held_out = _HELD_OUT.get(config)

    def split(file: File) -> str:
        if not held_out:
            return ""
        return SPLITS[pathlib.PurePosixPath(file.name).name.startswith(held_out)]

    chosen = _chosen(files, numbers, lambda file: split(file) == SPLITS[1])
    parts = tuple(Part(number, (file,), split(file)) for number, file in enumerate(chosen))
    return Source(f"{FINEWEB_EDU}/{config}", revision, parts, "text", "id", 100)


def select(source: Source, numbers: Sequence[range]) -> Source:
    """A source with some of its files, counted from 0."""
    files = [file for part in source.parts for file in part.files]
    return dataclasses.replace(source, parts=_parts(_chosen(files, numbers, lambda file: False)))


def _chosen(
    files: list[File], numbers: Sequence[range], always: Callable[[File], bool]
) -> list[File]:
    last = max((span.stop - 1 for span in numbers), default=-1)
    if last >= len(files):
        raise ValueError(
            f"--files asks for file {last}, but there are {len(files)}: 0-{len(files) - 1}"
        )
    wanted = {number for span in numbers for number in span}
    return [f for i, f in enumerate(files) if not wanted or i in wanted or always(f)]


def _parts(files: Iterable[File]) -> tuple[Part, ...]:
    groups: list[list[File]] = []
    room = 0
    for file in files:
        records = file.name.endswith(documents.SUFFIXES[1:])  # of which it holds many
        if records or room <= 0:
            groups.append([])
            room = _GROUP_BYTES
        groups[-1].append(file)
        room = 0 if records else room - file.size
    return tuple(Part(number, tuple(group)) for number, group in enumerate(groups))
