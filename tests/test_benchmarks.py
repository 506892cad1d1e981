"""What the benchmarks say of their numbers, and that they run."""

import json
import pathlib
import subprocess
import sys
import time

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def reports(monkeypatch):
    """The module that writes the tables of small_scale."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import small_scale_report

    return small_scale_report


def found(reports, **losses):
    """Runs by label and seed with these held-out losses."""
    curves = {name: [(1, 9.0), (2, loss)] for name, of in losses.items() for loss in of}
    return {
        name: {s: reports.Result(loss, loss, 1, 60.0, curves[name]) for s, loss in enumerate(of)}
        for name, of in losses.items()
    }


def test_an_ordering_holds_only_where_seeds_decide_it(reports):
    runs = found(
        reports,
        baseline=[2.0, 2.1, 2.2],
        delta_block=[1.90, 2.00, 2.10],  # always 0.1 below, though the seeds differ by as much
        delta_attnres=[1.7, 2.1, 2.4],
        attnres_block=[2.31, 2.40, 2.50],
    )
    lines = dict(line[2:].split(": ", 1) for line in reports.verdicts("variants", runs))
    assert lines["delta_block below baseline"].startswith("holds (+0.1000 ± 0.0000")
    assert lines["delta_attnres below baseline"].startswith("not decided (+0.0333")
    assert lines["attnres_block below baseline"].startswith("does not hold, the other way round")
    assert lines["delta_attnres below delta_block"].endswith("1 of 3 seeds).")
    assert "attnres_full below attnres_block" not in lines


def test_one_seed_decides_nothing(reports):
    runs = found(reports, baseline=[2.0], delta_block=[1.0])
    assert reports.verdicts("variants", runs) == [
        "- delta_block below baseline: not decided by one seed (+1.0000 nats in its favour)."
    ]


def test_the_table_has_means_spreads_and_differences_within_seeds(reports):
    runs = found(reports, baseline=[2.0, 3.0], delta_block=[1.5, 2.7])
    *_, first, second = reports.markdown(runs)
    assert first == "| baseline | 2.5000 ± 0.7071 |  | 2.5000 ± 0.7071 | 1.0 |"
    assert "| 2.1000 ± 0.8485 | -0.4000 ± 0.1414 |" in second


def test_deep_readers_are_those_of_the_last_third(reports, tmp_path):
    readers = [
        {"name": f"{n}", "depth": n, "max_weight": n / 10, "sources": n * ["a source"]}
        for n in range(1, 7)
    ]
    readers.append({"name": "final", "depth": 7, "max_weight": 1.0, "sources": ["a source"]})
    paths = []
    for seed in range(2):
        runs = [{"variant": "attnres_cumulative", "readers": readers}]
        sharper = [{**reader, "max_weight": reader["max_weight"] + 0.2} for reader in readers]
        runs.append({"variant": "delta_attnres", "readers": sharper})
        paths.append(tmp_path / f"{seed}.json")
        paths[-1].write_text(json.dumps({"runs": runs}))
    *_, plain, delta, _, order = reports.collapse(paths)
    mean = (1 / 4 + 1 / 5 + 1 / 6) / 3
    assert plain == f"| attnres_cumulative | 0.5000 ± 0.0000 | {mean:.4f} |"
    assert delta.startswith("| delta_attnres | 0.7000 ± 0.0000 |")
    assert order.startswith("- delta_attnres above attnres_cumulative: holds (+0.2000 ± 0.0000 in")


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(FOLDER / name), *arguments]
    return subprocess.run(line, capture_output=True, text=True)


TINY = "model.num_layers=2,model.width=32,model.head_dim=16,model.mlp_width=64,data.seq_len=32"


@pytest.mark.slow
def test_small_scale_reuses_the_runs_that_tables_share(tmp_path):
    settings = f"--set={TINY},optim.warmup_steps=1,eval.rows=8"
    common = (settings, "--steps=3", "--seeds", "0", f"--out={tmp_path}")
    variants = run("small_scale.py", *common)
    assert variants.returncode == 0, variants.stdout + variants.stderr
    page = (tmp_path / "variants.md").read_text()
    assert "| attnres_cumulative |" in page
    assert "mean maximum weight" in page
    assert "bigram table of the training data has" in page
    assert (tmp_path / "collapse.png").exists()
    before = {path: path.stat().st_mtime for path in tmp_path.glob("*/run/metrics.jsonl")}
    blocks = run("small_scale.py", "--table=blocks", "--blocks", "1", "2", *common)
    assert blocks.returncode == 0, blocks.stdout + blocks.stderr
    # N = 2 is what the recipe has, so the sweep makes one run only.
    assert {path: path.stat().st_mtime for path in before} == before
    assert len(list(tmp_path.glob("*/run/metrics.jsonl"))) == len(before) + 1


@pytest.mark.slow
def test_small_scale_takes_its_runs_along_when_it_is_stopped(tmp_path):
    line = [sys.executable, str(FOLDER / "small_scale.py"), f"--out={tmp_path}", "--seeds", "0"]
    line += [f"--set={TINY},optim.warmup_steps=1,eval.rows=8", "--steps=100000"]
    tool = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 400
        while len(rows := [*tmp_path.glob("*/run/metrics.jsonl")]) < 2 or not all(
            path.read_text() for path in rows
        ):
            assert tool.poll() is None
            assert time.monotonic() < end
            time.sleep(0.5)
    finally:
        tool.terminate()
    assert "stopped; the same command goes on" in tool.communicate(timeout=60)[1]
    for path in rows:  # both saved, and neither goes on
        assert any((path.parent / "checkpoints").iterdir()), path
        assert not (path.parent.parent / "done").exists()
        after = path.read_text()
        time.sleep(1)
        assert path.read_text() == after


@pytest.mark.slow
def test_the_check_on_a_gpu_names_what_time_did_not_reach(tmp_path):
    done = run("gpu_check.py", "--platform=cpu", "--seconds=0", f"--out={tmp_path / 'page.md'}")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "see the other document: 0" in page
    assert "Not reached in 0 s: B1_baseline, " in page


@pytest.mark.slow
def test_overhead_compares_variants_with_the_baseline(tmp_path):
    done = run("overhead.py", f"--set={TINY}", "--variants=delta_block", "--rounds=1", "--steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    table = [line.strip("| ") for line in done.stdout.splitlines() if line.startswith("| ")]
    baseline, delta_block = [line.split(" | ") for line in table[1:]]
    assert [baseline[0], baseline[2], baseline[4]] == ["baseline", "1.000", "1.000"]
    assert delta_block[0] == "delta_block"
    assert float(delta_block[2]) == pytest.approx(
        float(delta_block[1]) / float(baseline[1]), rel=0.1
    )
