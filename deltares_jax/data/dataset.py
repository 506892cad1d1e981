"""The data of a run: what `config.data` and `config.eval.sets` name, opened and checked."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import shlex
from typing import Any

from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config_checks
from deltares_jax.data import buckets, build, manifest, names, pipeline, sources, tokens
from deltares_jax.data.rows import Rows, TokenStream


class Dataset:
    """A prepared data set: its manifest, token streams and rows per split.

    Raises:
      ValueError: the folder holds none, or it is damaged.
    """

    def __init__(self, folder: pathlib.Path, seq_len: int, document_masking: bool = True):
        made = manifest.read(folder)
        if made is None:
            raise ValueError(
                f"{folder} holds no prepared data set ({manifest.MANIFEST} is missing)"
            )
        self.folder = folder
        self.manifest: dict[str, Any] = made
        self.streams = {split: TokenStream(folder, split, made) for split in made["splits"]}
        self.rows = {
            split: Rows(stream, seq_len, made["end_of_text"], document_masking)
            for split, stream in self.streams.items()
        }

    def split_rows(self, split: str) -> Rows:
        """The rows of a split.

        Raises:
          ValueError: it has none.
        """
        if split not in self.rows or not len(self.rows[split]):
            raise ValueError(f"{self.folder}: there is no text in split {split}")
        return self.rows[split]


@dataclasses.dataclass
class Data:
    """What a run reads.

    Attributes:
      parts: the data sets that it trains on, by the names that the config gives.
      weights: their shares of the rows.
      eval_sets: rows by name; the first drives what follows the held-out loss.
      seed: of the order of the rows.
      repeat: whether a source begins anew when it is used up.
    """

    parts: dict[str, Dataset]
    weights: list[float]
    eval_sets: dict[str, Rows]
    seed: int
    repeat: bool

    @property
    def fingerprint(self) -> str:
        """Of the tokens and their mixture."""
        prints = [part.manifest["fingerprint"] for part in self.parts.values()]
        if len(prints) == 1:
            return prints[0]
        whole = pipeline.whole_weights(self.weights)
        return hashlib.sha256(json.dumps([prints, whole]).encode()).hexdigest()

    @property
    def rows(self) -> list[Rows]:
        """The training rows of each source."""
        return [part.split_rows("train") for part in self.parts.values()]

    @functools.cached_property
    def order(self) -> pipeline.Order:
        """In which order they come."""
        return pipeline.Order(list(map(len, self.rows)), self.weights, self.seed, self.repeat)

    def share(self, name: str) -> float:
        """The share of a source in the rows."""
        return dict(zip(self.parts, self.weights, strict=True))[name] / sum(self.weights)

    def epochs(self, rows_seen: int) -> dict[str, tuple[int, int, int]]:
        """By source: completed epochs, rows of the next one that were seen, rows in all."""
        return {
            name: (*divmod(seen, len(rows)), len(rows))
            for name, seen, rows in zip(
                self.parts, self.order.seen(rows_seen), self.rows, strict=True
            )
        }

    def steps_left(self, rows_seen: int, batch_size: int) -> float:
        """Whole batches before the data ends; infinite where it repeats."""
        if self.repeat:
            return math.inf
        return max(0, (len(self.order) - rows_seen) // batch_size)

    def describe(self, rows_seen: int) -> list[str]:
        """What start-up says of the data."""
        lines = []
        for name, part in self.parts.items():
            lines += manifest.describe(part.manifest, name)
        for name, (epoch, seen, size) in self.epochs(rows_seen).items():
            share = f", {self.share(name):.2%} of the rows" if len(self.parts) > 1 else ""
            lines.append(
                f"{name}: next is row {seen + 1:,} of {size:,} in epoch {epoch + 1}{share}"
            )
            if self.eval_sets and "validation" not in self.parts[name].rows:
                lines.append(f"{name}: has no validation split to evaluate on")
        return lines


def open_data(config: FrozenConfigDict) -> Data:
    """The data that a config names; `py_stdlib` as bytes is prepared first if need be.

    Raises:
      ValueError: something is not prepared or damaged, or its vocabulary is larger than the
        model's.
    """
    data = config.data
    named = names.parse_mixture(data.mixture) or {data.source: 1.0}
    key = "data.mixture" if data.mixture else "data.source"
    parts = {name: _open(config, key, name) for name in named}
    _all_apart(data.mixture, parts)
    _one_tokenizer(key, list(parts.values()))
    opened = Data(parts, list(named.values()), {}, config.train.seed, data.repeat)
    for part in parts.values():
        part.split_rows("train")
    if config.eval.every:
        opened.eval_sets = _eval_sets(config, parts)
    return opened


def open_eval_sets(config: FrozenConfigDict) -> dict[str, Rows]:
    """The rows of `eval.sets` by name; without any, the validation splits of what it trains on.

    With sets of its own the training data need not be there.

    Raises:
      ValueError: something is not prepared or damaged, or there is no held-out text.
    """
    if config.eval.sets:
        return _eval_sets(config, {})
    data = config.data
    key = "data.mixture" if data.mixture else "data.source"
    named = names.parse_mixture(data.mixture) or {data.source: 1.0}
    found = _eval_sets(config, {name: _open(config, key, name) for name in named})
    if not found:
        raise ValueError(f"{', '.join(named)} has no validation split; name a set to evaluate on")
    return found


def _all_apart(mixture: str, parts: dict[str, Dataset]) -> None:
    """Refuses one data set by two names, whose rows would come twice an epoch."""
    folders: dict[pathlib.Path, str] = {}
    for name, part in parts.items():
        folder = part.folder.resolve()
        if folder in folders:
            raise ValueError(
                f"data.mixture={mixture!r} names {folder} twice, as {folders[folder]} and as {name}"
            )
        folders[folder] = name


def _one_tokenizer(key: str, opened: list[Dataset]) -> None:
    """Refuses data sets of two tokenizers; what a name stands for may change in the meantime."""
    for part in opened:
        if part.manifest["tokenizer_sha256"] != opened[0].manifest["tokenizer_sha256"]:
            raise ValueError(
                f"{key}: {part.folder} was prepared with another {part.manifest['tokenizer']!r} "
                f"(by its sha256) than {opened[0].folder}; prepare both with the same"
            )


def _eval_sets(config: FrozenConfigDict, parts: dict[str, Dataset]) -> dict[str, Rows]:
    named = names.parse_sets(config.eval.sets)
    if not named:
        held_out = {name: part.rows.get("validation") for name, part in parts.items()}
        return {name: rows for name, rows in held_out.items() if rows}
    opened = {name: _open(config, "eval.sets", at) for name, (at, _) in named.items()}
    _one_tokenizer("eval.sets", [*parts.values(), *opened.values()])
    return {name: part.split_rows(named[name][1]) for name, part in opened.items()}


def _open(config: FrozenConfigDict, key: str, name: str) -> Dataset:
    """The data set of a source's name, or in a folder, as `key` asks for it."""
    data = config.data
    asked = f"{key}={name!r}" if key == "data.source" else f"{key}: {name!r}"
    folder, source = _folder(config, asked, name)
    dataset = Dataset(folder, data.seq_len, data.document_masking)
    made = dataset.manifest
    if source and made["source"] != source:
        raise ValueError(
            f"{asked}, but data.dir={data.dir!r} holds {made['source']!r}; set one to the other, "
            "or data.dir to a folder of data sets"
        )
    moved = pathlib.Path(data.tokenizer).expanduser().exists() and (
        tokens.get_tokenizer(data.tokenizer).sha256 == made["tokenizer_sha256"]
    )
    if made["tokenizer"] != data.tokenizer and not moved:
        raise ValueError(
            f"{asked}: data.tokenizer={data.tokenizer!r}, but {folder} was prepared with "
            f"{made['tokenizer']!r}; set one to the other"
        )
    if made["vocab_size"] > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} must be at least {made['vocab_size']}, "
            f"the vocabulary of data.tokenizer={data.tokenizer!r}"
        )
    return dataset


