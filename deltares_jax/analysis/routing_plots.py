"""Figures of where readers route, from the numbers of `inference.measured`; runs on one axis."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deltares_jax.analysis import run_plots
from deltares_jax.analysis.run_plots import Plot, Run, kind_of_source
from deltares_jax.models.readings import BINS


def all_plots(runs: list[Run]) -> Iterator[Plot]:
    """Every figure that the numbers allow; those of one run after those on common axes."""
    routed = [run for run in runs if any(reader["sources"] for reader in run["readers"])]
    if routed:
        yield _max_weight(routed)
        if any(run["histogram"] for run in routed):
            yield _histogram([run for run in routed if run["histogram"]])
        if any(run["cosines"] for run in routed):
            yield _cosines([run for run in routed if run["cosines"]])
    yield _norms(runs)
    if routed:
        yield _by_depth(routed)
    for number, run in enumerate(runs):
        suffix = f"_{number}" if len(runs) > 1 else ""
        if run in routed:
            yield run_plots.heat_map(run, suffix)
        if run.get("text"):
            yield run_plots.text(run, suffix)
        if run.get("knockout"):
            yield from run_plots.knockouts(run, suffix)


def _points(run: Run, key: str) -> tuple[list[float], list[float]]:
    """By depth; a line through them is broken where the number is not defined."""
    if all(r[key] is None for r in run["readers"]):
        return [], []
    values = [np.nan if r[key] is None else r[key] for r in run["readers"]]
    return [r["depth"] for r in run["readers"]], values


def _line(axes: Any, run: Run, colour: str, key: str) -> None:
    """A number by depth; hollow where a reader has a single source."""
    depths, values = _points(run, key)
    axes.plot(depths, values, "-", color=colour, lw=1.2, label=run["title"])
    known = [r for r in run["readers"] if r[key] is not None]
    for kind, marker in (("attn", "o"), ("mlp", "s"), ("final", "D")):
        for alone, face in ((False, colour), (True, "white")):
            some = [
                r for r in known
                if r["name"].endswith(kind) and (len(r["sources"]) == 1) == alone
            ]  # fmt: skip
            axes.plot([r["depth"] for r in some], [r[key] for r in some], marker, color=colour,
                      mfc=face, ms=3.5, lw=0)  # fmt: skip


def _finish_depth(axes: Any, ylabel: str, runs: list[Run]) -> None:
    deepest = max(reader["depth"] for run in runs for reader in run["readers"])
    axes.set_xlim(-0.5, deepest + 0.5)
    axes.set(xlabel="layer (attention at l, MLP at l + ½)", ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def _legend(figure: Figure, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", frameon=False, fontsize=8)


def _coloured(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    for number, run in enumerate(runs):
        yield run, f"C{number % 10}"


_MARKS = "Circles: attention, squares: MLP, diamonds: the last read. Hollow: a reader of one source"


def _max_weight(runs: list[Run]) -> Plot:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for run, colour in _coloured(runs):
        _line(axes, run, colour, "max_weight")
        known = [r for r in run["readers"] if r["sources"]]
        equal = [1 / len(r["sources"]) for r in known]
        axes.plot([r["depth"] for r in known], equal, ":", color=colour, lw=1)
    axes.set_ylim(0, 1.03)
    _finish_depth(axes, "largest weight of a token, mean", runs)
    _legend(figure, axes)
    caption = (
        f"{_MARKS}, whose weight is always 1. Dotted: 1/S, the value of equal weights on S "
        "sources; a reader near it does not choose."
    )
    return Plot("max_weight", "Largest weight by depth", caption, figure)


def _histogram(runs: list[Run]) -> Plot:
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.add_subplot()
    edges = np.linspace(0, 1, BINS + 1)
    for run, colour in _coloured(runs):
        counts = np.asarray(run["histogram"])
        axes.stairs(100 * counts / counts.sum(), edges, color=colour, lw=1.3, label=run["title"])
    axes.set(xlabel="largest weight", ylabel=f"% of tokens, in bins of {1 / BINS:g}", xlim=(0, 1))
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    caption = "Over all tokens and all readers with at least two sources."
    return Plot("histogram", "Histogram of the largest weights", caption, figure)


def _cosines(runs: list[Run]) -> Plot:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for run, colour in _coloured(runs):
        x, mean, low, high = (
            [row[key] for row in run["cosines"]]
            for key in ("distance", "mean", "lowest", "highest")
        )
        axes.plot(x, mean, "o-", color=colour, ms=3.5, lw=1.2, label=run["title"])
        axes.vlines(x, low, high, color=colour, lw=4, alpha=0.2)
    axes.axhline(0, color="0.5", lw=0.8)
    axes.set_xlim(left=0)
    axes.set(xlabel="distance in layers", ylabel="cosine similarity of two sources")
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    caption = (
        "Sources that some reader reads, the embedding at depth 0; mean over tokens, then over the "
        "pairs of a distance. Bars: from the lowest to the highest pair."
    )
    return Plot("cosine", "Cosine similarity of sources by distance", caption, figure)


def _norms(runs: list[Run]) -> Plot:
    figure = Figure(figsize=(max(6.5, 1 + 3.6 * len(runs)), 4.4), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    named: dict[str, Any] = {}
    for axes, run in zip(panels, runs, strict=True):
        kind = f"\n{kind_of_source(run)}" if run["sources"] else ""
        lines = {
            "stream": (*_points(run, "stream_norm"), "C0.-"),
            "routed": (*_points(run, "routed_norm"), "C2.--"),
            "sources": (
                [source["depth"] for source in run["sources"]],
                [source["norm"] for source in run["sources"]],
                "C1o",
            ),
        }
        for name, (depths, values, style) in lines.items():
            if depths:
                named[name] = axes.plot(depths, values, style, ms=4, mfc="none")[0]
        axes.set_yscale("log")
        _finish_depth(axes, "", [run])
        axes.set_title(f"{run['title']}{kind}", fontsize=7)
    figure.legend(
        named.values(), named.keys(), loc="outside upper left", frameon=False, fontsize=8, ncols=3
    )
    panels[0].set_ylabel("Euclidean norm over the width, mean")
    caption = (
        "Stream: beside each reader (the running sum of a block with attnres_block; attnres_full "
        "keeps none). Routed: what the reader adds to the stream, or the mix where the sublayer "
        "reads that alone. Sources: where they are made, the embedding at 0. Logarithmic."
    )
    return Plot("norms", "Norms of stream, routed term and sources by depth", caption, figure)


def _by_depth(runs: list[Run]) -> Plot:
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    panels = figure.subplots(2, 2).flat
    shown = (
        ("entropy", "entropy / that of equal weights"),
        ("effective_sources", "effective number of sources"),
        ("embedding_weight", "weight on the embedding"),
        ("routed_ratio", "norm of routed term / stream"),
    )
    for axes, (key, name) in zip(panels, shown, strict=True):
        for run, colour in _coloured(runs):
            _line(axes, run, colour, key)
        _finish_depth(axes, name, runs)
        if not any(_points(run, key)[0] for run in runs):
            axes.text(0.5, 0.5, "not defined", ha="center", va="center", transform=axes.transAxes)
        axes.set_ylim(0, 1.03 if key in ("entropy", "embedding_weight") else None)
    _legend(figure, figure.axes[0])
    caption = (
        f"{_MARKS}. Means over tokens. Entropy is not defined for one source, the ratio not where "
        "no stream is kept; what is not defined is left out."
    )
    return Plot("by_depth", "Other numbers by depth", caption, figure)
