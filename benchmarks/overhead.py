"""Step time and memory of every variant beside the baseline, on the devices of this machine.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --config=configs/220m_delta_block.py --set=train.batch_size=8
    python benchmarks/overhead.py --released=CHECKOUT --torch_python=OTHER_VENV/bin/python

Compiles the train step of each variant, then times them in turn, round by round, on random tokens:
what else the machine does meets all of them. With --released the code that came with the paper
(https://github.com/wdlctc/delta-attention-residuals-code) takes its turn in each round, too, eager
and under torch.compile, at the same shape, batch and dtype; it needs a Python with torch and
transformers. Prints Markdown: medians, ratios to the baseline, memory as the compiler counts it.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import runpy
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np

from deltares_jax import config as config_lib
from deltares_jax.interop import hf_config
from deltares_jax.models import variants
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import sharding
from deltares_jax.training import programs, step

RELEASED = {"baseline": "baseline"} | {
    ours: theirs for theirs, ours in hf_config.MODES.items() if theirs not in hf_config.OURS_ALONE
}


def read_config(args: Any, variant: str) -> Any:
    """The recipe with the settings and the variant, checked."""
    config = runpy.run_path(args.config)["get_config"]()
    pairs = dict(part.split("=", 1) for part in args.set.split(",") if part)
    flat = config_lib.flatten(config)
    for key, text in pairs.items():
        if key not in flat:
            raise ValueError(f"--set: unknown config key {key}")
        kind = type(flat[key])
        pairs[key] = text in ("True", "true") if kind is bool else kind(text)
    config.update_from_flattened_dict(pairs | {"model.residual.variant": variant})
    return config_lib.resolve(config)


class Ours:
    """The compiled step of one variant, and its state while it is timed."""

    def __init__(self, config: Any, devices: list[Any]):
        mesh = mesh_lib.make_mesh(mesh_lib.mesh_shape(config.mesh, len(devices)), devices)
        state, shardings = programs.abstract_state(config, mesh)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        self._init = jax.jit(functools.partial(step.init_state, config), out_shardings=shardings)
        self._run = programs.compile_for(programs.lower_train(config, mesh), mesh)
        self.bytes = programs.peak_bytes(self._run, devices[0].platform)
        random = np.random.default_rng(0)
        shapes = programs.abstract_batch(config, config.train.batch_size)
        batch = {key: np.ones(of.shape, of.dtype) for key, of in shapes.items()}
        for key in ("inputs", "targets"):
            ids = random.integers(config.model.vocab_size, size=shapes[key].shape)
            batch[key] = ids.astype(shapes[key].dtype)
        batch["positions"][:] = np.arange(config.data.seq_len)
        self._batch = jax.device_put(batch, sharding.batch_sharding(mesh))

    def time(self, steps: int) -> list[float]:
        """Seconds of each of some steps, after one that is not timed."""
        state, seconds = self._init(), []
        for _ in range(steps + 1):
            began = time.perf_counter()
            state, metrics = self._run(state, self._batch)
            loss = float(metrics["loss"])
            seconds.append(time.perf_counter() - began)
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        return seconds[1:]


class Released:
    """The released code in a process of its own."""

    def __init__(self, args: Any, config: Any, mode: str, compiled: bool):
        model = config.model
        given = {
            "mode": mode,
            "compile": compiled,
            "dtype": model.dtype,
            "batch_size": config.train.batch_size,
            "seq_len": config.data.seq_len,
            "num_blocks": model.residual.num_blocks,
            "vocab_size": model.vocab_size,
            "hidden_size": model.width,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "intermediate_size": model.mlp_width,
            "tie_word_embeddings": model.tied,
            "rms_norm_eps": model.norm_eps,
            "max_position_embeddings": 2 * config.data.seq_len,
        }
        script = pathlib.Path(__file__).with_name("released.py")
        line = [args.torch_python, str(script), args.released, json.dumps(given)]
        self._process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        answer = self._process.stdout.readline()
        if not answer:
            error = self._process.stderr.read().strip().splitlines()[-1:]
            raise SystemExit(f"error: {' '.join(line[:3])}: {''.join(error)}")
        self.about = json.loads(answer)
        self.parameters = self.about["parameters"]

    def time(self, steps: int) -> list[float]:
        """Seconds of each of some steps, after one that is not timed."""
        seconds = []
        for _ in range(steps + 1):
            print("step", file=self._process.stdin, flush=True)
            seconds.append(float(self._process.stdout.readline()))
        return seconds[1:]

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def markdown(times: dict[str, list[float]], runs: dict[str, Any], first: str) -> list[str]:
    """The table; each ratio is the median over the rounds of the ratio within a round."""
    lines = [
        f"| | ms a step | over {first} | MiB a device | over {first} |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times[first], strict=True))
        cells = [name, f"{1e3 * statistics.median(seconds):.1f}", f"{ratio:.3f}", "", ""]
        if isinstance(runs[name], Ours):
            cells[3:] = [
                f"{runs[name].bytes / 2**20:.0f}",
                f"{runs[name].bytes / runs[first].bytes:.3f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def against(times: dict[str, list[float]]) -> list[str]:
    """How many times faster than the released code each variant is that it has."""
    lines = ["| released code | eager takes, times ours | torch.compile takes, times ours |"]
    lines += ["|---|---|---|"]
    for name in RELEASED:
        forms = [f"{name}, released, {form}" for form in ("eager", "compiled")]
        if name not in times or forms[0] not in times:
            continue
        cells = [
            f"{statistics.median(a / b for a, b in zip(times[f], times[name], strict=True)):.2f}"
            for f in forms
            if f in times
        ]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return lines


def start(
    args: Any, devices: list[Any], stack: contextlib.ExitStack
) -> tuple[dict[str, Any], Any, list[str]]:
    """All that takes turns, a config of them, and the versions of the released code's libraries.

    Raises:
      SystemExit: the released model is not the same.
    """
    runs: dict[str, Any] = {}
    about: list[str] = []
    names = [name for name in args.variants.split(",") if name != "baseline"]
    for name in ["baseline", *names]:
        config = read_config(args, name)
        print(f"compiling {name} …", file=sys.stderr, flush=True)
        runs[name] = Ours(config, devices)
        if not args.released or name not in RELEASED:
            continue
        for form in ("eager", "compiled")[: 1 if args.no_compile else 2]:
            print(f"starting the released {name}, {form} …", file=sys.stderr, flush=True)
            released = Released(args, config, RELEASED[name], form == "compiled")
            stack.callback(released.close)
            if released.parameters != runs[name].parameters:
                counts = f"{runs[name].parameters} parameters here, {released.parameters} there"
                sys.exit(f"error: {name}: {counts}")
            runs[f"{name}, released, {form}"] = released
            about = [f"{name} {released.about[name]}" for name in ("torch", "transformers")]
    return runs, config, about


def measure(args: Any, runs: dict[str, Any]) -> dict[str, list[float]]:
    """The median step of each run in each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(args.rounds):
        for name, run in runs.items():
            times[name].append(statistics.median(run.time(args.steps)))
        print(f"round {number + 1}/{args.rounds}", file=sys.stderr, flush=True)
    return times


