"""A folder with a report on routing: one HTML file without links to anything, figures, numbers."""

import base64
import csv
import html
import io
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import matplotlib

from deltares_jax.analysis import routing_plots
from deltares_jax.analysis.run_plots import Plot, Run

_NUMBERS = (
    ("max_weight", "largest weight"),
    ("entropy", "relative entropy"),
    ("effective_sources", "effective sources"),
    ("embedding_weight", "weight on embedding"),
    ("routed_ratio", "routed / stream"),
    ("routed_norm", "routed norm"),
    ("stream_norm", "stream norm"),
)
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; }
figure { margin: 1em 0; overflow-x: auto; } img { display: block; max-width: none; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 2px 10px; text-align: right;
border-bottom: 1px solid #ddd; } td:first-child, th:first-child { text-align: left; }
"""
_TERMS = """
A reader sits before each sublayer and weighs its sources by a softmax, token by token. All numbers
are means over the tokens of the text. Largest weight: of a token; 1/S for equal weights on S
sources. Relative entropy: −Σ a ln a over ln S, 1 for equal weights. Effective sources:
exp(−Σ a ln a). Norms are Euclidean, over the width. Routed: what the reader adds to the stream, or,
in variants whose sublayers read the mix alone, the mix.
"""


def _svg(plot: Plot) -> str:
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": plot.name}):
        plot.figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))


def _table(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(v)}</td>' for v in row)}</tr>\n" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}</table>\n"


def _page(runs: list[Run], plots: list[Plot], notes: list[str]) -> str:
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>Routing: {html.escape(runs[0]['title'])}</title>\n<style>{_STYLE}</style>\n"
        "</head>\n<body>\n<h1>Where each layer routes</h1>\n",
        _table(
            ("run", "variant", "step", "layers", "held-out tokens"),
            ((r["workdir"], r["variant"], r["step"], r["layers"], r["tokens"]) for r in runs),
        ),
        *(f"<p>{html.escape(note)}</p>\n" for note in notes),
        f"<p>{_TERMS}</p>\n",
    ]
    for plot in plots:
        title = html.escape(plot.title)
        parts.append(
            f'<h2 id="{plot.name}">{title}</h2>\n<figure>'
            f'<img alt="{title}" src="data:image/svg+xml;base64,{_svg(plot)}">\n'
            f"<figcaption>{html.escape(plot.caption)}</figcaption></figure>\n"
        )
    for run in runs:
        rows = ([r["label"], *(r[key] for key, _ in _NUMBERS)] for r in run["readers"])
        parts.append(
            f"<details><summary>Numbers of {html.escape(run['title'])}</summary>\n"
            f"{_table(('reader', *(name for _, name in _NUMBERS)), rows)}</details>\n"
        )
    return "".join(parts) + "</body>\n</html>\n"


def _write_csv(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _rows(runs: list[Run]) -> dict[str, list[dict[str, Any]]]:
    """The numbers as tables by name; `run` is the title."""
    tables: list[list[dict[str, Any]]] = [[] for _ in range(6)]
    readers, weights, sources, cosines, knockouts, tokens = tables
    for run in runs:
        own = {"run": run["title"]}
        sources += [own | source for source in run["sources"]]
        cosines += [own | row for row in run["cosines"]]
        for reader in run["readers"]:
            plain = {k: v for k, v in reader.items() if k not in ("sources", "weights")}
            readers.append(own | plain)
            weights += [
                own | {"reader": reader["name"], "source": source, "mean_weight": weight}
                for source, weight in zip(reader["sources"], reader["weights"], strict=True)
            ]
        for kind in ("sources", "readers"):
            knockouts += [
                own | {"kind": kind} | row for row in run.get("knockout", {}).get(kind, [])
            ]
        for reader in run.get("text", {}).get("readers", []):
            tokens += [
                own | {"reader": reader["name"], "source": source, "place": place, "weight": weight}
                for source, row in zip(reader["sources"], reader["weights"], strict=True)
                for place, weight in enumerate(row)
            ]
    names = ("readers", "weights", "sources", "cosines", "knockout", "text")
    return dict(zip(names, tables, strict=True))


def write(folder: pathlib.Path, text: dict[str, Any], runs: list[Run], notes: list[str]) -> None:
    """Writes report.html, a PNG of each figure, routing.json and the same numbers as CSV.

    Args:
      folder: to write in; empty.
      text: what was read.
      runs: the numbers of each run.
      notes: what readers of the report should know.

    Raises:
      OSError: something cannot be written.
    """
    plots = list(routing_plots.all_plots(runs))
    for plot in plots:
        plot.figure.savefig(folder / f"{plot.name}.png", dpi=110)
    (folder / "report.html").write_text(_page(runs, plots, notes))
    values = {"text": text, "notes": notes, "runs": runs}
    (folder / "routing.json").write_text(json.dumps(values, indent=1) + "\n")
    for name, rows in _rows(runs).items():
        _write_csv(folder / f"{name}.csv", rows)
