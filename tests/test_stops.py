"""Signals at any moment: what is saved, what the exit code and the message say."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import tiny_config
from run_helpers import log, train

from deltares_jax import load
from deltares_jax.training import checkpoint, evaluation, metrics, programs, signals

pytestmark = pytest.mark.usefixtures("one_layer")


def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def at_step(monkeypatch, step, *numbers):
    """Sends signals when the numbers of a step are read."""
    real = metrics.Progress.update

    def update(progress, row, number, seconds):
        real(progress, row, number, seconds)
        if number == step:
            for number in numbers or (signal.SIGTERM,):
                send(number)

    monkeypatch.setattr(metrics.Progress, "update", update)


def stopped(config, folder, words, code):
    with pytest.raises(signals.Stop, match=words) as stop:
        train(config, folder)
    assert stop.value.code == code


def test_stop_in_the_first_compilation_does_not_wait_for_it(tiny, tmp_path, monkeypatch):
    went_on = threading.Event()

    def slow(*_):
        send()
        went_on.wait(20)

    monkeypatch.setattr(programs, "compile_for", slow)
    began = time.monotonic()
    stopped(tiny, tmp_path / "run", "SIGTERM before a step was made; nothing was saved", 144)
    assert time.monotonic() - began < 20
    went_on.set()


def test_stop_in_the_compilation_of_a_resumed_run_names_what_is_kept(tiny, tmp_path, monkeypatch):
    tiny.optim.schedule = "constant"
    train(tiny, tmp_path / "run")
    tiny.train.steps = 9
    real = programs.compile_for
    monkeypatch.setattr(programs, "compile_for", lambda *args: (send(), real(*args))[1])
    stopped(tiny, tmp_path / "run", "made; step 6 is the newest checkpoint", 144)


def evaluated(config):
    config.model.num_layers = 1
    config.model.residual.variant = "baseline"
    config.eval.update({"every": 2, "rows": 24})
    config.checkpoint.every = 3
    return config


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What a run made that was left alone, and evaluated every second step."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(evaluated(tiny_config()), folder)
    return log(folder)


# In between, and after the last step.
@pytest.mark.parametrize("at", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_stop_in_an_evaluation_loses_nothing(tiny, straight, tmp_path, monkeypatch, at):
    evaluated(tiny)
    real, calls = evaluation.pipeline.eval_batches, []

    def batches(*args):
        calls.append(args)
        for number, batch in enumerate(real(*args)):
            if len(calls) == at // 2 and number == 1:
                send()
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(evaluation.pipeline, "eval_batches", batches)
        stopped(tiny, tmp_path / "stopped", f"after step {at}, which is saved", 143)
    assert at not in log(tmp_path / "stopped")[1]
    train(tiny, tmp_path / "stopped")
    assert log(tmp_path / "stopped") == straight


def test_stop_at_an_evaluated_step_leaves_the_evaluation_to_the_next_run(
    tiny, straight, tmp_path, monkeypatch
):
    evaluated(tiny)
    with monkeypatch.context() as patch:
        at_step(patch, 3)  # noticed at step 4
        stopped(tiny, tmp_path / "stopped", "after step 4, which is saved", 143)
    train(tiny, tmp_path / "stopped")
    assert log(tmp_path / "stopped") == straight


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_stop_of_a_command_that_still_starts(name):
    """Not 143, which would say that something was saved."""
    code = "from deltares_jax.training import signals as s; import signal, os, time; "
    code += f"s.end_on_request(); os.kill(os.getpid(), signal.{name}); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 144
    assert done.stderr == f"stopped by {name} outside of training; there is nothing to save\n"


def test_second_sigterm_changes_nothing(tiny, tmp_path, monkeypatch):
    at_step(monkeypatch, 3, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP)
    stopped(tiny, tmp_path / "run", "stopped by SIGTERM after step 4, which is saved", 143)
    assert load(tmp_path / "run").step == 4


def test_second_interrupt_does_not_wait_for_the_save(tiny, tmp_path, monkeypatch):
    tiny.checkpoint.every = 2
    real = checkpoint.Checkpointer.save

    def save(self, step, *rest):
        if step == 4:
            self.wait()
            send(signal.SIGINT)
        real(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpointer, "save", save)
        at_step(patch, 3, signal.SIGINT)
        words = "SIGINT and interrupted again; step 2 is the newest checkpoint"
        stopped(tiny, tmp_path / "run", words, 144)
    train(tiny, tmp_path / "run")
    assert sorted(log(tmp_path / "run")[0]) == [1, 2, 3, 4, 5, 6]


def test_stop_while_the_last_save_is_being_written(tiny, tmp_path, monkeypatch):
    """The save of step 4 is on its way when the request comes: one more is made, or none."""
    tiny.checkpoint.every = 4
    real = checkpoint.Checkpointer.save

    def save(self, step, *rest):
        real(self, step, *rest)
        send()

    monkeypatch.setattr(checkpoint.Checkpointer, "save", save)
    stopped(tiny, tmp_path / "run", "after step 5, which is saved", 143)
    assert load(tmp_path / "run").step == 5


def test_stop_that_cannot_save_falls_back_and_says_so(tiny, tmp_path, monkeypatch):
    tiny.checkpoint.every = 2
    real = checkpoint.Checkpointer.save

    def save(self, step, *rest):
        if step == 3:
            raise checkpoint.SaveError("nothing could be saved: No space left on device")
        real(self, step, *rest)

    monkeypatch.setattr(checkpoint.Checkpointer, "save", save)
    at_step(monkeypatch, 2)
    words = r"stopped by SIGTERM, but nothing could be saved: No space.*; step 2 is the newest"
    stopped(tiny, tmp_path / "run", words, 144)
    assert load(tmp_path / "run").step == 2
