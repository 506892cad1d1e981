"""The train command in a process of its own."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from run_helpers import newest

from deltares_jax import config as config_lib
from deltares_jax.data import dataset
from deltares_jax.training import metrics

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


def start_command(*arguments, prefix=(), **kwargs):
    line = [*prefix, sys.executable, "-m", "deltares_jax.train", "--config=configs/debug.py", *TINY]
    env = {**os.environ, "XLA_FLAGS": ""}
    if prefix:  # what a limit cuts off must not end up in the cache of the others
        env.pop("JAX_COMPILATION_CACHE_DIR")
    return subprocess.Popen(
        [*line, *arguments], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT, **kwargs
    )


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
