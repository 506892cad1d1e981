"""Routing of one or several checkpoints on the same text: what is read, and the numbers of each."""

import math
import pathlib
from typing import Any, NamedTuple

import numpy as np
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config_checks
from deltares_jax.analysis import token_labels
from deltares_jax.data import dataset
from deltares_jax.data.rows import Rows
from deltares_jax.inference import knockout, measured, trained
from deltares_jax.models import readings
from deltares_jax.printing import say
from deltares_jax.training import signals
from deltares_jax.training import workdir as workdir_lib

MOST_TOKENS = 256  # of a text: a figure of more cannot be read


class Run(NamedTuple):
    """A checkpoint that was asked for, by a flag; nothing of it is loaded."""

    flag: str
    folder: pathlib.Path
    step: int
    config: FrozenConfigDict


class Asked(NamedTuple):
    """What to measure; see the flags of the command, and None and empty are their defaults."""

    tokens: int | None
    batch_size: int | None
    mesh: str
    text: str | None
    readers: list[str]
    knockout: bool
    data: str


class _Text(NamedTuple):
    ids: np.ndarray
    labels: list[str]
    readers: list[list[readings.Reader]]  # of each run


def find(given: list[tuple[str, str]], step: str, data: str = "") -> list[Run]:
    """The checkpoints that (flag, path) pairs name; the first is the one whose text all read.

    Args:
      given: the pairs.
      step: of the first, as for `trained.find`.
      data: a set in place of the first run's own, as for `eval.sets`.

    Raises:
      ValueError: one is not there or damaged, is named twice, or cannot read the first one's rows.
    """
    runs: list[Run] = []
    for flag, path in given:
        if runs and not path:
            raise ValueError(f"{flag}= is empty; name a run, or leave it out")
        try:
            folder, at = trained.find(path, "" if runs else step)
            config = trained.saved_config(folder, at)
        except ValueError as error:
            why = str(error).removeprefix(f"--workdir={path}: ")
            raise ValueError(f"{flag}={path}: {why}" if path else why) from None
        if data and not runs:
            config = trained.changed(config, {"eval.sets": data})
        if any((run.folder, run.step) == (folder, at) for run in runs):
            raise ValueError(f"{flag}={path}: step {at} of this run is named twice")
        runs.append(Run(f"{flag}={path}", folder, at, config))
    for run in runs[1:]:
        _check_comparable(runs[0].config, run.config, run.flag)
    return runs


def _check_comparable(main: FrozenConfigDict, other: FrozenConfigDict, flag: str) -> None:
    for key in ("seq_len", "document_masking"):
        if main.data[key] != other.data[key]:
            raise ValueError(
                f"{flag}: data.{key}={other.data[key]}, but {main.data[key]} of --workdir; only "
                "runs that read the same rows are compared"
            )
    if main.data.tokenizer != other.data.tokenizer and (
        trained.tokenizer(main).sha256 != trained.tokenizer(other).sha256
    ):
        raise ValueError(
            f"{flag}: data.tokenizer={other.data.tokenizer!r}, but {main.data.tokenizer!r} of "
            "--workdir; only runs that read the same tokens are compared"
        )
    if main.model.vocab_size > other.model.vocab_size:
        raise ValueError(
            f"{flag}: model.vocab_size={other.model.vocab_size} is below "
            f"{main.model.vocab_size} of --workdir; give that run as --workdir"
        )


def titles(runs: list[Run]) -> list[str]:
    """What figures call each run: variant, folder and step."""
    paths = [workdir_lib.shown(run.folder) for run in runs]
    short = [path if len(path) <= 30 else f"…{path[-29:]}" for path in paths]
    whole = len(set(short)) == len(set(paths))
    return [
        f"{run.config.model.residual.variant}, {path}@{run.step}"
        for run, path in zip(runs, short if whole else paths, strict=True)
    ]


def _open_text(runs: list[Run], asked: Asked) -> _Text | None:
    """The tokens of a text that was given, checked for every run."""
    if asked.text is None:
        return None
    config = runs[0].config
    tokenizer = trained.tokenizer(config)
    ids = tokenizer.encode_batch([asked.text.encode(errors="surrogateescape")])[0]
    most = min(config.data.seq_len, MOST_TOKENS)
    if not 1 <= len(ids) <= most:
        why = f"data.seq_len={most}" if most < MOST_TOKENS else "a figure of more cannot be read"
        raise ValueError(f"--text has {len(ids)} tokens; it must have 1 to {most} ({why})")
    return _Text(
        ids, token_labels.labels(tokenizer, ids), [_chosen(r, asked.readers) for r in runs]
    )


