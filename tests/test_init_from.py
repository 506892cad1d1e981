"""Runs that start from another run's checkpoint."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from conftest import tiny_config
from run_helpers import log, newest, train

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.training import checkpoint, start


def assert_same_params(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)


@pytest.fixture
def constant():
    """Six steps at a constant rate."""
    return constant_rate()


def constant_rate():
    config = tiny_config()
    config.optim.update({"schedule": "constant", "final_learning_rate": 0.0})
    return config


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of six steps with all its checkpoints."""
    config = constant_rate()
    config.checkpoint.update({"every": 1, "keep": 9})
    folder = tmp_path_factory.mktemp("runs") / "source"
    train(config, folder)
    return folder


@pytest.fixture
def still(constant):
    """The same at rate 0: a run whose weights stay where they start."""
    config = constant.copy_and_resolve_references()
    config.optim.update({"learning_rate": 0.0, "final_learning_rate": 0.0})
    config.train.steps = 3
    return config


@pytest.mark.parametrize(("name", "at"), [("@4", 4), ("", 6), ("/checkpoints/4", 4)])
def test_step_of_another_run_is_named_or_the_newest(source, still, tmp_path, name, at):
    still.init_from = f"{source}{name}"
    found = start.find(config_lib.resolve(still), tmp_path / "run")
    assert (found.run, found.at, found.step) == (source, at, 0)


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_weights_of_another_run_start_a_run_of_its_own(source, still, tmp_path, capsys, devices):
    still.init_from = f"{source}@4"
    train(still, tmp_path / "run", devices)
    assert_same_params(load(tmp_path / "run"), load(source, step=4))
    assert "source@4, the rest fresh (no own checkpoint)" in capsys.readouterr().out
    assert sorted(log(tmp_path / "run")[0]) == [1, 2, 3]
    assert newest(tmp_path / "run")[1]["rows_seen"] == 3 * 8


def test_fork_with_optimizer_and_position_is_the_run_itself(source, constant, tmp_path, capsys):
    """Unless something is changed: then it leaves the run at that step, and says how."""
    constant.init_from, constant.init_optimizer = f"{source}@3", True
    train(constant, tmp_path / "same")
    assert log(tmp_path / "same")[0] == {s: row for s, row in log(source)[0].items() if s > 3}
    assert_same_params(load(tmp_path / "same"), load(source))

    constant.optim.update({"schedule": "wsd", "cooldown_steps": 2})
    constant.train.steps = 5  # fewer than the source has
    capsys.readouterr()
    train(constant, tmp_path / "cooled")
    printed = capsys.readouterr().out
    assert "source@3, with optimizer and position" in printed
    assert "changed: optim.schedule: constant → wsd" in printed
    assert "learning rate of the next step: 1.000e-03 → 5.000e-04" in printed
    cooled = log(tmp_path / "cooled")[0]
    assert sorted(cooled) == [4, 5]
    assert cooled[4]["loss"] == log(source)[0][4]["loss"]  # before the first changed update
    assert cooled[5]["learning_rate"] == 0.0


def test_own_checkpoints_come_before_init_from(source, constant, tmp_path, capsys):
    constant.init_from = str(source)
    constant.train.steps = 4
    train(constant, tmp_path / "run")
    constant.train.steps = 5
    constant.init_from = str(tmp_path / "gone")  # it is not even looked at
    capsys.readouterr()
    train(constant, tmp_path / "run")
    printed = capsys.readouterr().out
    assert "resumed at step 4 (own checkpoints come first; init_from=" in printed
    assert sorted(log(tmp_path / "run")[0]) == [1, 2, 3, 4, 5]


def weights_alone(source, folder):
    """What another tool may write: parameters at step 0, nothing else."""
    model = load(source)
    writer = checkpoint.Checkpointer(folder, keep=1)
    writer.save(0, {"params": model.params}, {"config": model.config.to_dict()})
    writer.wait()
    writer.close()


def test_checkpoint_without_optimizer_gives_its_weights(source, still, tmp_path):
    weights_alone(source, tmp_path / "made")
    still.init_from = str(tmp_path / "made")
    train(still, tmp_path / "run")
    assert_same_params(load(tmp_path / "run"), load(source))
    assert_same_params(load(tmp_path / "made"), load(source))
    still.init_optimizer = True
    with pytest.raises(ValueError, match=r"made@0 holds weights alone; use init_optimizer=False"):
        train(still, tmp_path / "other")
    with pytest.raises(ValueError, match=r"another --workdir and --config\.init_from="):
        train(still, tmp_path / "made")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.width": 64}, "model.width: 32 → 64"),
        ({"model.num_layers": 4}, "model.num_layers: 2 → 4"),
        ({"model.tied": False}, "model.tied: True → False"),
        ({"model.residual.variant": "baseline"}, "model.residual.variant: delta_block → baseline"),
        ({"model.residual.num_blocks": 1}, "model.residual.num_blocks: 2 → 1"),
        ({"init_optimizer": True, "data.seq_len": 8}, "data.seq_len: 16 → 8"),
        (
            {"init_optimizer": True, "optim.clip_norm": 0.0, "init_from": "SOURCE@3"},
            "holds other arrays",
        ),
        ({"init_optimizer": True, "train.steps": 3}, "train.steps=3 must exceed 6"),
        ({"init_from": "SOURCE@7"}, "no checkpoint of step 7; it has [1, 2, 3, 4, 5, 6]"),
        (
            {"init_from": "nowhere"},
            "nowhere is no run: it has no checkpoints/; it must be a run, or what "
            "deltares_jax.convert import made",
        ),
        ({"init_from": "hdfs://b/run"}, "init_from='hdfs://b/run' must be a local folder"),
        ({"init_from": "", "init_optimizer": True}, "init_optimizer=True needs init_from"),
    ],
)
def test_what_does_not_fit_is_refused(source, constant, tmp_path, changes, words):
    constant.init_from = str(source)
    constant.update_from_flattened_dict(
        {k: v.replace("SOURCE", str(source)) if k == "init_from" else v for k, v in changes.items()}
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        train(constant, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_damaged_step_of_another_run_is_named_beside_those_it_has(source, constant, tmp_path):
    shutil.copytree(source, tmp_path / "copy")
    constant.init_from = str(tmp_path / "copy")
    (tmp_path / "copy" / "checkpoints" / "6" / "meta" / "metadata").write_text("")
    with pytest.raises(ValueError, match=r"6 is damaged .*RUN@STEP names another of \[1, 2, 3, 4"):
        train(constant, tmp_path / "run")


def test_arrays_that_differ_are_named(source, constant, tmp_path):
    """The config says one thing, the arrays another."""
    shutil.copytree(source, tmp_path / "copy")
    path = tmp_path / "copy" / "checkpoints" / "6" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["config"]["model"]["mlp_width"] = 32
    path.write_text(json.dumps(meta))
    constant.model.mlp_width = 32
    constant.init_from = str(tmp_path / "copy")
    shapes = re.escape("float32[2, 32, 64] → float32[2, 32, 32]")
    with pytest.raises(ValueError, match=f"params/layers/.*{shapes}"):
        train(constant, tmp_path / "run")
