"""Whole runs: what is left behind, read again, continued, refused."""

import json
import shutil

import jax
import numpy as np
import pytest
from run_helpers import log, train

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.data import dataset, ngram, pipeline
from deltares_jax.models import transformer, variants
from deltares_jax.training import metrics


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
    assert sorted(log(tmp_path / "copy")[0]) == [1, 2, 3, 4, 5, 6, 7, 8]


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
    assert sorted(log(tmp_path / "run")[0]) == [1, 2, 3, 4, 5, 6, 7]


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
