"""Memory and time of variants by `plan`, side by side: the tables in the README.

    python benchmarks/plan_table.py --size=1b --topology=v5e:4x4 --batch=128 --remat=full
    python benchmarks/plan_table.py --size=7b --topology=v5p:4x4x4 --batch=256 \
        --variants=delta_block,attnres_block

Compiles each recipe in a process of its own, minutes each, and prints a Markdown table with ratios
to the baseline under the same remat. Plans are kept in --out, one line each; those that are there
are not made again. Needs `pip install -e '.[tpu]'`, no TPU.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

PAPER = ("delta_block", "delta_attnres", "attnres_block", "attnres_full")
ROOT = pathlib.Path(__file__).resolve().parent.parent


def plan(recipe: str, topology: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """What `plan --json` prints; a dict with `error` where it refuses."""
    line = [sys.executable, "-m", "deltares_jax.plan", f"--config=configs/{recipe}.py", "--json"]
    line += [f"--topology={topology}", *(f"--config.{k}={v}" for k, v in overrides.items())]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if done.stdout.strip():
        return json.loads(done.stdout)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", required=True)
    parser.add_argument("--topology", required=True)
    parser.add_argument("--batch", type=int, required=True, help="sequences over all chips")
    parser.add_argument("--variants", default=",".join(PAPER))
    parser.add_argument("--remat", default="full", help="policies, separated by commas")
    parser.add_argument("--set", default="", help="more overrides, key=value,…")
    parser.add_argument("--out", default="runs/plan_table.jsonl", type=pathlib.Path)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    known = {entry["key"]: entry["report"] for entry in map(json.loads, lines)}

    def get(variant: str, remat: str) -> dict[str, Any]:
        overrides = {"train.batch_size": args.batch, "model.remat": remat}
        overrides |= dict(pair.split("=", 1) for pair in args.set.split(",") if pair)
        key = json.dumps([f"{args.size}_{variant}", args.topology, overrides], sort_keys=True)
        if key not in known:
            print(f"{variant}, remat {remat} …", file=sys.stderr, flush=True)
            known[key] = plan(f"{args.size}_{variant}", args.topology, overrides)
            with args.out.open("a") as file:
                file.write(json.dumps({"key": key, "report": known[key]}) + "\n")
        return known[key]

    table = []
    for remat in args.remat.split(","):
        base = get("baseline", remat)
        if "error" in base:
            sys.exit(f"baseline, remat {remat}: {base['error']}")
        versions = base["versions"]
        for variant in ["baseline", *args.variants.split(",")]:
            table.append(row(f"{variant}, {remat}", get(variant, remat), base))
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{args.size} on {base['hardware']}, batch {args.batch} {args.set}; {names}\n")
    print("| variant, remat | GiB a chip | ratio | Mcycles of work | ratio | step ratio | MFU |")
    print("|---|---|---|---|---|---|---|")
    print(*table, sep="\n")


if __name__ == "__main__":
    main()
