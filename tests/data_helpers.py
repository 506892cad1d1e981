"""What the tests of the data share."""

import pathlib
import types

import numpy as np

from deltares_jax.data import build, sources, tokens

END = 256
RECORD = 4096


def use_library(monkeypatch, root: pathlib.Path):
    """Makes `root` the standard library that is read."""
    paths = types.SimpleNamespace(get_paths=lambda: {"stdlib": str(root)})
    monkeypatch.setattr(sources, "sysconfig", paths)


def write_files(root: pathlib.Path, files: dict[str, bytes]):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def stream_of(documents: list[bytes]) -> np.ndarray:
    """Byte tokens with end-of-text after each document, by other code than the package's."""
    parts = [np.array([*text, END], np.uint16) for text in documents]
    return np.concatenate(parts)


def prepare_files(out: pathlib.Path, *paths: pathlib.Path, tokenizer=None, **kwargs) -> dict:
    """Prepares files of one's own; the manifest."""
    source = sources.text([str(path) for path in paths], kwargs.pop("column", "text"))
    return build.prepare(source, tokenizer or tokens.ByteTokenizer(), out, **kwargs)


def flat(batches, key: str = "row") -> list[int]:
    return np.concatenate([batch[key] for batch in batches]).tolist()


def take(iterator, count: int) -> list[dict[str, np.ndarray]]:
    return [next(iterator) for _ in range(count)]


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """All files of a folder by their path in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
