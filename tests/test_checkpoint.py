"""Checkpoints: what is kept, what a damaged one costs, other meshes."""

import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config
from run_helpers import losses, newest, saved, train

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.training import checkpoint, metrics, programs, start

pytestmark = pytest.mark.usefixtures("one_layer")


# What is kept.


@pytest.mark.parametrize(
    ("keep", "period", "best", "stays"),
    [
        (2, 0, 0, {50, 60}),
        (1, 20, 0, {20, 40, 60}),
        (1, 0, 1, {20, 60}),
        (1, 0, 2, {20, 40, 60}),
        (2, 30, 1, {20, 30, 50, 60}),
        (9, 0, 0, {10, 20, 30, 40, 50, 60}),
    ],
)
def test_kept_steps(keep, period, best, stays):
    held_out = {20: 1.0, 40: 2.0, 60: 3.0, 70: 0.0}  # there is no checkpoint of 70
    assert checkpoint.kept([10, 20, 30, 40, 50, 60], keep, period, best, held_out) == stays


def test_loss_that_is_not_finite_is_never_the_best():
    held_out = {10: float("nan"), 20: 2.0, 30: float("nan"), 40: 1.0, 50: float("inf")}
    assert checkpoint.kept([10, 20, 30, 40, 50, 60], 1, 0, 3, held_out) == {20, 40, 60}


def test_best_step_is_saved_when_it_is_found_and_kept(tiny, tmp_path, monkeypatch):
    """Evaluated every second step, saved every fifth; the loss is lowest after step 4."""
    found = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: 1.5}
    real = metrics.Writer.write
    monkeypatch.setattr(
        metrics.Writer,
        "write",
        lambda self, step, row: real(self, step, _with_loss(row, found.get(step))),
    )
    tiny.train.steps = 10
    tiny.eval.every = 2
    tiny.checkpoint.update({"every": 5, "keep": 1, "keep_best": 1})
    train(tiny, tmp_path / "run")
    assert saved(tmp_path / "run") == [4, 10]
    tiny.train.steps = 11  # the loss of before still counts
    train(tiny, tmp_path / "run")
    assert saved(tmp_path / "run") == [4, 11]


def _with_loss(row, loss):
    if "eval_loss" in row:
        row["eval_loss"] = loss if loss is not None else 9.0
    return row


def test_minutes_save_between_the_steps_that_do(tiny, tmp_path):
    tiny.checkpoint.update({"every": 4, "every_minutes": 1e-9, "keep": 9})
    train(tiny, tmp_path / "run")
    assert saved(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


def test_checkpoint_tells_where_the_run_was(tiny, tmp_path):
    tiny.train.steps = 3
    train(tiny, tmp_path / "run")
    at, meta = newest(tmp_path / "run")
    assert (at, meta["step"], meta["rows_seen"]) == (3, 3, 24)
    assert meta["tokens_seen"] == metrics.read_rows(tmp_path / "run")[0][3]["tokens_seen"]
    assert meta["versions"]["jax"] == jax.__version__
    assert meta["clock"]["steps"] > 0
    assert meta["config"] == config_lib.resolve(tiny).to_dict()


# Damage.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of six steps with checkpoints of 2, 4 and 6, and its uninterrupted continuation."""
    config = tiny_config()
    config.model.num_layers = 1
    config.model.residual.variant = "baseline"
    config.optim.update({"schedule": "constant", "final_learning_rate": 0.0})
    config.checkpoint.update({"every": 2, "keep": 9})
    folder = tmp_path_factory.mktemp("runs")
    train(config, folder / "run")
    shutil.copytree(folder / "run", folder / "straight")
    config.train.steps = 7
    train(config, folder / "straight")
    return config, folder / "run", losses(folder / "straight")


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(bytes(data))


def other_format(path):
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "version": 99}))


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


DAMAGE = {
    "an array file is gone": lambda step: largest(step / "state").unlink(),
    "an array file is cut": lambda step: os.truncate(largest(step / "state"), 100),
    "the tree of arrays is empty": lambda step: os.truncate(step / "state" / "_METADATA", 0),
    "the position is gone": lambda step: shutil.rmtree(step / "meta"),
    "the position is empty": lambda step: os.truncate(step / "meta" / "metadata", 0),
    "another format": lambda step: other_format(step / "meta" / "metadata"),
    "an empty folder": empty,
}


def begin(config, folder):
    """Where a run goes on, its state, and what it says of that; no step is compiled."""
    config = config_lib.resolve(config)
    mesh = mesh_lib.make_mesh(mesh_lib.mesh_shape(config.mesh, 1), jax.devices()[:1])
    wanted = programs.abstract_state(config, mesh)
    found = start.find(config, folder)
    found, state = start.restore(config, folder, found, found.meta["data"], *wanted, bool)
    return found, state, start.set_aside(found, folder)


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_newest_step_is_skipped_and_said(run, tmp_path, how):
    config, source, _ = run
    shutil.copytree(source, tmp_path / "run")
    DAMAGE[how](tmp_path / "run" / "checkpoints" / "6")
    found, state, (line,) = begin(config, tmp_path / "run")
    assert re.search(r"warning: .*checkpoints/6 is .*; skipped, and moved to .*damaged/6", line)
    assert found.text == "resumed at step 4"
    assert int(state.step) == 4
    jax.tree.map(np.testing.assert_array_equal, state.params, load(source, step=4).params)
    assert (tmp_path / "run" / "damaged" / "6").is_dir()
    assert saved(tmp_path / "run") == [2, 4]


