"""The manifest of a prepared data set: what it holds, of what, with checksums."""

import hashlib
import json
import os
import pathlib
import re
from typing import Any

from deltares_jax import config as config_lib
from deltares_jax.data import packing, sources

MANIFEST = "manifest.json"
_KEYS = {"source", "tokenizer", "tokenizer_sha256", "vocab_size", "end_of_text"}
_KEYS |= {"record_tokens", "splits", "shards", "fingerprint"}  # what readers need


def read(folder: pathlib.Path) -> dict[str, Any] | None:
    """The manifest of a prepared data set, or None where the folder holds none.

    Raises:
      ValueError: it is damaged.
    """
    path = folder / MANIFEST
    return parse(path) if path.is_file() else None


def parse(path: pathlib.Path) -> dict[str, Any]:
    """The manifest that a file holds.

    Raises:
      ValueError: it is damaged.
    """
    try:
        manifest = json.loads(path.read_text())
        missing = _KEYS - manifest.keys() if isinstance(manifest, dict) else _KEYS
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); remove the file and give the prepare command again"
        ) from None
    return manifest


def write_json(path: pathlib.Path, values: Any) -> None:
    """Writes JSON so that a reader sees the old or the new file, never a part."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(values, indent=2) + "\n")
    partial.replace(path)


def make(
    header: dict[str, Any],
    notes: list[dict[str, Any]],
    shards: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """The manifest of a data set.

    Args:
      header: source, tokenizer and what else was asked for.
      notes: of the parts, in order.
      shards: of each split, in order.
    """
    manifest = {**header, "record_tokens": packing.RECORD_TOKENS, "splits": {}, "shards": shards}
    for split in sources.SPLITS:
        counts = [note["counts"][split] for note in notes if split in note["counts"]]
        total = {
            key: sum(count[key] for count in counts)
            for key in vars(packing.Counts())
            if key != "sha256"
        }
        digests = [count["sha256"] for count in counts if count["tokens"]]
        joined = hashlib.sha256("".join(digests).encode()).hexdigest()
        total["sha256"] = digests[0] if len(digests) == 1 else joined
        if total["tokens"]:
            manifest["splits"][split] = total
    manifest["fingerprint"] = _fingerprint(manifest)
    return manifest


def _fingerprint(manifest: dict[str, Any]) -> str:
    """Of what a model sees: the tokens in their order, and what they mean."""
    identity = {
        "tokenizer": manifest["tokenizer_sha256"],
        "end_of_text": manifest["end_of_text"],
        "splits": {s: [c["tokens"], c["sha256"]] for s, c in manifest["splits"].items()},
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def describe(manifest: dict[str, Any], name: str = "") -> list[str]:
    """One line a split: documents, bytes, tokens, and what was left out.

    Args:
      manifest: of a prepared data set.
      name: what the user calls it; its source when empty.
    """
    lines = []
    for split, count in manifest["splits"].items():
        odd = [
            f"{count[f'{kind}_documents']:,} {kind}"
            for kind in ("empty", "undecodable", "skipped")
            if count[f"{kind}_documents"]
        ]
        left_out = f" (and {', '.join(odd)})" if odd else ""
        lines.append(
            f"{name or manifest['source']} {split}: {count['documents']:,} documents{left_out}, "
            f"{count['bytes'] / 1e6:,.2f} MB, {count['tokens']:,} tokens, "
            f"sha256 {count['sha256'][:16]}…"
        )
    return lines


def folder_of(root: pathlib.Path, source: str, tokenizer: str) -> pathlib.Path:
    """Where a data set is kept below a folder of them, for training to find it by its names."""
    if source == "py_stdlib":
        source = f"{source}/{sources.py_stdlib_version()}"
    return root / source / re.sub(r"[^\w.-]+", "--", tokenizer).strip("-")


def root_of(data_dir: str) -> pathlib.Path:
    """The folder of prepared data sets that `data.dir` means."""
    path = pathlib.Path(data_dir).expanduser() if data_dir else config_lib.cache_folder() / "data"
    return path.absolute()
