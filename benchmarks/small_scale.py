"""The paper's comparisons at a scale that any machine can run: variants, several seeds, same data.

    python benchmarks/small_scale.py                  # variants; then --table=blocks, --table=grid
    python benchmarks/small_scale.py --quick          # is everything in place?
    python benchmarks/small_scale.py --config=configs/220m_delta_block.py --jobs=1 --set= --steps=0

Trains each cell with each seed by the train command; the seed decides the order of the data and
the first weights, so cells of one seed differ by the variant alone. What has ended is not run
again, what was stopped goes on: start the same command again. Cells that tables share are run once.
Writes OUT/<table>.md, .json and .png; with the variants also OUT/routing-seed<k>, where the layers
read, and OUT/collapse.png of the first seed. Flags that are not known here go to the train command.
"""

import argparse
import concurrent.futures
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import small_scale_report as reports

from deltares_jax.training import metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent
VARIANTS = (
    "baseline",
    "attnres_block",
    "attnres_full",
    "attnres_cumulative",
    "delta_block",
    "delta_attnres",
)
# What is read from where, and what becomes of it.
GRID = {
    "cumulative, replace": "attnres_cumulative",
    "cumulative, add": "full_additive",
    "outputs, replace": "delta_replace",
    "outputs, add": "delta_attnres",
}
BLOCKS = "model.residual.num_blocks"
SMALL = (
    "model.num_layers=12,model.width=96,model.num_heads=4,model.num_kv_heads=2,model.head_dim=24,"
    f"model.mlp_width=256,{BLOCKS}=4,optim.warmup_steps=100,eval.every=150,eval.rows=256"
)
# What SIGTERM has to reach.
RUNNING: set[subprocess.Popen[bytes]] = set()


class Cell(NamedTuple):
    """A kind of run: its label in the table, and what it sets besides the common settings."""

    label: str
    settings: dict[str, str]

    def name(self) -> str:
        """The name of its folder, equal in every table."""
        return "-".join(str(value) for value in self.settings.values())


def cells(args: Any) -> list[Cell]:
    """The rows of a table."""
    variant = "model.residual.variant"
    if args.table == "variants":
        return [Cell(name, {variant: name}) for name in VARIANTS]
    if args.table == "grid":
        return [Cell(label, {variant: name}) for label, name in GRID.items()]
    flags = ["--print_config", *(f"--config.{part}" for part in args.set.split(",") if part)]
    line = [sys.executable, "-m", "deltares_jax.train", f"--config={args.config}", *flags]
    printed = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    own = json.loads(printed)["model"]["residual"]["num_blocks"]  # the cell of other tables
    rows = [Cell("baseline", {variant: "baseline"})]
    for count in args.blocks:
        more = {} if count == own else {BLOCKS: str(count)}
        rows.append(Cell(f"N = {count}", {variant: "delta_block"} | more))
    return rows


def execute(line: list[str], log: pathlib.Path, alone: bool) -> None:
    """Runs a command; adds a line to *.seconds beside its log, the processor time that it took.

    Raises:
      SystemExit: it failed, or was stopped.
    """
    env = dict(os.environ)
    if not alone:  # a core each: threads that wait for each other would cost more
        env["XLA_FLAGS"] = env.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
        env["OMP_NUM_THREADS"] = "1"
    with log.open("a") as file:
        child = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
        RUNNING.add(child)
        _, status, usage = os.wait4(child.pid, 0)
        RUNNING.discard(child)
    child.returncode = os.waitstatus_to_exitcode(status)
    with log.with_suffix(".seconds").open("a") as file:
        file.write(f"{usage.ru_utime + usage.ru_stime:.0f}\n")
    if child.returncode:
        tail = log.read_text().strip().splitlines()[-1:]
        raise SystemExit(f"error: {log}: exit code {child.returncode}: {''.join(tail)}")


def train(args: Any, more: list[str], cell: Cell, seed: int) -> tuple[Cell, int, reports.Result]:
    """Runs or resumes one cell with one seed."""
    folder = args.out / f"{cell.name()}-seed{seed}"
    settings = dict(part.split("=", 1) for part in args.set.split(",") if part) | cell.settings
    settings |= {"train.seed": seed, **({"train.steps": args.steps} if args.steps else {})}
    line = [sys.executable, "-m", "deltares_jax.train", f"--config={args.config}"]
    line += [f"--config.{key}={value}" for key, value in settings.items()]
    folder.mkdir(parents=True, exist_ok=True)
    line += [*more, f"--workdir={folder / 'run'}"]
    done, command = folder / "done", " ".join(line)
    if not done.exists() or done.read_text() != command:
        execute(line, folder / "log", args.jobs == 1)
        done.write_text(command)
    used = sum(map(float, (folder / "log.seconds").read_text().split()))
    return cell, seed, reports.result(metrics.read_rows(folder / "run"), used)


