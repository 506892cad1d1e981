"""Runs on data: positions, changes on resume, mixtures, evaluation sets, the end."""

import math
import pathlib

import jax
import pytest
from run_helpers import newest

from deltares_jax import config as config_lib
from deltares_jax.data import dataset, pipeline
from deltares_jax.training import loop, metrics, signals

T = 16


@pytest.fixture
def run(tiny, corpora, tmp_path):
    """Trains a small model on the long corpus, with changes; the run's folder."""
    tiny.model.update({"num_layers": 1})
    tiny.model.residual.variant = "baseline"
    tiny.optim.schedule = "constant"  # the same program for any number of steps
    tiny.data.update({"source": "text", "dir": str(corpora / "long")})

    def train(name: str = "run", **changes) -> pathlib.Path:
        config = tiny.copy_and_resolve_references()
        for key, value in changes.items():
            section, _, key = key.partition("__")
            config[section][key] = value
        folder = tmp_path / name
        loop.train(config_lib.resolve(config), str(folder), devices=jax.devices()[:1])
        return folder

    return train


def losses(folder: pathlib.Path) -> dict[int, float]:
    return {step: row["loss"] for step, row in metrics.read_rows(folder)[0].items()}


def test_resumed_runs_see_the_rows_that_are_left(run, monkeypatch):
    """Stopped after five steps and started again: the same batches as in one go."""
    seen = []
    real = pipeline.train_batches

    def recorded(rows, order, batch_size, rows_seen, *rest):
        for number, batch in enumerate(real(rows, order, batch_size, rows_seen, *rest)):
            seen.append((rows_seen + number * batch_size, batch["inputs"].tobytes()))
            yield batch

    monkeypatch.setattr(pipeline, "train_batches", recorded)
    straight = run("straight", train__steps=9)
    whole, seen[:] = list(seen), []
    run("cut", train__steps=5)
    cut = run("cut", train__steps=9)
    positions = [at for at, _ in seen]
    assert positions == [at for at, _ in whole] == list(range(0, 72, 8))
    assert [batch for _, batch in seen] == [batch for _, batch in whole]
    assert losses(cut) == losses(straight)
    assert newest(cut)[1]["rows_seen"] == 72


def test_change_of_batch_goes_on_at_the_right_row_and_says_so(run, capsys):
    run(train__steps=3)
    capsys.readouterr()
    folder = run(train__steps=6, train__batch_size=4, train__accumulation=2)
    printed = capsys.readouterr().out
    assert "train.batch_size: 8 → 4" in printed
    assert "text: next is row 25 of" in printed
    assert newest(folder)[1]["rows_seen"] == 3 * 8 + 3 * 4


def test_other_data_is_refused_unless_it_is_allowed(run, corpora, capsys):
    folder = run(train__steps=3)
    other = {"data__dir": str(corpora / "short"), "train__steps": 4}
    for changes in (other, {"train__seed": 7}, {"data__seq_len": 8}):
        with pytest.raises(ValueError, match=r"cannot be resumed.*data\.allow_change=True"):
            run(**changes)
    capsys.readouterr()
    run(**other, data__allow_change=True)
    printed = capsys.readouterr().out
    assert "changed on resume: data: row 24 of the old → the first row of the new order" in printed
    assert "text: next is row 1 of" in printed
    meta = newest(folder)[1]
    assert (meta["step"], meta["rows_seen"]) == (4, 8)
    run(**{**other, "train__steps": 5})  # from now on this is its data
    assert newest(folder)[1]["rows_seen"] == 16


def test_used_up_data_comes_again_in_a_new_order(run, corpora, capsys):
    folder = run(data__dir=str(corpora / "short"), train__steps=5, eval__every=2)
    rows = len(dataset.Dataset(corpora / "short", T).rows["train"])
    assert 16 < rows < 32
    printed = capsys.readouterr().out
    step = math.ceil(rows / 8)
    assert f"step {step}: epoch 1 of text is complete; its rows come again, in a new ord" in printed
    assert newest(folder)[1]["rows_seen"] == 40
    assert "eval.every=2, but the data have no held-out text" in printed
    assert not metrics.read_rows(folder)[1]


def test_data_that_end_stop_the_run_after_a_save(run, corpora, tmp_path):
    rows = len(dataset.Dataset(corpora / "short", T).rows["train"])
    ends = {"data__dir": str(corpora / "short"), "data__repeat": False, "train__steps": 10}
    for _ in range(2):  # and again, when there is nothing left
        with pytest.raises(
            signals.Stop, match=f"{rows % 8} rows are left, a batch needs 8"
        ) as stop:
            run(**ends)
        assert stop.value.code == 5
    assert newest(tmp_path / "run")[0] == rows // 8


def test_mixture_trains_and_evaluates_each_of_its_sources(run, corpora, capsys):
    mixture = f"{corpora / 'long'}=3,{corpora / 'short'}=1"
    sets = f"web={corpora / 'long'},own={corpora / 'held'},seen={corpora / 'short'}:train"
    folder = run(data__mixture=mixture, eval__sets=sets, eval__every=3)
    printed = capsys.readouterr().out
    assert "75.00% of the rows" in printed
    for name in ("long", "short"):  # both are of the source `text`
        assert f"{corpora / name} train: " in printed
    assert "held-out loss of web" in printed
    rows, held_out = metrics.read_rows(folder)
    assert len(rows) == 6
    assert sorted(held_out) == [3, 6]
    plain = run("plain", eval__sets=f"own={corpora / 'held'}", eval__every=6, data__mixture=mixture)
    alone = metrics.read_rows(plain)[1][6]
    last = held_out[6]
    for name in ("loss", "perplexity", "tokens"):
        assert last[f"eval_{name}/own"] == alone[f"eval_{name}"]
        assert {f"eval_{name}", f"eval_{name}/seen"} <= set(last)
    with pytest.raises(ValueError, match=r"data.mixture"):
        run(data__mixture=f"{corpora / 'long'}=1,{corpora / 'short'}=1", train__steps=9)
