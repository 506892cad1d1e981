"""Everything that only a GPU can show, as one script of less than five minutes on one GPU.

    python benchmarks/gpu_check.py --out=docs/results/gpu.md

In this order: the reference numbers of tests/golden, in float32, gradients too; attention by cuDNN
in bfloat16 against the plain form, and that no document there sees another; step time and memory
of every variant beside the baseline, at a shape of the 220M model with fewer layers. What the time
does not reach is named. Writes Markdown; ends with 1 when a number is off. `--platform=cpu` tries
the script itself, without cuDNN.
"""

import argparse
import importlib.metadata
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import overhead

from deltares_jax.models import attention, variants

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
SHAPE = "model.num_layers=4,train.batch_size=8"
SMALL = "model.num_layers=4,train.batch_size=2,data.seq_len=64"


class Check:
    """Lines of the page, whether all was right, and how much time is left."""

    def __init__(self, seconds: float):
        self.lines: list[str] = []
        self.wrong: list[str] = []
        self.missed: list[str] = []
        self._end = time.monotonic() + seconds

    def put(self, *lines: str) -> None:
        """Adds to the page, and shows it."""
        self.lines += lines
        print(*lines, sep="\n", flush=True)

    def late(self, what: str) -> bool:
        """Whether no time is left for it, which is then on the page."""
        if time.monotonic() > self._end:
            self.missed.append(what)
            return True
        return False


def golden(check: Check) -> None:
    """The reference numbers of every variant, with matmuls in full float32."""
    sys.path.insert(0, str(TESTS))
    import test_golden

    check.put("", "## Reference numbers, float32", "")
    for variant in variants.VARIANTS:
        name = f"B1_{variant}"
        if check.late(name):
            continue
        try:
            with jax.default_matmul_precision("highest"):
                test_golden.check_float32(name)
            check.put(f"- {variant}: logits, routing weights, loss and gradients as they should be")
        except AssertionError as error:
            check.wrong.append(name)
            check.put(f"- {variant}: OFF: {' '.join(str(error).split())[:300]}")


def isolation(check: Check, implementation: str) -> None:
    """One document's output when only the other's keys and values change; and against float32."""
    B, T, H, K, d, cut = 2, 512, 8, 4, 64, 200
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((B, T, H, d), (B, T, K, d), (B, T, K, d))
    q, k, v = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
    segments_BT = jnp.broadcast_to(jnp.where(jnp.arange(T) < cut, 1, 2), (B, T))

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        def total(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            out = attention.attend(q, k, v, segments_BT, implementation)
            return jnp.sum(jnp.sin(out[:, cut:].astype(jnp.float32))), out

        grads, out = jax.grad(total, argnums=(1, 2), has_aux=True)(q, k, v)
        return out, grads

    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    out, grads = both(*low)
    changed, _ = both(low[0], low[1].at[:, :cut].add(1), low[2].at[:, :cut].add(1))
    with jax.default_matmul_precision("highest"):
        exact = attention.reference(*(x.astype(jnp.float32) for x in low), segments_BT)
    error = float(jnp.max(jnp.abs(out.astype(jnp.float32) - exact)))
    leaks = int(np.sum(np.asarray(out[:, cut:]) != np.asarray(changed[:, cut:])))
    leaks += sum(int(np.sum(np.asarray(grad[:, :cut]) != 0)) for grad in grads)
    check.put("", f"## Attention by {implementation}, bfloat16, two documents in a row", "")
    check.put(f"- largest difference to float32: {error:.4f} (at most 0.03)")
    check.put(f"- values and gradients that see the other document: {leaks}")
    check.wrong += [implementation] if leaks or not error <= 0.03 else []


def steps(check: Check, args: argparse.Namespace) -> None:
    """Step time and memory of every variant, in turn."""
    runs: dict[str, Any] = {}
    for name in variants.VARIANTS:
        if check.late(f"step of {name}"):
            continue
        config = overhead.read_config(args, name)
        runs[name] = overhead.Ours(config, jax.devices()[:1])
        print(f"compiled {name}", file=sys.stderr, flush=True)
    if len(runs) < 2:
        return
    times = overhead.measure(args, runs)
    check.put("", f"## Steps: {args.config} with {args.set}, {config.model.dtype}", "")
    check.put(*overhead.markdown(times, runs, "baseline"))
    check.put("", f"Medians of {args.rounds} rounds of {args.steps} steps, the variants in turn.")


def main() -> int:
    """Runs the checks; 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--config", default="")
    parser.add_argument("--set", default="")
    parser.add_argument("--seconds", type=float, default=240, help="after them nothing is begun")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    try:
        device = jax.devices(args.platform)[0]
    except RuntimeError:
        sys.exit("error: no GPU: `pip install 'deltares-jax[cuda]'`, or try --platform=cpu")
    on_gpu = args.platform == "gpu"
    args.config = args.config or f"configs/{'220m_delta_block' if on_gpu else 'debug'}.py"
    args.set = args.set or (SHAPE if on_gpu else SMALL)
    began, check = time.monotonic(), Check(args.seconds)
    version = importlib.metadata.version("jax")
    check.put("# Checked on a GPU" if on_gpu else "# Tried without a GPU", "")
    check.put(f"`python benchmarks/gpu_check.py`, {device.device_kind}, jax {version}.")
    isolation(check, "cudnn" if on_gpu else "reference")
    golden(check)
    steps(check, args)
    check.put(
        "", f"Took {time.monotonic() - began:.0f} s. Off: {', '.join(check.wrong) or 'none'}."
    )
    if check.missed:
        check.put(f"Not reached in {args.seconds:.0f} s: {', '.join(check.missed)}.")
    if args.out:
        args.out.write_text("\n".join(check.lines) + "\n")
    return 1 if check.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