def _folder(config: FrozenConfigDict, asked: str, name: str) -> tuple[pathlib.Path, str]:
    """Where a data set is, and the source that it must be of; empty where it may be any."""
    data = config.data
    if config_checks.in_bucket(name):
        return buckets.fetch(asked, name), ""
    if config_checks.in_bucket(data.dir):
        address = data.dir
        if not buckets.holds(asked, address):
            inside = manifest.folder_of(pathlib.Path(), name, data.tokenizer)
            address = f"{address.rstrip('/')}/{inside.as_posix()}"
        return buckets.fetch(asked, address), name
    folder = pathlib.Path(os.path.expanduser(name)).absolute()
    if (folder / manifest.MANIFEST).is_file():
        return folder, ""
    root = manifest.root_of(data.dir)
    if (root / manifest.MANIFEST).is_file():
        return root, name
    folder = manifest.folder_of(root, name, data.tokenizer)
    _prepare_or_refuse(config, asked, folder, name)
    return folder, name


def _prepare_or_refuse(
    config: FrozenConfigDict, asked: str, folder: pathlib.Path, source: str
) -> None:
    if manifest.read(folder) is not None:
        return
    tokenizer = config.data.tokenizer
    if source == "py_stdlib" and tokenizer == tokens.BYTE:
        try:
            build.prepare(sources.py_stdlib(), tokens.ByteTokenizer(), folder)
        except (ValueError, OSError) as error:
            root = manifest.root_of(config.data.dir)
            raise ValueError(f"data.dir={str(root)!r}: {error}") from None
        return
    if not re.fullmatch(rf"py_stdlib|text|{sources.FINEWEB_EDU}/.+", source):
        raise ValueError(
            f"{asked} is neither a folder of prepared data (with {manifest.MANIFEST}) nor one of "
            f"py_stdlib, text, {sources.FINEWEB_EDU}/CONFIG"
        )
    flags = f"--source={source} --tokenizer={shlex.quote(tokenizer)}"
    flags += " --path=YOUR_FILES" if source == "text" else ""
    flags += f" --out={shlex.quote(str(folder))}" if config.data.dir else ""
    raise ValueError(
        f"{asked} with data.tokenizer={tokenizer!r} is not prepared under {folder}; prepare it by: "
        f"python -m deltares_jax.data.prepare {flags}; to train at once use "
        "--config=configs/debug.py"
    )
