"""Memory and time of variants by `plan`, side by side in one table.

    python benchmarks/plan_table.py
    python benchmarks/plan_table.py --sizes=1b --remat=full,save_attention
    python benchmarks/plan_table.py --sizes=7b --topology=v5e:16x16 --batch=512 \
        --variants=delta_block,attnres_block

Every size goes to a slice and a batch that suit it (SLICES), unless told otherwise. Compiles each
recipe in a process of its own, minutes each, and prints a Markdown table with ratios to the
baseline under the same remat. Plans are kept in --out, one line each; those that are there are not
made again. Needs `pip install -e '.[tpu]'`, no TPU.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

PAPER = ("delta_block", "delta_attnres", "attnres_block", "attnres_full")
SLICES = {  # topology, sequences of 2048 tokens over all chips
    "220m": ("v5e:2x2", 32),
    "533m": ("v5e:2x4", 64),
    "600m": ("v5e:2x4", 64),
    "1b": ("v5e:4x4", 128),
    "7b": ("v5p:4x4x4", 256),
}
ROOT = pathlib.Path(__file__).resolve().parent.parent


def plan(size: str, variant: str, topology: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """What `plan --json` prints; a dict with `error` where it refuses."""
    recipe = f"configs/{size}_{variant}.py"
    if not (ROOT / recipe).exists():  # not a run of the paper
        recipe = f"configs/{size}_delta_block.py"
        overrides = overrides | {"model.residual.variant": variant}
    line = [sys.executable, "-m", "deltares_jax.plan", f"--config={recipe}", "--json"]
    line += [f"--topology={topology}", *(f"--config.{k}={v}" for k, v in overrides.items())]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if done.stdout.strip():
        report: dict[str, Any] = json.loads(done.stdout)
        return report
    return {"error": done.stderr.strip().splitlines()[-1]}


def row(label: str, report: dict[str, Any], base: dict[str, Any]) -> str:
    """A line of the table."""
    if "error" in report:
        return f"| {label} | {report['error']} | | | | | |"
    total = report["hbm_bytes_per_chip"]["total"]
    cells = [f"{total / 2**30:.2f}", f"{total / base['hbm_bytes_per_chip']['total']:.3f}"]
    if report["work_cycles"] is None:
        cells += ["does not fit" if not report["fits"] else "", "", "", ""]
    else:
        work, seconds = report["work_cycles"], report["estimated_step_seconds"]
        cells += [f"{work / 1e6:.0f}", f"{work / base['work_cycles']:.3f}"]
        cells += [f"{seconds / base['estimated_step_seconds']:.3f}", f"{report['mfu']:.1%}"]
    return "| " + " | ".join([label, *cells]) + " |"


class Plans:
    """Reports by what was asked for, kept in a file."""

    def __init__(self, path: pathlib.Path, settings: str):
        self._path = path
        self._more = dict(pair.split("=", 1) for pair in settings.split(",") if pair)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self._known = {entry["key"]: entry["report"] for entry in map(json.loads, lines)}

    def get(self, size: str, variant: str, topology: str, batch: int, remat: str) -> dict[str, Any]:
        """The kept report, or a new one."""
        overrides = {"train.batch_size": batch, "model.remat": remat} | self._more
        key = json.dumps([f"{size}_{variant}", topology, overrides], sort_keys=True)
        if key not in self._known:
            print(f"{size} {variant}, remat {remat} …", file=sys.stderr, flush=True)
            self._known[key] = plan(size, variant, topology, overrides)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "report": self._known[key]}) + "\n")
        return self._known[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SLICES))
    parser.add_argument("--topology", default="", help="for all sizes")
    parser.add_argument("--batch", type=int, default=0, help="sequences over all chips")
    parser.add_argument("--variants", default=",".join(PAPER))
    parser.add_argument("--remat", default="full", help="policies, separated by commas")
    parser.add_argument("--set", default="", help="more overrides, key=value,…")
    parser.add_argument("--out", default="runs/plan_table.jsonl", type=pathlib.Path)
    args = parser.parse_args()
    plans, table, slices = Plans(args.out, args.set), [], []
    versions: dict[str, str] = {}
    for size in args.sizes.split(","):
        topology, batch = SLICES[size]
        topology, batch = args.topology or topology, args.batch or batch
        slices.append(f"{size} on {topology}, batch {batch}")
        for remat in args.remat.split(","):
            base = plans.get(size, "baseline", topology, batch, remat)
            if "error" in base:
                sys.exit(f"{size} baseline, remat {remat}: {base['error']}")
            versions |= base["versions"]
            for variant in ["baseline", *args.variants.split(",")]:
                report = plans.get(size, variant, topology, batch, remat)
                table.append(row(f"{size} {variant}, {remat}", report, base))
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{'; '.join(slices)} {args.set}; {names}\n")
    print(
        "| size, variant, remat | GiB a chip | ratio | Mcycles of work | ratio | step ratio | MFU |"
    )
    print("|---|---|---|---|---|---|---|")
    print(*table, sep="\n")


if __name__ == "__main__":
    main()
