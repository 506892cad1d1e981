"""What watches over a run: updates that are skipped, stalls, the clock, W&B's id."""

import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config
from run_helpers import newest, train

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.data import pipeline
from deltares_jax.training import clock, metrics, signals, stall, step

pytestmark = pytest.mark.usefixtures("one_layer")


def poison(monkeypatch, *numbers):
    """Makes the loss of some steps NaN, by a token that does not exist."""
    real = pipeline.train_batches

    def batches(rows, order, size, rows_seen, *rest):
        for number, batch in enumerate(real(rows, order, size, rows_seen, *rest), 1):
            if number + rows_seen // size in numbers:
                batch = {**batch, "inputs": np.full_like(batch["inputs"], 9999)}
            yield batch

    monkeypatch.setattr(pipeline, "train_batches", batches)


# Updates that are not made.


def test_skipped_update_leaves_parameters_and_moments_and_is_counted(
    tiny, tmp_path, monkeypatch, capsys
):
    tiny.train.update({"nonfinite": "skip", "accumulation": 4})
    tiny.checkpoint.update({"every": 1, "keep": 9})
    poison(monkeypatch, 3, 5)
    result = train(tiny, tmp_path / "run")
    rows = metrics.read_rows(tmp_path / "run")[0]
    assert [s for s in range(1, 7) if rows[s]["loss"] is None] == [3, 5]
    assert [rows[s]["skipped"] for s in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    assert rows[6]["learning_rate"] == pytest.approx(1e-4)  # the schedule went on
    assert "step 3: loss nan" in capsys.readouterr().out
    assert result["last_loss"] == rows[6]["loss"]
    params = {s: load(tmp_path / "run", step=s).params for s in (2, 3, 4)}
    jax.tree.map(np.testing.assert_array_equal, params[2], params[3])
    assert np.any(params[3]["embedding"] != params[4]["embedding"])
    assert newest(tmp_path / "run")[1]["skipped"] == 2


def test_too_many_skipped_updates_stop_the_run_also_after_a_restart(tiny, tmp_path, monkeypatch):
    tiny.train.update({"nonfinite": "skip", "nonfinite_limit": 1, "steps": 4})
    tiny.optim.schedule = "constant"
    poison(monkeypatch, 3, 5)
    train(tiny, tmp_path / "run")
    tiny.train.steps = 6
    with pytest.raises(signals.Stop, match=r"step 5: .*train\.nonfinite_limit=1 allows") as stop:
        train(tiny, tmp_path / "run")
    assert stop.value.code == 4
    assert load(tmp_path / "run").step == 4


@pytest.fixture(scope="module")
def guarded():
    """A train step with the spike guard, and a state whose window of norms is full of ones."""
    config = tiny_config()
    config.model.num_layers = 1
    config.model.residual.variant = "baseline"
    config.train.spike_factor = 3.0
    config = config_lib.resolve(config)
    state = step.init_state(config)
    rows = pipeline.Rows(np.arange(8 * 16 + 1) % 97, 16, end_of_text=256)
    batch = next(pipeline.eval_batches(rows, 8, 8))
    return jax.jit(lambda s: step.train_step(config, s, batch)), state


def window(state, value):
    return state.replace(norms=jnp.full_like(state.norms, value))


def test_update_of_a_spike_is_not_made(guarded):
    train_step, state = guarded
    norm = float(train_step(state)[1]["grad_norm"])
    for usual, spike in ((norm / 2.9, False), (norm / 3.1, True)):
        after, numbers = train_step(window(state, usual))
        assert bool(numbers["spike"]) == spike
        assert bool(numbers["finite"])
        same = np.array_equal(after.params["embedding"], state.params["embedding"])
        assert same == spike
        assert int(after.step) == 1  # the schedule goes on
        assert float(after.norms[-1]) == pytest.approx(norm)
    mu = jax.tree.leaves(after.opt_state)
    old = jax.tree.leaves(state.opt_state)
    changed = [i for i, (a, b) in enumerate(zip(mu, old, strict=True)) if np.any(a != b)]
    assert [mu[i].shape for i in changed] == [()]  # the schedule's count alone


def test_guard_waits_until_it_knows_what_is_usual(guarded):
    train_step, state = guarded
    after, numbers = train_step(window(state, 1e-6).replace(norms=state.norms.at[1:].set(1e-6)))
    assert not numbers["spike"]
    assert np.any(after.params["embedding"] != state.params["embedding"])


def test_lasting_rise_of_the_norm_is_taken_for_usual(guarded):
    """Else the run would skip every update from then on."""
    train_step, state = guarded
    state, skipped = window(state, 1e-3), []
    for _ in range(step.NORMS):
        state, numbers = train_step(state)
        skipped.append(bool(numbers["spike"]))
    assert skipped[0]
    assert not skipped[-1]


@pytest.mark.slow
def test_guard_may_be_switched_on_and_off_in_a_run(tiny, tmp_path):
    tiny.optim.schedule = "constant"
    for steps, factor in ((3, 0.0), (4, 5.0), (5, 4.0), (6, 0.0)):
        tiny.train.update({"steps": steps, "spike_factor": factor})
        train(tiny, tmp_path / "run")
    rows = metrics.read_rows(tmp_path / "run")[0]
    assert ["spikes" in rows[s] for s in (3, 4, 5, 6)] == [False, True, True, False]


# Stalls.


def test_stall_writes_the_stacks_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stall, "LEAST_SECONDS", 0.2)
    watchdog = stall.Watchdog(tmp_path, 2.0)

    def a_step_that_hangs():
        deadline = time.monotonic() + 30
        while not watchdog.path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)

    watchdog.step()
    watchdog.step()
    a_step_that_hangs()
    watchdog.close()
    text = watchdog.path.read_text()
    assert "a_step_that_hangs" in text
    assert text.count("no step for") == 1
    assert "the stacks of all threads are in" in capsys.readouterr().out