def test_run_goes_on_from_the_step_before_one_with_a_changed_bit(run, tmp_path, capsys):
    config, source, straight = run
    shutil.copytree(source, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "6"
    flip(largest(step / "state"))
    left = step.with_name("7.orbax-checkpoint-tmp")  # must not be in the way of step 7
    left.mkdir()
    capsys.readouterr()
    train(config, tmp_path / "run")
    printed = capsys.readouterr().out
    assert re.search(r"warning: .*checkpoints/6 is .*; skipped, and moved to .*damaged/6", printed)
    assert "resumed at step 4" in printed
    assert "removed what interrupted saves left: 7.orbax-checkpoint-tmp" in printed
    assert losses(tmp_path / "run") == straight
    assert (tmp_path / "run" / "damaged" / "6").is_dir()
    assert saved(tmp_path / "run") == [2, 4, 6, 7]
    assert load(tmp_path / "run").step == 7


def test_step_that_this_user_may_not_read_is_not_taken_for_damaged(run, tmp_path, monkeypatch):
    config, source, _ = run
    shutil.copytree(source, tmp_path / "run")

    def denied(*_, **__):
        raise ValueError("PERMISSION_DENIED: Error opening a file")

    monkeypatch.setattr(checkpoint.ocp.PyTreeCheckpointHandler, "restore", denied)
    with pytest.raises(ValueError, match=r"checkpoints/6: Permission denied; give the user"):
        train(config, tmp_path / "run")
    assert saved(tmp_path / "run") == [2, 4, 6]


def test_run_without_a_readable_checkpoint_does_not_begin_anew(run, tmp_path):
    config, source, _ = run
    shutil.copytree(source, tmp_path / "run")
    for step in (2, 4, 6):
        os.truncate(tmp_path / "run" / "checkpoints" / str(step) / "meta" / "metadata", 0)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"no checkpoint of .* can be read.*another --workdir"):
        train(config, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert saved(tmp_path / "run") == [2, 4, 6]  # nothing was moved
    with pytest.raises(ValueError, match=r"checkpoints/6 is damaged"):
        load(tmp_path / "run")


def test_checkpoint_that_is_older_than_a_key_has_its_default(run, tmp_path):
    config, source, _ = run
    shutil.copytree(source, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "6" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    del meta["config"]["optim"]["z_loss"], meta["config"]["data"]["repeat"]
    path.write_text(json.dumps(meta))
    assert load(tmp_path / "run").config == load(source).config
    asked = config.copy_and_resolve_references()
    asked.data.repeat = False
    found = start.find(config_lib.resolve(asked), tmp_path / "run")
    assert "data.repeat: True → False" in found.changes
    asked.optim.z_loss = 1e-4
    with pytest.raises(ValueError, match=r"optim\.z_loss: 0\.0 → 0\.0001"):
        start.find(config_lib.resolve(asked), tmp_path / "run")


def test_leftovers_alone_are_a_fresh_start(tiny, tmp_path, capsys):
    (tmp_path / "run" / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    tiny.train.steps = 3
    train(tiny, tmp_path / "run")
    assert "fresh start" in capsys.readouterr().out
    assert saved(tmp_path / "run") == [3]


# Another mesh.


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((8, {}), (1, {})),
        pytest.param((1, {}), (8, {}), marks=pytest.mark.slow),
        pytest.param(
            (8, {"data": 2, "fsdp": 4}), (8, {"data": 4, "fsdp": 2}), marks=pytest.mark.slow
        ),
        pytest.param((8, {"fsdp": 4, "tensor": 2}), (2, {}), marks=pytest.mark.slow),
    ],
)
def test_run_goes_on_on_another_mesh(tiny, tmp_path, before, after):
    """The same parameters bit for bit, the same rows, the next losses to 1e-6."""
    for name, (first, then) in {"same": (before, before), "other": (before, after)}.items():
        for steps, (devices, mesh) in ((4, first), (6, then)):
            config = tiny.copy_and_resolve_references()
            config.train.steps = steps
            config.optim.update({"schedule": "constant", "final_learning_rate": 0.0})
            config.mesh.update(mesh)
            train(config, tmp_path / name, devices)
            if steps == 4:
                at_four = load(tmp_path / name, step=4).params
                reader = checkpoint.Checkpointer(tmp_path / name)
                assert reader.read_meta(4)["rows_seen"] == 32
    config.train.steps = 4
    reference = load(tmp_path / "same", step=4).params
    jax.tree.map(np.testing.assert_array_equal, at_four, reference)
    rows = metrics.read_rows(tmp_path / "other")[0]
    assert rows[6]["tokens_seen"] == metrics.read_rows(tmp_path / "same")[0][6]["tokens_seen"]
    for step, loss in losses(tmp_path / "same").items():
        assert rows[step]["loss"] == pytest.approx(loss, rel=1e-6)


def test_sums_are_those_of_the_bits_whatever_the_mesh():
    from deltares_jax.training import named_arrays

    values = np.arange(64, dtype=np.float32).reshape(8, 8) * 0.1
    expected = int(values.view(np.uint32).sum(dtype=np.uint32))
    mesh = jax.make_mesh((8,), ("x",))
    cut = jax.device_put(values, jax.NamedSharding(mesh, jax.P("x")))
    assert named_arrays.sums({"a": jnp.asarray(values), "b": cut}) == {"a": expected, "b": expected}
