"""Prepares data sets: documents to tokens to records, recorded with TFDS as array_record.

A prepared data set is a folder that TFDS reads without TensorFlow, with our own `manifest.json`
beside the records: source, tokenizer, counts per split and a fingerprint. It is made aside and
renamed with its manifest, so several processes may prepare it at once; a folder without a manifest
is prepared again.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from deltares_jax.data import sources, tokens

MANIFEST = "manifest.json"
_VERSION = "1.0.0"


class PyStdlib(tfds.core.GeneratorBasedBuilder):
    """The running interpreter's standard library as records of byte tokens."""

    VERSION = tfds.core.Version(_VERSION)
    name = "py_stdlib"
    BUILDER_CONFIGS = [  # noqa: RUF012 - the form that TFDS asks for
        tfds.core.BuilderConfig(name=f"{sources.py_stdlib_version()}-byte")
    ]

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.counts = {split: tokens.Counts() for split in sources.SPLITS}

    def _info(self) -> tfds.core.DatasetInfo:
        record = tfds.features.Tensor(
            shape=(tokens.RECORD_TOKENS,),
            dtype=np.uint16,
            encoding=tfds.features.Encoding.BYTES,  # a varint per token is 20 times slower to read
        )
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"tokens": record}),
            disable_shuffling=True,  # the order of the text is the order of the records
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, Any]]]:
        files = sources.py_stdlib_files()
        return {split: self._generate_examples(split, files[split]) for split in files}

    def _generate_examples(
        self, split: str, paths: list[pathlib.Path]
    ) -> Iterator[tuple[int, Any]]:
        documents = sources.read_files(paths)
        packed = tokens.pack(documents, tokens.ByteTokenizer(), self.counts[split])
        for number, record in enumerate(packed):
            yield number, {"tokens": record}


def read_manifest(folder: pathlib.Path) -> dict[str, Any] | None:
    """The manifest of a prepared data set, or None where the folder holds none."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text())
        if not isinstance(manifest, dict) or "fingerprint" not in manifest:
            raise ValueError("it holds no fingerprint")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); remove the folder to prepare it again"
        ) from None
    return manifest


def _write_manifest(folder: pathlib.Path, counts: dict[str, tokens.Counts]) -> dict[str, Any]:
    tokenizer = tokens.ByteTokenizer()
    manifest = {
        "source": "py_stdlib",
        "revision": sources.py_stdlib_version(),
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "record_tokens": tokens.RECORD_TOKENS,
        "splits": {split: dataclasses.asdict(count) for split, count in counts.items()},
    }
    text = json.dumps(manifest, sort_keys=True)
    manifest["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
    partial = folder / f"{MANIFEST}.{os.getpid()}.partial"
    partial.write_text(json.dumps(manifest, indent=2) + "\n")
    partial.replace(folder / MANIFEST)
    return manifest


def describe(manifest: dict[str, Any]) -> list[str]:
    """One line a split: files, bytes and sha256."""
    lines = []
    for split, count in manifest["splits"].items():
        lines.append(
            f"{manifest['source']} {split}: {count['documents']:,} files "
            f"(and {count['empty_documents']} empty), {count['bytes'] / 1e6:.2f} MB, "
            f"sha256 {count['sha256'][:16]}…"
        )
    return lines


def prepare_py_stdlib(cache: pathlib.Path) -> pathlib.Path:
    """Prepares `py_stdlib` under `cache` unless it is there; returns its folder.

    Raises:
      ValueError: the folder cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"data.dir={str(cache)!r} cannot be created: {error.strerror}") from None
    folder = cache / PyStdlib.name / PyStdlib.BUILDER_CONFIGS[0].name / _VERSION
    if read_manifest(folder) is not None:
        return folder
    if not os.access(cache, os.W_OK):
        raise ValueError(f"data.dir={str(cache)!r} is not writable")
    print(f"preparing py_stdlib under {folder}", file=sys.stderr)
    tfds.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="py_stdlib.partial.", dir=cache) as partial:
        builder = PyStdlib(data_dir=partial, file_format="array_record")
        with contextlib.redirect_stdout(io.StringIO()):  # it speaks of downloads; there are none
            builder.download_and_prepare()
        made = pathlib.Path(builder.data_path)
        _write_manifest(made, builder.counts)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if folder.exists() and read_manifest(folder) is None:
                shutil.rmtree(folder)
            made.rename(folder)
        except OSError as error:
            if read_manifest(folder) is None:  # else another process was faster
                raise ValueError(
                    f"data.dir={str(cache)!r}: {folder} cannot be written: {error.strerror}"
                ) from None
    return folder