def main() -> None:
    """Compiles, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/debug.py")
    parser.add_argument("--set", default="", help="key=value,… over the config")
    parser.add_argument("--variants", default=",".join(variants.VARIANTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="timed in a round, for each")
    parser.add_argument("--released", default="", help="a checkout of the released code")
    parser.add_argument("--torch_python", default=sys.executable)
    parser.add_argument("--no_compile", action="store_true", help="no torch.compile")
    args = parser.parse_args()
    devices = mesh_lib.find_devices(read_config(args, "baseline"))
    with contextlib.ExitStack() as stack:
        runs, config, about = start(args, devices, stack)
        times = measure(args, runs)
    model, about = config.model, ["jax " + importlib.metadata.version("jax"), *about]
    print(
        f"{args.config} {args.set}: {model.num_layers} layers of width {model.width}, batch "
        f"{config.train.batch_size} × {config.data.seq_len}, {model.dtype}, remat {model.remat}; "
        f"{len(devices)} × {devices[0].device_kind} ({platform.machine()}, {os.cpu_count()} "
        f"cores), {', '.join(about)}; medians of {args.rounds} rounds of {args.steps} steps\n"
    )
    print(*markdown(times, runs, "baseline"), sep="\n")
    if args.released:
        print("", *against(times), sep="\n")


if __name__ == "__main__":
    main()
