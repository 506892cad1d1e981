"""Whole runs: what is written, resumed, refused and stopped."""

import importlib.machinery
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT
from run_helpers import newest, stop_at

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.data import dataset, ngram, pipeline
from deltares_jax.models import transformer, variants
from deltares_jax.training import checkpoint, loop, metrics, programs, signals, workdir


def train(config, folder, **kwargs):
    kwargs.setdefault("devices", jax.devices()[:1])
    return loop.train(config_lib.resolve(config), str(folder), **kwargs)


def log(folder):
    """All numbers of the steps that do not depend on the clock."""
    rows, _ = metrics.read_rows(folder)
    clock = ("tokens_per_second", "seconds", "goodput")
    return {s: {k: v for k, v in r.items() if k not in clock} for s, r in rows.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of four layers, six steps, with evaluation and checkpoints."""
    config = config_lib.default()
    config.model.update({"width": 32, "head_dim": 16, "mlp_width": 64})
    config.data.seq_len = 16
    config.train.steps = 6
    config.optim.warmup_steps = 2
    config.eval.update({"every": 3, "rows": 20, "batch_size": 8})
    config.checkpoint.update({"every": 2, "keep": 2})
    folder = tmp_path_factory.mktemp("runs") / "finished run"
    result = train(config, folder)
    return config, folder, result


def test_what_a_run_leaves(finished):
    config, folder, result = finished
    rows, held_out = metrics.read_rows(folder)
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    assert sorted(held_out) == [3, 6]
    names = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "tokens_seen"}
    assert all(names <= set(row) for row in rows.values())
    assert rows[1]["learning_rate"] == pytest.approx(5e-4)
    assert rows[2]["learning_rate"] == pytest.approx(1e-3)
    assert rows[6]["learning_rate"] == pytest.approx(1e-4)
    for row in held_out.values():
        assert row["eval_perplexity"] == pytest.approx(np.exp(row["eval_loss"]))
    saved = json.loads((folder / "config.json").read_text())
    assert config_lib.resolve(config_lib.from_dict(saved)) == config_lib.resolve(config)
    run = json.loads((folder / "run.json").read_text())
    assert run["versions"]["jax"] == jax.__version__
    assert run["command"]
    assert run["devices"]["count"] == 1
    assert (folder / "loss.png").stat().st_size > 5000
    assert list((folder / "tensorboard").iterdir())
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir()) == [4, 6]
    assert result["first_loss"] == rows[1]["loss"]
    assert result["last_loss"] == rows[6]["loss"]
    assert result["eval_loss"] == held_out[6]["eval_loss"]


def test_held_out_loss_is_that_of_a_plain_computation(finished):
    config, folder, result = finished
    model = load(folder)
    rows = dataset.open_data(config_lib.resolve(config)).eval_sets["py_stdlib"]
    total = count = 0.0
    apply = jax.jit(transformer.apply, static_argnums=0)
    for i in range(20):
        row = rows[i]
        inputs = (row[k][None] for k in ("inputs", "positions", "segments"))
        hidden_BTD = apply(model.config.model, model.params, *inputs).hidden_BTD
        logits_TV = np.asarray(hidden_BTD[0] @ transformer.head(model.params).T, np.float64)
        log_z_T = np.log(np.sum(np.exp(logits_TV), axis=1))
        losses_T = log_z_T - logits_TV[np.arange(16), row["targets"]]
        total += np.sum(losses_T * row["weights"])
        count += np.sum(row["weights"])
    assert result["eval_loss"] == pytest.approx(total / count, rel=1e-5)


def test_load_gives_logits_and_routing(finished):
    config, folder, _ = finished
    model = load(folder)
    ids = [[100, 101, 102, 10], [1, 2, 3, 4]]
    assert model.step == 6
    assert model.config == config_lib.resolve(config)
    logits = model.logits(ids)
    assert logits.shape == (2, 4, 257)
    assert logits.dtype == np.float32
    names = variants.source_names("delta_block", 4, 2)
    routing = model.routing(ids)
    assert {r: w.shape for r, w in routing.items()} == {r: (len(s), 2, 4) for r, s in names.items()}
    np.testing.assert_array_equal(
        load(folder / "checkpoints" / "6").logits(ids), load(str(folder), step=6).logits(ids)
    )
    assert np.any(load(folder, step=4).logits(ids) != logits)


@pytest.mark.parametrize("ids", [[1, 2], [[1, 257]], [[-1, 2]], [[0.5, 1.0]], [[]]])
def test_load_refuses_ids_that_are_none(finished, ids):
    with pytest.raises(ValueError, match="ids"):
        load(finished[1]).logits(ids)


def test_load_refuses_what_is_not_there(finished, tmp_path):
    with pytest.raises(ValueError, match=r"no run.*checkpoints"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"step 5.*\[4, 6\]"):
        load(finished[1], step=5)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_prints_its_summary_again(finished, capsys):
    config, folder, result = finished
    before = (folder / "metrics.jsonl").read_text()
    again = train(config, folder)
    assert again == result
    assert "this run is finished; to go on: --config.train.steps=12" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_finished_run_goes_on_with_more_steps(finished, tmp_path, capsys):
    config, folder, _ = finished
    shutil.copytree(folder, tmp_path / "copy")
    config = config.copy_and_resolve_references()
    config.train.steps = 8
    train(config, tmp_path / "copy")
    out = capsys.readouterr().out
    assert "resumed at step 6" in out
    assert "changed on resume: train.steps: 6 → 8" in out
    assert "learning rate of the next step" in out
    assert sorted(log(tmp_path / "copy")) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_resume_refuses_another_model_or_schedule(finished):
    config, folder, _ = finished
    changed = config.copy_and_resolve_references()
    changed.model.residual.num_blocks = 4
    changed.optim.learning_rate = 5e-4
    with pytest.raises(ValueError, match="cannot be resumed") as error:
        train(changed, folder)
    assert "model.residual.num_blocks: 2 → 4" in str(error.value)
    assert "optim.learning_rate: 0.001 → 0.0005" in str(error.value)


def test_resume_refuses_other_data(finished, monkeypatch):
    config, folder, _ = finished
    real = dataset.open_data

    def other(config):
        data = real(config)
        data.parts["py_stdlib"].manifest["fingerprint"] = "0" * 64
        return data

    monkeypatch.setattr(dataset, "open_data", other)
    with pytest.raises(ValueError, match="other data"):
        train(config, folder)


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
    assert sorted(log(tmp_path / "run")) == [1, 2, 3, 4]
    model = load(tmp_path / "run")
    assert model.step == 4
    assert all(np.all(np.isfinite(p)) for p in jax.tree.leaves(model.params))


def test_evaluation_does_not_change_the_training(tiny, tmp_path):
    train(tiny, tmp_path / "without")
    tiny.eval.every = 1
    train(tiny, tmp_path / "with")
    assert log(tmp_path / "with") == log(tmp_path / "without")
    assert len(metrics.read_rows(tmp_path / "with")[1]) == 6


def test_held_out_loss_does_not_depend_on_the_batch(tiny, tmp_path):
    """Small and uneven sets, one and eight devices."""
    tiny.train.steps = 3
    tiny.eval.update({"every": 3, "rows": 9})
    results = {}
    for size, devices in ((3, 1), (16, 1), (8, 8)):
        tiny.eval.batch_size = size
        result = train(tiny, tmp_path / f"{size}-{devices}", devices=jax.devices()[:devices])
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
    rows = log(tmp_path / "run")
    targets = 6 * 128
    assert targets * 0.9 < rows[6]["tokens_seen"] <= targets
    assert re.search(r"one step needs [\d.]+ MiB", out)


def test_unwritable_compile_cache_is_said_and_survived(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    (tmp_path / "file").touch()
    tiny.train.compile_cache = str(tmp_path / "file" / "cache")
    train(tiny, tmp_path / "run")
    assert "compile_cache" in capsys.readouterr().out
    assert sorted(log(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_compile_cache_of_the_config_comes_before_that_of_the_environment(tiny, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        for value, path in (("off", None), (str(tmp_path), str(tmp_path))):
            tiny.train.compile_cache = value
            programs.set_up_jax(config_lib.resolve(tiny))
            assert jax.config.jax_compilation_cache_dir == path
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_summary_leaves_out_steps_of_an_attempt_that_left_no_checkpoint(finished, tmp_path):
    config, source, result = finished
    shutil.copytree(source, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "loss": 1.0, "tokens_seen": 9}\n{"step": 50, "eval_loss": 1.0}\n')
    again = train(config, tmp_path / "run")
    names = ("steps", "last_loss", "eval_loss")
    assert [again[name] for name in names] == [result[name] for name in names]


def test_rows_cut_off_by_a_crash_are_left_out(finished, tmp_path):
    shutil.copytree(finished[1], tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 7, "lo')
    config = finished[0].copy_and_resolve_references()
    config.train.steps = 7
    train(config, tmp_path / "run")
    assert sorted(log(tmp_path / "run")) == [1, 2, 3, 4, 5, 6, 7]


TINY = [
    "--config.model.width=32",
    "--config.model.head_dim=16",
    "--config.model.mlp_width=64",
    "--config.data.seq_len=16",
    "--config.optim.warmup_steps=2",
    "--config.eval.rows=8",
]


def test_command_runs_on_a_bare_machine(command, tmp_path):
    """No network, no home, no display, no terminal; few lines of output."""
    arguments = ["--config=configs/debug.py", *TINY, "--config.train.steps=20"]
    arguments += [f"--workdir={tmp_path}/a b/run", f"--config.data.dir={tmp_path}/data"]
    env = {"HOME": "/nowhere", "XDG_CACHE_HOME": "", "DISPLAY": "", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, "XLA_FLAGS": "", **env}
    line = [sys.executable, "-m", "deltares_jax.train", *arguments]
    can = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    if can.returncode == 0:
        line = ["unshare", "-n", *line]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= 40
    assert "held-out loss" in done.stdout
    assert "bigram" in done.stdout
    assert "next: python -m deltares_jax.train --config=configs/debug.py" in done.stdout
    assert "--config.train.steps=20" in done.stdout.splitlines()[-1]  # a fair comparison
    assert (tmp_path / "a b" / "run" / "loss.png").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_command_saves_on_request(tmp_path, number):
    process = start_command(f"--workdir={tmp_path}/run", "--config.train.steps=5000")
    for text in process.stdout:
        if text.startswith("step"):
            process.send_signal(number)
            break
    process.stdout.read()
    assert process.wait(60) == 143
    saved, _ = newest(tmp_path / "run")
    rows, _ = metrics.read_rows(tmp_path / "run")
    assert sorted(rows) == list(range(1, saved + 1))


def start_command(*arguments, prefix=(), **kwargs):
    line = [*prefix, sys.executable, "-m", "deltares_jax.train", "--config=configs/debug.py", *TINY]
    env = {**os.environ, "XLA_FLAGS": ""}
    if prefix:  # what a limit cuts off must not end up in the cache of the others
        env.pop("JAX_COMPILATION_CACHE_DIR")
    return subprocess.Popen(
        [*line, *arguments], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT, **kwargs
    )


def test_command_outlives_the_reader_of_its_output(tmp_path):
    process = start_command(f"--workdir={tmp_path}/run", "--config.train.steps=40")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 0
    assert newest(tmp_path / "run")[0] == 40


def test_command_that_cannot_save_says_so_and_keeps_what_it_has(tmp_path):
    """A limit on the size of files stands for a full disk."""
    dataset.open_data(config_lib.resolve(config_lib.default()))  # prepared before the limit
    small = [
        "--config.train.compile_cache=off",
        "--config.train.steps=4",
        "--config.checkpoint.every=2",
        "--config.eval.every=0",
    ]
    arguments = [f"--workdir={tmp_path}/run", "--config.metrics.tensorboard=False", *small]
    limited = ["sh", "-c", 'ulimit -f 80; exec "$0" "$@"']  # blocks of 512 bytes
    process = start_command(*arguments, prefix=limited, stderr=subprocess.PIPE)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 6, stderr[-3000:]
    (line,) = stderr.splitlines()
    assert line.startswith(f"error: nothing could be saved under {tmp_path}/run/checkpoints")
    assert newest(tmp_path / "run") is None


@pytest.mark.parametrize(("every", "steps"), [(4, [1, 4, 6]), (100, [1, 6])])
def test_the_first_and_last_step_are_logged_whatever_the_cadence(tiny, tmp_path, every, steps):
    tiny.train.log_every = every
    result = train(tiny, tmp_path / "run")
    assert sorted(log(tmp_path / "run")) == steps
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


def test_a_run_inside_a_run_is_refused(finished):
    with pytest.raises(ValueError, match=r"is inside the run .*finished run"):
        train(finished[0], finished[1] / "more")


def test_damaged_files_of_a_run_are_named(finished, tmp_path):
    config, source, _ = finished
    shutil.copytree(source, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds no training rows"):
        train(config, tmp_path / "run")


def test_a_profile_of_steps_made_before_is_said_to_be_none(finished, tmp_path, capsys):
    shutil.copytree(finished[1], tmp_path / "run")
    config = finished[0].copy_and_resolve_references()
    config.train.update({"steps": 7, "profile_steps": "2:3"})
    train(config, tmp_path / "run")
    assert "no profile: steps 2:3 were made before" in capsys.readouterr().out


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


@pytest.mark.slow
@pytest.mark.parametrize("name", variants.VARIANTS)
def test_debug_run_of_every_variant_learns(tmp_path, name):
    config = config_lib.default()
    config.model.residual.variant = name
    config.train.steps = 60
    config.eval.every = 60
    result = train(config, tmp_path / "run")
    data = dataset.open_data(config_lib.resolve(config))
    counts = ngram.bigram_counts(data.parts["py_stdlib"].streams["train"], 257, 256)
    rows = data.eval_sets["py_stdlib"]
    unigram = ngram.unigram_loss(counts, pipeline.eval_batches(rows, config.eval.rows, 8))
    assert result["eval_loss"] < unigram
