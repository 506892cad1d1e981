"""Where documents come from: each source yields (name, bytes) per split, in a fixed order."""

import hashlib
import pathlib
import platform
import sysconfig
from collections.abc import Iterator

# Folders of the standard library that hold tests, other people's code or no source text.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_VENDORED = {"_vendor", "_bundled", "ensurepip"}
_VALIDATION_SHARE = 20

SPLITS = ("train", "validation")
SOURCES = ("py_stdlib",)


def py_stdlib_version() -> str:
    """The interpreter whose standard library is read, for example `cpython-3.11.7`."""
    return f"{platform.python_implementation().lower()}-{platform.python_version()}"


def py_stdlib_files() -> dict[str, list[pathlib.Path]]:
    """The `.py` files of the running interpreter's standard library by split, sorted by path.

    Tests and vendored folders are left out; every 20th file, by the hash of its path, is held out.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, list[pathlib.Path]] = {split: [] for split in SPLITS}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if (_SKIPPED | _VENDORED).isdisjoint(name.parts[:-1]) and path.is_file():
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            held_out = int.from_bytes(digest[:8], "big") % _VALIDATION_SHARE == 0
            files[SPLITS[held_out]].append(path)
    if not files["train"] or not files["validation"]:
        raise ValueError(
            f"py_stdlib: no .py files under {root}; this interpreter comes without its sources, "
            "use one that has them"
        )
    return files


def read_files(paths: list[pathlib.Path]) -> Iterator[tuple[str, bytes]]:
    """Yields (file name, content) in the given order."""
    for path in paths:
        yield path.name, path.read_bytes()
