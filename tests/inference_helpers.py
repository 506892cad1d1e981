"""Checkpoints to evaluate and to sample from, made without training."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
from conftest import ROOT
from model_helpers import init, randomise
from process_helpers import free_port

from deltares_jax import config as config_lib
from deltares_jax.inference import trained
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import sharding
from deltares_jax.training import checkpoint


def write_run(config, folder, steps=(2,), devices=8, losses=None) -> pathlib.Path:
    """A run's folder with checkpoints of random weights that lay on several devices."""
    config = config_lib.resolve(config)
    params = randomise(init(config.model, jax.random.key(0)), scale=0.1)
    shape = mesh_lib.mesh_shape(config.mesh, devices)
    mesh = mesh_lib.make_mesh(shape, jax.devices()[:devices])
    params = jax.device_put(params, sharding.state_shardings(params, mesh))
    with checkpoint.Checkpointer(folder, keep=9) as writer:
        for step in steps:
            writer.save(step, {"params": params}, {"config": config.to_dict()})
            params = jax.tree.map(lambda p: p * 1.01, params)
    rows = [{"step": step, "eval_loss": loss} for step, loss in (losses or {}).items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def open_run(folder, mesh="", devices=1, step="") -> trained.Trained:
    folder, step = trained.find(str(folder), step)
    config = trained.saved_config(folder, step)
    return trained.load(folder, step, config, mesh, jax.devices()[:devices])


def bare_command(home, name, *flags) -> subprocess.CompletedProcess:
    """Runs a command on one device as on a bare machine: no network, home, display or accounts."""
    line = [sys.executable, "-m", f"deltares_jax.{name}", *flags]
    can = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    if can.returncode == 0:
        line = ["unshare", "-n", *line]
    env = {**os.environ, "XLA_FLAGS": "", "HOME": str(home / "home")}
    del env["XDG_CACHE_HOME"]
    env |= dict.fromkeys(("DISPLAY", "HF_TOKEN", "WANDB_API_KEY"), "")
    # Where the network cannot be taken away.
    env |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    return subprocess.run(
        line, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )


def two_processes(name, *flags) -> list[str]:
    """What each of two processes of a command prints."""
    env = {
        **os.environ,
        "XLA_FLAGS": "",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"deltares_jax.{name}", *flags],
            env={**env, "JAX_PROCESS_ID": str(index)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    results = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    return [out for out, _ in results]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
