"""Figures of where one run routes: its weights, those at each token of a text, and knock-outs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from deltares_jax.models.readings import label

matplotlib.use("agg")  # no display is needed

Run = dict[str, Any]  # a run's numbers, with `title` and `variant`
_CELL = 0.17  # inches of a labelled row or column
_FEW = 10  # columns, so that weights are also written
_SMALL = 7  # points, of the labels of readers, sources and tokens
_NOT_THERE = "0.9"  # grey of what a reader does not have
_KEPT = {
    "output": "output of a sublayer",
    "stream": "stream after a sublayer",
    "delta": "change of the stream over a block",
    "sum": "sum of a block's outputs",
    "change": "what a block appends",
}


class Plot(NamedTuple):
    """A figure: `name` of its file, `title` and `caption` of its section."""

    name: str
    title: str
    caption: str
    figure: Figure


def _named_rows(axes: Any, names: list[str], name: str = "") -> None:
    axes.set_yticks(range(len(names)), names, fontsize=_SMALL)
    axes.set_ylabel(name)


def _named_columns(axes: Any, names: list[str], name: str = "") -> None:
    axes.set_xticks(range(len(names)), names, fontsize=_SMALL, rotation=90)
    axes.set_xlabel(name)


def kind_of_source(run: Run) -> str:
    """What the sources of a run hold, for people."""
    names = [source for reader in run["readers"] for source in reader["sources"]]
    kinds = {"output" if (end := n.split(".")[-1]) == "out" else end for n in names if "." in n}
    if not kinds:
        return "source"
    kind = kinds.pop()
    return f"source ({_KEPT.get(kind, kind)})"


def _weights(axes: Any, matrix: np.ndarray, annotated: bool) -> Any:
    cells = np.ma.masked_invalid(matrix)
    axes.set_facecolor(_NOT_THERE)
    image = axes.imshow(cells, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="none")
    if annotated:
        for (row, column), value in np.ndenumerate(matrix):
            if np.isfinite(value):
                colour = "black" if value > 0.6 else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour,
                          fontsize=6)  # fmt: skip
    return image


def heat_map(run: Run, suffix: str) -> Plot:
    """Mean weights, readers × sources; `suffix` ends the name of the file."""
    readers = [reader for reader in run["readers"] if reader["sources"]]
    columns = [name for name in run["order"] if any(name in r["sources"] for r in readers)]
    matrix = np.full((len(readers), len(columns)), np.nan)
    for row, reader in enumerate(readers):
        for name, weight in zip(reader["sources"], reader["weights"], strict=True):
            matrix[row, columns.index(name)] = weight
    wide = 0.42 if len(columns) <= _FEW else _CELL
    size = (max(5.2, 2.6 + wide * len(columns)), max(3.2, 1.9 + _CELL * len(readers)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    image = _weights(axes, matrix, len(columns) <= _FEW)
    _named_rows(axes, [reader["label"] for reader in readers], "reader")
    _named_columns(axes, [label(name) for name in columns], kind_of_source(run))
    axes.set_title(run["title"], fontsize=8)
    shrink = min(1.0, 3.0 / size[1])
    figure.colorbar(image, ax=axes, label="mean weight", shrink=shrink, anchor=(0, 1))
    caption = (
        "Each row is a reader; its weights sum to 1. Grey: the reader has no such source. Layers "
        "and blocks are counted from 0."
    )
    return Plot(f"weights{suffix}", f"Mean weights: {run['title']}", caption, figure)


def text(run: Run, suffix: str) -> Plot:
    """Weights at each token, tokens × sources, a panel for each reader."""
    tokens, parts = run["text"]["tokens"], run["text"]["readers"]
    columns = [len(part["sources"]) for part in parts]
    widths = [max(1.1, (0.42 if max(columns) <= _FEW else _CELL) * count) for count in columns]
    size = (1.8 + sum(widths) + 0.4 * len(parts), max(3.2, 2.0 + _CELL * len(tokens)))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(parts), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, part in zip(panels, parts, strict=True):
        image = _weights(axes, np.asarray(part["weights"]).T, max(columns) <= _FEW)
        _named_columns(axes, [label(name) for name in part["sources"]])
        axes.set_title(part["label"], fontsize=8)
    _named_rows(panels[0], tokens, "token read")
    figure.colorbar(image, ax=panels, label="weight", shrink=min(1.0, 3.0 / size[1]), anchor=(0, 1))
    figure.suptitle(run["title"], fontsize=9)
    caption = "Weights of some readers at each token of the text that was given."
    return Plot(f"text{suffix}", f"Routing of a text: {run['title']}", caption, figure)


def _bars(name: str, title: str, caption: str, rows: list[dict[str, Any]], beside: str) -> Plot:
    size = (7.5, max(2.8, 1.5 + _CELL * len(rows)))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=9)
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    left.barh(places, [row["beside"] or 0.0 for row in rows], color="C0")
    right.barh(places, [row["difference"] for row in rows], color="C3")
    right.axvline(0, color="0.3", lw=0.8)
    left.set_xlabel(beside)
    right.set_xlabel("held-out loss without it − with it, nats")
    _named_rows(left, [row["label"] for row in rows])
    left.set_ylim(len(rows) - 0.4, -0.6)
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="x")
        axes.xaxis.get_major_locator().set_params(nbins=4)
        axes.ticklabel_format(axis="x", scilimits=(-3, 4))
    return Plot(name, title, caption, figure)


def knockouts(run: Run, suffix: str) -> Iterator[Plot]:
    """Losses without one source and without one reader, beside what they weigh."""
    title = run["title"]
    yield _bars(
        f"knockout_sources{suffix}",
        f"Without one source: {title}",
        "The source is taken from all readers, whose other weights are renormalised. Left: its "
        "mean weight over the readers that have it.",
        run["knockout"]["sources"],
        "mean weight",
    )
    yield _bars(
        f"knockout_readers{suffix}",
        f"Without one reader: {title}",
        "The sublayer reads the plain stream, as in the baseline. Left: norm of the reader's "
        "routed term over that of the stream, or nothing where no stream is kept.",
        run["knockout"]["readers"],
        "routed term / stream",
    )
