"""Runs by what they are told: stops, evaluation, odd depths, profiles, caches."""

import importlib.machinery
import importlib.util
import itertools
import re

import jax
import numpy as np
import pytest
from run_helpers import log, stop_at, train

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.data import dataset, pipeline
from deltares_jax.models import variants
from deltares_jax.training import checkpoint, metrics, programs, signals, workdir


@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        ("delta_block", 4),
        pytest.param("delta_attnres", 1, marks=pytest.mark.slow),
        pytest.param("attnres_full", 1, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    tiny, tmp_path, monkeypatch, name, accumulation
):
    tiny.model.residual.variant = name
    tiny.train.update({"steps": 9, "accumulation": accumulation})
    tiny.eval.every = 2
    train(tiny, tmp_path / "straight")
    for stop in (3, 6):
        with monkeypatch.context() as patch:
            stop_at(patch, stop)
            with pytest.raises(signals.Stop, match="stopped by SIGTERM after step") as stopped:
                train(tiny, tmp_path / "stopped")
            assert stopped.value.code == 143
    train(tiny, tmp_path / "stopped")
    assert log(tmp_path / "stopped") == log(tmp_path / "straight")
    a, b = (load(tmp_path / run).params for run in ("straight", "stopped"))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_step_that_is_not_finite_stops_the_run(tiny, tmp_path, monkeypatch):
    real = pipeline.train_batches

    def poisoned(*args):
        for number, batch in enumerate(real(*args), 1):
            if number == 5:
                batch = {**batch, "inputs": np.full_like(batch["inputs"], 9999)}
            yield batch

    monkeypatch.setattr(pipeline, "train_batches", poisoned)
    tiny.checkpoint.every = 2
    with pytest.raises(signals.Stop, match=r"step 5: loss nan.*state of step 4 is kept") as stop:
        train(tiny, tmp_path / "run")
    assert stop.value.code == 4
    assert sorted(log(tmp_path / "run")[0]) == [1, 2, 3, 4]
    model = load(tmp_path / "run")
    assert model.step == 4
    assert all(np.all(np.isfinite(p)) for p in jax.tree.leaves(model.params))


def test_evaluation_does_not_change_the_training(tiny, tmp_path):
    train(tiny, tmp_path / "without")
    tiny.eval.every = 1
    train(tiny, tmp_path / "with")
    assert log(tmp_path / "with")[0] == log(tmp_path / "without")[0]
    assert len(metrics.read_rows(tmp_path / "with")[1]) == 6


def test_held_out_loss_does_not_depend_on_the_batch(tiny, tmp_path):
    """Small and uneven sets, one and eight devices."""
    tiny.train.steps = 3
    tiny.eval.update({"every": 3, "rows": 9})
    results = {}
    for size, devices in ((3, 1), (16, 1), (8, 8)):
        tiny.eval.batch_size = size
        result = train(tiny, tmp_path / f"{size}-{devices}", devices=devices)
        results[size, devices] = result["eval_loss"]
    np.testing.assert_allclose(list(results.values()), results[3, 1], rtol=1e-6)


def test_more_held_out_rows_than_there_are_is_said(tiny, tmp_path, monkeypatch, capsys):
    real = dataset.open_data

    def short(config):
        data = real(config)
        data.eval_sets = {"own": [data.eval_sets["py_stdlib"][i] for i in range(3)]}
        return data

    monkeypatch.setattr(dataset, "open_data", short)
    tiny.train.steps = 3
    tiny.eval.update({"every": 3, "rows": 1000})
    train(tiny, tmp_path / "run")
    assert "eval.rows=1000: own has 3, all are used" in capsys.readouterr().out
    assert metrics.read_rows(tmp_path / "run")[1][3]["eval_tokens"] <= 3 * 16


def test_checkpoints_hold_the_state_of_their_step(tiny, tmp_path):
    """Saves run in the background while the state's memory is used for the next step."""
    tiny.train.steps = 5
    tiny.checkpoint.update({"every": 1, "keep": 10})
    train(tiny, tmp_path / "every")
    for stop in (1, 3):
        config = config_lib.resolve(tiny)
        reader = checkpoint.Checkpointer(tmp_path / "every", keep=None)
        assert reader.read_meta(stop)["rows_seen"] == stop * 8
        assert reader.read_meta(stop)["config"] == config.to_dict()
        reader.close()
    params = [load(tmp_path / "every", step=s).params["embedding"] for s in range(1, 6)]
    for a, b in itertools.pairwise(params):
        assert np.any(a != b)
    assert load(tmp_path / "every", step=3).step == 3


