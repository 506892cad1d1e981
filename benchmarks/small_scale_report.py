"""What benchmarks/small_scale.py says of its runs: table, orderings, figures."""

import itertools
import json
import pathlib
import statistics
from typing import Any, NamedTuple

import scipy.stats
from matplotlib.figure import Figure

# For each table: (better, other), as the paper reports it at 220M and 533M parameters.
ORDER = {
    "variants": (
        ("delta_attnres", "delta_block"),
        ("delta_block", "baseline"),
        ("delta_attnres", "baseline"),
        ("attnres_full", "attnres_block"),
        ("attnres_block", "baseline"),
        ("delta_block", "attnres_block"),
    ),
    "blocks": (
        ("N = 1", "baseline"),
        ("N = 6", "baseline"),
        ("N = 12", "baseline"),
        ("N = 6", "N = 1"),
        ("N = 6", "N = 12"),
    ),
    "grid": (
        ("outputs, add", "cumulative, replace"),
        ("outputs, add", "cumulative, add"),
        ("outputs, add", "outputs, replace"),
    ),
}
# What is read in deep layers: these above that, by mean maximum weight.
SHARPER = (("delta_block", "attnres_cumulative"), ("delta_attnres", "attnres_cumulative"))
TITLES = {
    "variants": "Variants at a small scale",
    "blocks": "Numbers of blocks at a small scale",
    "grid": "Sources and routing at a small scale",
}
DEEP = 2 / 3  # of the depth; readers from there on count as deep


class Result(NamedTuple):
    """One run: held-out loss, mean training loss of the last tenth, tokens, processor seconds."""

    held_out: float
    tail: float
    tokens: int
    seconds: float
    curve: list[tuple[int, float]]


Found = dict[str, dict[int, Result]]  # by label and seed


def result(rows: tuple[dict[int, Any], dict[int, Any]], seconds: float) -> Result:
    """The numbers of one run."""
    steps, held_out = rows
    last = max(steps)
    tail = [row["loss"] for step, row in steps.items() if step > 0.9 * last]
    curve = [(step, held_out[step]["eval_loss"]) for step in sorted(held_out)]
    return Result(curve[-1][1], statistics.fmean(tail), steps[last]["tokens_seen"], seconds, curve)


def spread(values: list[float]) -> str:
    """Mean, and the sample's standard deviation."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{deviation}"


def markdown(found: Found) -> list[str]:
    """The table, with each difference to the first row taken seed by seed."""
    first = next(iter(found))
    lines = [
        f"| | held-out loss | minus {first}, by seed | training loss, last tenth "
        "| processor min a run |",
        "|---|---|---|---|---|",
    ]
    for label, runs in found.items():
        less = [runs[s].held_out - found[first][s].held_out for s in runs]
        cells = (
            spread([r.held_out for r in runs.values()]),
            spread(less) if label != first else "",
            spread([r.tail for r in runs.values()]),
            f"{statistics.fmean(r.seconds for r in runs.values()) / 60:.1f}",
        )
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def verdicts(table: str, found: Found) -> list[str]:
    """Which of the paper's orderings hold here, by differences within a seed."""
    lines = []
    for better, other in ORDER[table]:
        if better not in found or other not in found:
            continue
        gains = [found[other][s].held_out - found[better][s].held_out for s in found[better]]
        lines.append(f"- {better} below {other}: {_verdict(gains, ' nats')}")
    return lines


def _verdict(gains: list[float], unit: str) -> str:
    mean, wins = statistics.fmean(gains), sum(gain > 0 for gain in gains)
    tail = f"{wins} of {len(gains)} seeds"
    if len(gains) < 2:
        return f"not decided by one seed ({mean:+.4f}{unit} in its favour)."
    error = statistics.stdev(gains) / len(gains) ** 0.5
    half = float(scipy.stats.t.ppf(0.975, len(gains) - 1)) * error
    word = "not decided"
    if abs(mean) > half:
        word = "holds" if mean > 0 else "does not hold, the other way round"
    return f"{word} ({mean:+.4f} ± {half:.4f}{unit} in its favour; {tail})."


def collapse(paths: list[pathlib.Path]) -> list[str]:
    """The mean maximum weight of deep readers from the numbers of `routing`, a file for each seed.

    Returns:
      lines of Markdown: for each variant its mean and spread over the files, and the mean of one
      over the number of sources; which are higher.
    """
    by_variant: dict[str, list[float]] = {}
    equal: dict[str, float] = {}
    for path in paths:
        for one in json.loads(path.read_text())["runs"]:
            readers = [reader for reader in one["readers"] if reader["name"] != "final"]
            start = DEEP * max(reader["depth"] for reader in readers)
            deep = [reader for reader in readers if reader["depth"] >= start]
            mean = statistics.fmean(reader["max_weight"] for reader in deep)
            by_variant.setdefault(one["variant"], []).append(mean)
            equal[one["variant"]] = statistics.fmean(1 / len(reader["sources"]) for reader in deep)
    lines = [
        "| | mean maximum weight of readers in the last third | if all sources weighed the same |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {spread(values)} | {equal[name]:.4f} |" for name, values in by_variant.items()
    ]
    lines.append("")
    for higher, other in SHARPER:
        if higher in by_variant and other in by_variant:
            pairs = zip(by_variant[higher], by_variant[other], strict=True)
            gains = [one - less for one, less in pairs]
            lines.append(f"- {higher} above {other}: {_verdict(gains, '')}")
    return lines


def draw(found: Found, path: pathlib.Path) -> None:
    """Held-out loss by step, the mean over the seeds, and below it what it is less the first."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    base: dict[int, float] = {}
    for label, runs in found.items():
        by_step: dict[int, list[float]] = {}
        for step, loss in itertools.chain.from_iterable(run.curve for run in runs.values()):
            by_step.setdefault(step, []).append(loss)
        mean = {step: statistics.fmean(losses) for step, losses in by_step.items()}
        base = base or mean
        top.plot(list(mean), list(mean.values()), lw=1.2, label=label)
        bottom.plot(list(mean), [loss - base[step] for step, loss in mean.items()], lw=1.2)
    top.set(ylabel="held-out loss, nats per token", yscale="log")
    bottom.set(xlabel="step", ylabel=f"minus {next(iter(found))}")
    for which in (top.yaxis.set_major_formatter, top.yaxis.set_minor_formatter):
        which("{x:.1f}")
    top.legend(frameon=False, fontsize=8)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
