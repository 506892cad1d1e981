"""Runs whose folder is in a bucket, on one machine after the other."""

import json
import pathlib

import bucket_helpers
import fsspec
import jax
import numpy as np
import process_helpers
import pytest
import run_helpers
from etils import epath

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.training import loop, metrics, s3, signals

FIRST = 4


@pytest.fixture(params=[bucket_helpers.gs_bucket, bucket_helpers.s3_bucket], ids=["gs", "s3"])
def address(request) -> str:
    """Of a run, in a new bucket."""
    return f"{request.param()}/runs/x"


@pytest.fixture
def config(tiny, one_layer, corpora):
    tiny.data.update({"source": "text", "dir": str(corpora / "short")})
    tiny.checkpoint.every = 2
    return tiny


@pytest.fixture
def train(config, tmp_path, monkeypatch, capsys):
    """train(workdir, machine): the losses of a run, and what was printed."""

    def run(workdir, machine: str = "a"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        result = loop.train(config_lib.resolve(config), str(workdir))
        rows, _ = metrics.read_rows(pathlib.Path(result["workdir"]))
        return {step: row["loss"] for step, row in rows.items()}, capsys.readouterr().out

    return run


def steps_of(system, address: str) -> set[str]:
    names = (name.partition("/checkpoints/")[2] for name in system.find(address))
    return {name.split("/")[0] for name in names if name}


@pytest.mark.slow
def test_a_run_in_a_bucket_is_that_in_a_folder(
    address, train, config, in_process, tmp_path, monkeypatch
):
    system, inside = fsspec.filesystem(address[:2]), address[5:]
    wanted, _ = train(tmp_path / "run")

    with monkeypatch.context() as patch:
        run_helpers.stop_at(patch, 3)
        with pytest.raises(signals.Stop, match=f"SIGTERM after step {FIRST}, which") as stopped:
            train(address)
    assert stopped.value.code == 143
    files = {name.removeprefix(f"{inside}/") for name in system.find(address)}
    assert {"config.json", "run.json", "metrics.jsonl"} <= files
    assert {f"checkpoints/{step}/commit_success.txt" for step in (2, FIRST)} <= files
    assert not any(name.startswith((".", "checkpoints/.")) for name in files)

    # A machine that has never seen the run goes on with it.
    losses, printed = train(address, "b")
    assert f"{address}: resumed at step {FIRST}" in printed
    assert losses == wanted
    assert steps_of(system, address) == {"4", "6"}

    # The first one takes up what the other has written; a checkpoint without its mark is none.
    system.rm_file(f"{address}/checkpoints/6/commit_success.txt")
    losses, printed = train(address)
    assert "resumed at step 4" in printed
    assert "removed what interrupted saves left: 6" in printed
    assert losses == wanted

    # One that cannot be read is kept aside.
    system.pipe_file(f"{address}/checkpoints/6/meta/metadata", b"{")
    losses, printed = train(address)
    assert f"moved to {address}/damaged/6" in printed
    assert losses == wanted
    assert system.exists(f"{address}/damaged/6/meta/metadata")
    lines = system.cat_file(f"{address}/metrics.jsonl").decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 5, 6, 5, 6]

    reads_as_from_a_folder(tmp_path, address, train, in_process, config)


def reads_as_from_a_folder(tmp_path, address, train, in_process, config) -> None:
    """What takes a run takes its address."""
    here, there = load(tmp_path / "run").params, load(f"{address}/checkpoints/6").params
    jax.tree.map(np.testing.assert_array_equal, here, there)
    results = []
    for run in (str(tmp_path / "run"), address):
        data = f"--data=a={config.data.dir}:train"
        code, error = in_process("evaluate", f"--workdir={run}", data, "--step=last")
        assert (code, "error" in error) == (0, False), error
        file = "evaluation/step_6.json"
        text = epath.Path(f"{run}/{file}").read_text()
        results.append(json.loads(text)["sets"])
    assert results[0] == results[1]
    config.init_from = f"{address}@4"
    config.train.steps = 2
    config.optim.warmup_steps = 1
    _, printed = train(tmp_path / "next")
    assert f"weights of {address}@4" in printed


@pytest.mark.slow
def test_two_machines_train_in_a_bucket(address, corpora, tmp_path, monkeypatch):
    system = fsspec.filesystem(address[:2])
    data = ("--config.data.source=text", f"--config.data.dir={corpora / 'short'}")
    data = (*data, "--config.eval.every=0", f"--workdir={address}")

    def both(machines: str, *arguments: str) -> list[str]:
        port, pair = process_helpers.free_port(), []
        for index, machine in enumerate(machines):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
            pair.append(process_helpers.member(index, 2, port, *data, *arguments))
        assert [process.end(480) for process in pair] == [0, 0], [p.errors for p in pair]
        return pair[0].lines

    both("ab", "--config.train.steps=4")
    lines = both("ba", "--config.train.steps=6")
    assert f"{address}: resumed at step 4" in lines
    assert f"run: {address}" in lines
    rows = system.cat_file(f"{address}/metrics.jsonl").decode().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert system.exists(f"{address}/checkpoints/6/commit_success.txt")


def test_what_cannot_be_in_a_bucket_is_refused(train, config, address, tmp_path, monkeypatch):
    bucket = address.removesuffix("/runs/x")
    with pytest.raises(ValueError, match=rf"--workdir={bucket}-of-nobody/x cannot be written"):
        train(f"{bucket}-of-nobody/x")
    assert not fsspec.filesystem(bucket[:2]).exists(f"{bucket}-of-nobody")
    config.init_from = f"{address}@4"
    with pytest.raises(ValueError, match=rf"init_from={address}@4: {address} is no run"):
        train(tmp_path / "next")
    with pytest.raises(ValueError, match=r"--workdir='hdfs://b/x' must be a local folder"):
        train("hdfs://b/x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"needs (gcs|s3)fs: pip install 'deltares-jax\[(gcs|s3)\]'"
    ):
        train(address)


def test_an_orbax_that_cannot_be_taught_s3_is_named(monkeypatch):
    monkeypatch.delattr(s3.tensorstore_utils, "build_kvstore_tspec")
    with pytest.raises(ValueError, match=r"install 0\.12\.8, or give a mounted folder"):
        s3.enable.__wrapped__()