def test_stall_between_two_steps_is_one_too(tmp_path, monkeypatch):
    """In a save, or a batch of an evaluation; the time of those is none of a step."""
    monkeypatch.setattr(stall, "LEAST_SECONDS", 0.2)
    watchdog = stall.Watchdog(tmp_path, 2.0)
    watchdog.step()
    watchdog.step()
    watchdog.moved()
    time.sleep(0.15)
    watchdog.moved()
    time.sleep(0.15)
    watchdog.step()
    assert not watchdog.path.exists()
    assert len(watchdog._times) == 1
    watchdog.moved()
    deadline = time.monotonic() + 30
    while not watchdog.path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    watchdog.close()
    assert "no step for" in watchdog.path.read_text()


def test_pause_and_first_compilation_are_no_stall(tmp_path, monkeypatch):
    monkeypatch.setattr(stall, "LEAST_SECONDS", 0.1)
    watchdog = stall.Watchdog(tmp_path, 1.5)
    time.sleep(0.4)  # nothing was stepped yet
    watchdog.step()
    watchdog.step()
    watchdog.pause()
    time.sleep(0.4)
    watchdog.close()
    assert not watchdog.path.exists()


# The clock.


def test_clock_gives_every_second_to_one_kind(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    watch = clock.Clock()
    now[0] += 1
    watch.turn_to("steps")
    now[0] += 10
    with watch.spent_on("input"):
        now[0] += 2
        with watch.spent_on("save"):
            now[0] += 4
    now[0] += 20
    watch.add({"steps": 100.0, "lost": 5.0}, lost=3.0)
    expected = {"start": 1, "steps": 130, "input": 2, "save": 4, "lost": 8}
    assert {k: v for k, v in watch.seconds().items() if v} == expected
    assert watch.stepping() == 32
    assert clock.shares({"steps": 3.0, "lost": 1.0, "save": 0.0}) == {"steps": 0.75, "lost": 0.25}


def test_goodput_counts_steps_that_were_lost(tiny, tmp_path, monkeypatch, capsys):
    """Killed after step 5, with a checkpoint of step 4: step 5 is made twice."""
    tiny.checkpoint.every = 4
    real = metrics.Progress.update

    def update(progress, row, number, seconds):
        real(progress, row, number, seconds)
        if number == 5:
            time.sleep(0.5)
        if number == 6 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            raise ArithmeticError

    monkeypatch.setattr(metrics.Progress, "update", update)
    tiny.train.steps = 7
    with pytest.raises(ArithmeticError):
        train(tiny, tmp_path / "run")
    result = train(tiny, tmp_path / "run")
    seconds = newest(tmp_path / "run")[1]["clock"]
    assert seconds["lost"] >= 0.5
    assert seconds["steps"] > 0
    row = metrics.read_rows(tmp_path / "run")[0][7]
    assert 0 < row["goodput"] < 1
    assert row["seconds"] >= seconds["lost"] + seconds["steps"]
    assert 0 < result["goodput"] < 1
    assert " lost " in capsys.readouterr().out.split("\ntime: ")[1].splitlines()[0]


# W&B.


def test_wandb_that_cannot_begin_is_said_in_one_line(tiny, tmp_path, monkeypatch):
    def init(**_):
        raise RuntimeError("No API key configured.\nmore")

    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tiny.metrics.wandb = True
    with pytest.raises(ValueError, match=r"\(No API key configured\.\); .*WANDB_MODE=offline"):
        metrics.Writer(tmp_path, config_lib.resolve(tiny))


def test_wandb_goes_on_with_the_same_run(tiny, tmp_path, monkeypatch):
    """Two runs of the same folder name are two runs there."""
    begun = []

    def init(**kwargs):
        begun.append(kwargs)
        return types.SimpleNamespace(log=lambda row, step: None, finish=lambda: None)

    fake = types.ModuleType("wandb")
    fake.init = init
    fake.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(metrics, "check", lambda config: None)
    tiny.metrics.wandb = True
    tiny.optim.schedule = "constant"
    for steps in (3, 4):
        tiny.train.steps = steps
        train(tiny, tmp_path / "a" / "run")
    train(tiny, tmp_path / "b" / "run")
    first, again, other = begun
    assert first["id"] == again["id"] != other["id"]
    assert first["resume"] == "allow"