@pytest.mark.parametrize(
    ("name", "num_layers", "num_blocks"),
    [
        ("delta_block_released", 7, 3),
        ("delta_block", 1, 1),
        pytest.param("delta_block", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_odd_depths_train_resume_and_show_their_routing(
    tiny, tmp_path, monkeypatch, capsys, name, num_layers, num_blocks
):
    tiny.model.update({"num_layers": num_layers, "dtype": "bfloat16"})
    tiny.model.residual.update({"variant": name, "num_blocks": num_blocks})
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(signals.Stop):
            train(tiny, tmp_path / "run")
    train(tiny, tmp_path / "run")
    out = capsys.readouterr().out
    spans = {7: "layers 0-2, 3-5, 6-6", 3: "layers 0-2", 1: "layers 0-0"}
    assert f"blocks: {num_blocks}, of {spans[num_layers]}" in out
    assert ("queries never learn" in out) == (num_blocks == 1)
    model = load(tmp_path / "run")
    names = variants.source_names(name, num_layers, num_blocks)
    assert {r: len(w) for r, w in model.routing([[1, 2, 3]]).items()} == {
        r: len(s) for r, s in names.items()
    }
    assert {p.dtype for p in jax.tree.leaves(model.params)} == {np.dtype("float32")}


def test_profile_and_batch_report(tiny, tmp_path, capsys):
    tiny.train.update({"profile_steps": "2:3", "accumulation": 2})
    train(tiny, tmp_path / "run")
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    out = capsys.readouterr().out
    assert "global batch 8 × 16 tokens, 128 per update; micro-batch 4, accumulation 2" in out
    rows, _ = log(tmp_path / "run")
    targets = 6 * 128
    assert targets * 0.9 < rows[6]["tokens_seen"] <= targets
    assert re.search(r"one step needs [\d.]+ MiB", out)


def test_unwritable_compile_cache_is_said_and_survived(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    (tmp_path / "file").touch()
    tiny.train.compile_cache = str(tmp_path / "file" / "cache")
    train(tiny, tmp_path / "run")
    assert "compile_cache" in capsys.readouterr().out
    assert sorted(log(tmp_path / "run")[0]) == [1, 2, 3, 4, 5, 6]


def test_compile_cache_of_the_config_comes_before_that_of_the_environment(tiny, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        for value, path in (("off", None), (str(tmp_path), str(tmp_path))):
            tiny.train.compile_cache = value
            programs.set_up_jax(config_lib.resolve(tiny))
            assert jax.config.jax_compilation_cache_dir == path
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(("every", "steps"), [(4, [1, 4, 6]), (100, [1, 6])])
def test_the_first_and_last_step_are_logged_whatever_the_cadence(tiny, tmp_path, every, steps):
    tiny.train.log_every = every
    result = train(tiny, tmp_path / "run")
    assert sorted(log(tmp_path / "run")[0]) == steps
    assert result["steps"] == 6


def test_offload_is_refused_where_there_is_no_other_memory(tiny, tmp_path):
    tiny.model.remat = "offload"
    with pytest.raises(ValueError, match=r"model\.remat=offload .*use model\.remat=full"):
        train(tiny, tmp_path / "run")


def test_a_second_process_is_kept_out(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    in_use = pytest.raises(ValueError, match="run is in use by another process")
    with workdir.locked(tmp_path / "run"), in_use:
        train(tiny, tmp_path / "run")
    train(tiny, tmp_path / "run")


@pytest.mark.parametrize("found", ["nothing", "a folder of that name"])
def test_wandb_that_is_not_installed_is_refused_before_anything_is_written(
    tiny, tmp_path, monkeypatch, found
):
    spec = importlib.machinery.ModuleSpec("wandb", None) if found != "nothing" else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    tiny.metrics.wandb = True
    with pytest.raises(ValueError, match=r"metrics\.wandb=True needs wandb: pip install"):
        train(tiny, tmp_path / "run")
    assert not (tmp_path / "run").exists()
