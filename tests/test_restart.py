"""A run that is stopped at any moment is the run that was left alone."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

SMALL = [
    "--config.model.width=32",
    "--config.model.num_layers=2",
    "--config.model.head_dim=16",
    "--config.model.mlp_width=64",
    "--config.data.seq_len=16",
    "--config.eval.rows=16",
    "--config.metrics.tensorboard=False",
]


def restarts(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "benchmarks/restart.py", *arguments, *SMALL],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_stops_at_random_moments_change_nothing():
    printed = restarts("--stops=6", "--seed=1")
    assert "SIGKILL" in printed
    assert "SIGTERM" in printed
    assert "\n6 stops in " in printed
    assert printed.endswith("60 steps, 6 evaluations and 60 batches: all equal\n")


@pytest.mark.slow
def test_stops_change_nothing_with_processes_that_read_ahead():
    more = ("--config.data.workers=2", "--config.train.accumulation=4")
    printed = restarts("--stops=2", "--seed=2", *more)
    assert printed.endswith("60 steps, 6 evaluations and 60 batches: all equal\n")