def routing(args: Any) -> list[str]:
    """Where the layers of the routed runs read, seed by seed, with the command `routing`."""
    paths = []
    for seed in args.seeds:
        target = args.out / f"routing-seed{seed}"
        shutil.rmtree(target, ignore_errors=True)
        runs = [args.out / f"{name}-seed{seed}" / "run" for name in VARIANTS if name != "baseline"]
        line = [sys.executable, "-m", "deltares_jax.routing", f"--workdir={runs[0]}"]
        line += [*(f"--compare={run}" for run in runs[1:]), f"--out={target}"]
        execute(line, args.out / f"routing-seed{seed}.log", alone=True)
        paths.append(target / "routing.json")
    shutil.copy(paths[0].parent / "max_weight.png", args.out / "collapse.png")
    return reports.collapse(paths)


def machine() -> str:
    """The processor, as Linux names it, and its cores."""
    path = pathlib.Path("/proc/cpuinfo")
    told = path.read_text() if path.exists() else ""
    name = re.search(r"model name\s*: (.*)", told)
    wide = " with AVX-512" if "avx512f" in told else ""
    return f"{os.cpu_count()} cores ({name[1] if name else platform.machine()}{wide})"


def text(args: Any, found: reports.Found, bigram: str, more: list[str]) -> str:
    """The text of a table's file."""
    runs = [run for of in found.values() for run in of.values()]
    names = ("jax", "flax", "optax", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    minutes = sum(run.seconds for run in runs) / 60
    lines = [
        f"# {reports.TITLES[args.table]}",
        "",
        "<!-- needs: hours -->",
        "```bash",
        f"python benchmarks/small_scale.py {' '.join(sys.argv[1:])}".rstrip(),
        "```",
        "",
        f"`{args.config}` with `{args.set or 'nothing changed'}`; seeds "
        f"{', '.join(map(str, args.seeds))}; {runs[0].tokens / 1e6:.2f} M tokens a run. "
        f"Python {platform.python_version()}, {versions}. {len(runs)} runs, {minutes:.0f} minutes "
        f"of processor time in all, {args.jobs} at a time on {machine()}.",
        "",
        *reports.markdown(found),
        "",
        f"An add-one bigram table of the training data has {bigram}. ± is the standard deviation "
        "over the seeds in the table; below, half of the mean's 95% interval (Student's t).",
        "",
        f"![held-out loss by step]({args.table}.png)",
        "",
        "## The paper's orderings, here",
        "",
        *reports.verdicts(args.table, found),
        *more,
    ]
    return "\n".join(lines) + "\n"


def stop(*_: Any) -> None:
    """SIGTERM: the runs get it too, save and end; Ctrl-C reaches them without help."""
    for child in tuple(RUNNING):
        child.terminate()
    raise SystemExit("stopped; the same command goes on")


def run_all(args: Any, more: list[str]) -> reports.Found:
    """Runs what is missing of a table, the cells of one seed after those of another."""
    jobs = list(itertools.product(args.seeds, cells(args)))
    found: reports.Found = {cell.label: {} for _, cell in jobs}
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(train, args, more, cell, seed) for seed, cell in jobs]
        try:
            for number, run in enumerate(concurrent.futures.as_completed(runs), 1):
                cell, seed, one = run.result()
                found[cell.label][seed] = one
                print(
                    f"{number}/{len(jobs)} {cell.label} seed {seed}: held-out {one.held_out:.4f}, "
                    f"{one.seconds / 60:.1f} min of processor time; "
                    f"{(time.monotonic() - begun) / 60:.0f} min so far",
                    flush=True,
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {label: dict(sorted(of.items())) for label, of in found.items()}


def main() -> None:
    """Runs what is missing of a table, then writes it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", choices=tuple(reports.ORDER), default="variants")
    parser.add_argument("--config", default="configs/debug.py")
    parser.add_argument("--set", default=SMALL, help="key=value,… over the config, in every run")
    parser.add_argument("--steps", type=int, default=900, help="of a run; 0: as the config says")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4, 6, 12])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/small_scale"))
    parser.add_argument("--quick", action="store_true", help="110 steps, one seed")
    args, more = parser.parse_known_args()
    if args.quick:
        args.steps, args.seeds, args.out = 110, args.seeds[:1], args.out / "quick"
    args.out = args.out.absolute()
    signal.signal(signal.SIGTERM, stop)
    found = run_all(args, more)
    log = args.out / f"{cells(args)[0].name()}-seed{args.seeds[0]}" / "log"
    bigram = re.search(r"table of the train split has (\S+)", log.read_text())
    deep = []
    if args.table == "variants":
        deep = ["", "## How sharply deep layers read", "", *routing(args), ""]
        deep.append("![maximum weight by depth](collapse.png)")
    page = text(args, found, bigram[1] if bigram else "too many rows to count", deep)
    (args.out / f"{args.table}.md").write_text(page)
    plain = {label: {s: run._asdict() for s, run in of.items()} for label, of in found.items()}
    (args.out / f"{args.table}.json").write_text(json.dumps(plain, indent=1))
    reports.draw(found, args.out / f"{args.table}.png")
    print(page, end="")


if __name__ == "__main__":
    main()
