"""Runs whose folder is in a bucket, on one machine after the other."""

import json
import pathlib

import bucket_helpers
import fsspec
import process_helpers
import pytest

from deltares_jax import config as config_lib
from deltares_jax.training import loop, metrics

FIRST, ALL = 4, 6


@pytest.fixture
def train(tiny, one_layer, corpora, tmp_path, monkeypatch, capsys):
    """train(workdir, steps, machine): the rows of a run, and what was printed."""
    tiny.data.update({"source": "text", "dir": str(corpora / "short")})
    tiny.checkpoint.every = 2

    def run(workdir, steps: int, machine: str = "a"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        tiny.train.steps = steps
        result = loop.train(config_lib.resolve(tiny), str(workdir))
        rows, _ = metrics.read_rows(pathlib.Path(result["workdir"]))
        return {step: row["loss"] for step, row in rows.items()}, capsys.readouterr().out

    return run


@pytest.mark.slow
def test_a_run_in_a_bucket_is_that_in_a_folder(train, tmp_path):
    bucket, system = bucket_helpers.gs_bucket(), fsspec.filesystem("gs")
    address = f"{bucket}/runs/x"
    train(tmp_path / "run", FIRST)
    wanted, _ = train(tmp_path / "run", ALL)

    _, printed = train(address, FIRST)
    assert f"run: {address}" in printed
    files = {name.removeprefix(f"{address[5:]}/") for name in system.find(address)}
    assert {"config.json", "run.json", "metrics.jsonl", "loss.png"} <= files
    assert {f"checkpoints/{step}/commit_success.txt" for step in (2, 4)} <= files
    assert not any(name.startswith((".", "checkpoints/.")) for name in files)

    # A machine that has never seen the run goes on with it.
    rows, printed = train(address, ALL, "b")
    assert f"{address}: resumed at step {FIRST}" in printed
    assert rows == wanted
    steps = {name.split("checkpoints/")[1].split("/")[0] for name in system.find(address)
             if "checkpoints/" in name}  # fmt: skip
    assert steps == {"4", "6"}

    # The first one takes up what the other has written; a checkpoint without its mark is none.
    system.rm_file(f"{address}/checkpoints/6/commit_success.txt")
    rows, printed = train(address, ALL)
    assert "resumed at step 4" in printed
    assert "removed what interrupted saves left: 6" in printed
    assert rows == wanted

    # One that cannot be read is kept aside.
    system.pipe_file(f"{address}/checkpoints/6/meta/metadata", b"{")
    rows, printed = train(address, ALL)
    assert f"moved to {address}/damaged/6" in printed
    assert rows == wanted
    assert system.exists(f"{address}/damaged/6/meta/metadata")
    lines = system.cat_file(f"{address}/metrics.jsonl").decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 5, 6, 5, 6]


@pytest.mark.slow
def test_two_machines_train_in_a_bucket(corpora, tmp_path, monkeypatch):
    bucket, system = bucket_helpers.gs_bucket(), fsspec.filesystem("gs")
    address = f"{bucket}/runs/x"
    data = ("--config.data.source=text", f"--config.data.dir={corpora / 'short'}")
    data = (*data, "--config.eval.every=0", f"--workdir={address}")

    def both(machines: str, *arguments: str) -> list[str]:
        port, pair = process_helpers.free_port(), []
        for index, machine in enumerate(machines):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
            pair.append(process_helpers.member(index, 2, port, *data, *arguments))
        assert [process.end(240) for process in pair] == [0, 0], [p.errors for p in pair]
        return pair[0].lines

    both("ab", "--config.train.steps=4")
    lines = both("ba", "--config.train.steps=6")
    assert f"{address}: resumed at step 4" in lines
    assert f"run: {address}" in lines
    rows = system.cat_file(f"{address}/metrics.jsonl").decode().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert system.exists(f"{address}/checkpoints/6/commit_success.txt")


def test_what_cannot_be_in_a_bucket_is_refused(train, monkeypatch):
    bucket = bucket_helpers.gs_bucket()
    with pytest.raises(ValueError, match=rf"--workdir={bucket}-of-nobody/x cannot be written"):
        train(f"{bucket}-of-nobody/x", ALL)
    with pytest.raises(ValueError, match=r"--workdir='s3://b/x' must be a local folder"):
        train("s3://b/x", ALL)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs gcsfs: pip install 'deltares-jax\[gcs\]'"):
        train(f"{bucket}/x", ALL)
