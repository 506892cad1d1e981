"""Saves that fail: a full disk, a folder that cannot be written."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from run_helpers import losses, saved, train

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.training import checkpoint, metrics, programs, signals

pytestmark = pytest.mark.usefixtures("one_layer")


def test_save_that_fails_in_the_background_stops_the_run_at_the_next_steps(
    tiny, tmp_path, monkeypatch
):
    """Not at the next save: that may be hours away."""
    real = checkpoint.ocp.AsyncCheckpointer.check_for_errors
    steps = []

    def fails(self):
        if len(steps) == 3:
            raise OSError(28, "No space left on device")
        real(self)

    monkeypatch.setattr(checkpoint.ocp.AsyncCheckpointer, "check_for_errors", fails)
    write = metrics.Writer.write
    monkeypatch.setattr(
        metrics.Writer, "write", lambda w, step, row: (steps.append(step), write(w, step, row))
    )
    tiny.train.steps = 9
    tiny.checkpoint.every = 2
    with pytest.raises(signals.Stop, match=r"No space left.*; step 2 is the newest") as stop:
        train(tiny, tmp_path / "run")
    assert stop.value.code == 6
    assert max(losses(tmp_path / "run")) <= 4
    assert load(tmp_path / "run").step == 2


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(28, "No space left on device"), signals.Stop, "No space .*; step 2 is the newest"),
        (PermissionError(13, "denied", "/x/.lock"), ValueError, r"^/x/\.lock: denied; .*uid \d"),
    ],
)
def test_log_that_cannot_be_written_ends_the_run_in_words(
    tiny, tmp_path, monkeypatch, error, kind, words
):
    real = metrics.Writer.write

    def write(self, step, row):
        if step == 4:
            raise error
        real(self, step, row)

    monkeypatch.setattr(metrics.Writer, "write", write)
    tiny.checkpoint.every = 2
    with pytest.raises(kind, match=words) as raised:
        train(tiny, tmp_path / "run")
    assert getattr(raised.value, "code", 2) == (6 if kind is signals.Stop else 2)
    assert load(tmp_path / "run").step == 2


def test_user_without_a_home_goes_on_without_a_compile_cache(tiny, monkeypatch, capsys):
    def nobody(self):
        raise RuntimeError("Could not determine home directory.")

    config = config_lib.resolve(tiny)
    monkeypatch.setattr(pathlib.Path, "expanduser", nobody)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    programs.set_up_jax(config)
    assert "train.compile_cache=auto cannot be written" in capsys.readouterr().out


def command(*arguments, prefix=()):
    line = [*prefix, sys.executable, "-m", "deltares_jax.train", "--config=configs/debug.py"]
    line += ["--config.model.width=32", "--config.model.head_dim=16", "--config.model.mlp_width=64"]
    line += ["--config.model.num_layers=1", "--config.model.residual.variant=baseline"]
    line += ["--config.optim.warmup_steps=2", "--config.optim.schedule=constant"]
    line += ["--config.data.seq_len=16", "--config.eval.every=0"]
    line += ["--config.metrics.tensorboard=False", *arguments]
    env = {**os.environ, "XLA_FLAGS": ""}
    return subprocess.run(line, capture_output=True, text=True, env=env, cwd=ROOT, timeout=240)


def last_line(errors):
    """What the command says in the end, alone but for the preparation of data."""
    *others, line = errors.splitlines()
    assert all(other.startswith("preparing ") for other in others), errors
    return line


def can(*line):
    return shutil.which(line[0]) and subprocess.run(line, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(
    not can("unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"), reason="needs root"
)
def test_disk_that_is_full_at_the_second_save(tmp_path):
    """A file system of 400 kB takes one checkpoint, and not a second one."""
    (tmp_path / "small").mkdir()
    script = f'mount -t tmpfs -o size=400k none {tmp_path}/small; "$0" "$@"; code=$?; '
    script += f"ls {tmp_path}/small/run/checkpoints; exit $code"
    arguments = [f"--workdir={tmp_path}/small/run", "--config.train.steps=9"]
    arguments += ["--config.checkpoint.every=2", "--config.checkpoint.keep=5"]
    done = command(*arguments, prefix=["unshare", "-m", "sh", "-c", script])
    assert done.returncode == 6, done.stderr[-2000:]
    line = last_line(done.stderr)
    assert re.match(r"error: nothing could be saved under .*; step \d is the newest", line)
    assert re.search(r"^\d$", done.stdout, re.MULTILINE)


# Permissions bind root, too, without this.
USER = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
if os.getuid():
    USER = []


@pytest.mark.skipif(bool(USER) and not can(*USER, "true"), reason="root that cannot drop rights")
def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "run").mkdir(mode=0o555)
    done = command(f"--workdir={tmp_path}/run", prefix=USER)
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr == f"error: --workdir={tmp_path}/run cannot be written: Permission denied\n"


@pytest.mark.slow
@pytest.mark.skipif(bool(USER) and not can(*USER, "true"), reason="root that cannot drop rights")
def test_folder_that_cannot_be_written_any_more(tmp_path):
    """Its permissions change after the first checkpoint."""
    folder = tmp_path / "run" / "checkpoints"
    script = f'"$0" "$@" & run=$!; until ls {folder} 2>/dev/null | grep -qx "[0-9]*"; '
    script += f"do sleep 0.1; done; chmod 555 {folder}; wait $run"
    arguments = [f"--workdir={tmp_path}/run", "--config.train.steps=100000"]
    prefix = [*USER, "sh", "-c", script]
    done = command(*arguments, "--config.checkpoint.every=2", prefix=prefix)
    assert done.returncode == 6, done.stderr[-2000:]
    line = last_line(done.stderr)
    assert re.search(r"nothing could be saved .*ermission denied.*; step \d+ is the newest", line)
    folder.chmod(0o755)
    assert load(tmp_path / "run").step == max(saved(tmp_path / "run"))