def _open_rows(config: FrozenConfigDict, asked: Asked) -> tuple[str, Rows]:
    """The first held-out set by name."""
    try:
        return next(iter(dataset.open_eval_sets(config).items()))
    except ValueError as error:
        raise ValueError(
            str(error).replace("eval.sets", "--data" if asked.data else "eval.sets")
        ) from None


def _chosen(run: Run, names: list[str]) -> list[readings.Reader]:
    there = {r.name: r for r in readings.readers(run.config.model) if r.sources}
    for name in names:
        if name not in there:
            known = list(there)
            which = f"{known[0]} … {known[-1]}" if known else "no reader routes"
            raise ValueError(
                f"--readers={name}{config_checks.nearest(name, known)}: no reader with sources in "
                f"{run.flag}: {which}"
            )
    if names:
        return [there[name] for name in names]
    choice = [r for r in there.values() if len(r.sources) > 1] or list(there.values())
    last = len(choice) - 1
    return [choice[place] for place in sorted({0, (last + 1) // 2, last})] if choice else []


def follow(runs: list[Run], asked: Asked) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Reads the text by every run.

    Args:
      runs: from `find`.
      asked: what to measure.

    Returns:
      What was read, the numbers of each run, and notes: what is not there, and why.

    Raises:
      ValueError: the text or the data are not as they must be.
      signals.Stop: numbers are not finite.
    """
    text = _open_text(runs, asked)
    main = runs[0].config
    name, rows = _open_rows(main, asked)
    T = main.data.seq_len
    tokens = main.eval.rows * T if asked.tokens is None else asked.tokens
    count = min(len(rows), -(-tokens // T) if tokens else len(rows))
    found, notes = [], []
    for number, (run, title) in enumerate(zip(runs, titles(runs), strict=True)):
        model = trained.load(run.folder, run.step, run.config, asked.mesh)
        say(model.describe())
        own = {
            "title": title,
            "workdir": workdir_lib.shown(run.folder),
            "step": run.step,
            "variant": run.config.model.residual.variant,
            "layers": run.config.model.num_layers,
            "residual": run.config.model.residual.to_dict(),
        }
        own |= _numbers(model, rows, count, asked, title)
        chosen = text.readers[number] if text else []
        if text and chosen:
            weights = measured.of_text(model, text.ids, [reader.name for reader in chosen])
            parts = [
                {
                    "name": reader.name,
                    "label": reader.label,
                    "sources": reader.sources,
                    "weights": weights[reader.name].tolist(),
                }
                for reader in chosen
            ]
            own["text"] = {"tokens": text.labels, "readers": parts}
        found.append(own)
        notes += _notes(own, run.config, main)
    read = {"set": name, "rows": count, "tokens": count * T, "seq_len": T}
    return read, found, notes


def _numbers(
    model: trained.Trained, rows: Rows, count: int, asked: Asked, title: str
) -> dict[str, Any]:
    batch_size = model.batch_size(min(asked.batch_size or model.config.eval.batch_size, count))
    numbers = measured.measure(model, rows, count, batch_size)
    values = [r[key] for r in numbers["readers"] for key in ("max_weight", "stream_norm")]
    if not all(math.isfinite(value) for value in values if value is not None):
        raise signals.Stop(f"{title}: routing is not finite", signals.NON_FINITE)
    if asked.knockout and any(reader["sources"] for reader in numbers["readers"]):
        tokens = count * model.config.data.seq_len
        numbers["knockout"] = knockout.run(model, rows, tokens, batch_size, numbers)
    return numbers


def _notes(own: dict[str, Any], config: FrozenConfigDict, main: FrozenConfigDict) -> list[str]:
    notes, title = [], own["title"]
    counts = [len(reader["sources"]) for reader in own["readers"]]
    if not any(counts):
        notes.append(f"{title}: nothing is routed; there is the norm of its stream alone")
    elif max(counts) == 1:
        notes.append(f"{title}: no reader has more than one source, so each weight is 1")
    if config.data.source != main.data.source or config.data.mixture != main.data.mixture:
        notes.append(f"{title}: trained on {config.data.mixture or config.data.source}")
    return notes
