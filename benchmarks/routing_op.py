"""Routing alone, forward and backward: the rule over the depth against the direct form.

    python benchmarks/routing_op.py
    python benchmarks/routing_op.py --tokens=1024 --dtype=bfloat16

Every sublayer is replaced by a multiplication, so what is left is Delta AttnRes over all layers:
logits, softmax, mix, and the gradients of sources, queries and gains. The direct form stacks the
sources of each reader, normalises them, and is differentiated by jax. Prints the times of one step
on the first device, best of several, and their ratio; checks that the gradients agree. Beside them
the time that the device's memory needs for the bytes which have to move: each reader reads its
sources once forward and twice backward, at the bandwidth that a large copy reaches in this run.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.models import kept, residual, sources_rule
from deltares_jax.models.routing_ops import statistics_dtype

EPS = 1e-6


def made_up_sublayer(_: Any, params: Any, kind: str, x_BTD: jax.Array, context: Any) -> jax.Array:
    """Stands in for attention and MLP."""
    return (x_BTD * params[kind]["scale"]).astype(x_BTD.dtype)


def direct(config: Any, layers: Any, embedding_BTD: jax.Array) -> jax.Array:
    """The stream after all layers, each reader on a stack of its sources."""
    h_BTD, sources = embedding_BTD, [embedding_BTD]
    wide = statistics_dtype(embedding_BTD.dtype)
    for layer in range(config.num_layers):
        for kind in ("attn", "mlp"):
            mix_BTD = jnp.zeros(embedding_BTD.shape, wide)
            routing = layers[f"{kind}_reader"]["routing"]
            if len(sources) > 1 or kind == "mlp":
                stack_SBTD = jnp.stack(sources).astype(wide)
                square_SBT1 = jnp.mean(jnp.square(stack_SBTD), axis=-1, keepdims=True)
                gain_111D = routing["gain"][layer][None, None, None]
                keys_SBTD = stack_SBTD * jax.lax.rsqrt(square_SBT1 + EPS) * gain_111D
                logits_SBT = jnp.einsum("sbtd,d->sbt", keys_SBTD, routing["query"][layer])
                weights_SBT = jax.nn.softmax(logits_SBT, axis=0)
                mix_BTD = jnp.einsum("sbt,sbtd->btd", weights_SBT, stack_SBTD)
            x_BTD = residual.sublayer_input(config, h_BTD, mix_BTD, None)
            params = jax.tree.map(lambda p, layer=layer: p[layer], layers)
            y_BTD = made_up_sublayer(config, params, kind, x_BTD, None)
            h_BTD = h_BTD + y_BTD
            sources.append(y_BTD)
    return h_BTD


def bandwidth() -> float:
    """Bytes a second, read and written, of a sum over an array much larger than any cache."""
    x = jnp.ones(2**26, jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    best = np.inf
    for _ in range(8):
        began = time.perf_counter()
        x = jax.block_until_ready(add(x))
        best = min(best, time.perf_counter() - began)
    return 2 * x.nbytes / best


def least_bytes(layers: int, source_bytes: int) -> int:
    """What moves at least: 1, 1, 2, … 2L sources, for a sublayer each, once and twice more."""
    return 3 * source_bytes * sum(max(sublayer, 1) for sublayer in range(2 * layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--layers", type=int, default=36, help="2 × this + 1 sources")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kernel", default="direct", help="of the rule: direct or batched")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    config = config_lib.default().model
    config.update({"width": args.width, "num_layers": args.layers, "dtype": args.dtype})
    config.update({"remat": "full", "norm_eps": EPS})
    config.residual.update({"variant": "delta_attnres", "kernel": args.kernel})
    config = FrozenConfigDict(config.to_dict())
    L, D = args.layers, args.width
    keys = iter(jax.random.split(jax.random.key(0), 6))
    layers: dict[str, Any] = {}
    for kind in ("attn", "mlp"):
        layers[f"{kind}_norm"] = {"gain": jnp.ones((L, D))}
        layers[kind] = {"scale": 0.1 * jax.random.normal(next(keys), (L, D))}
        query_LD = 0.1 * jax.random.normal(next(keys), (L, D))
        layers[f"{kind}_reader"] = {"routing": {"query": query_LD, "gain": jnp.ones((L, D))}}
    e_BTD = jax.random.normal(next(keys), (1, args.tokens, D)).astype(args.dtype)
    kept.apply_sublayer = made_up_sublayer

    def rule(layers: Any, e_BTD: jax.Array) -> jax.Array:
        return sources_rule.run(config, layers, {}, e_BTD, None, None)

    def step(form: Any) -> Any:
        def loss(layers: Any, e_BTD: jax.Array) -> jax.Array:
            return jnp.mean(jnp.sin(form(layers, e_BTD).astype(jnp.float32)))

        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(layers, e_BTD).compile()

    times, grads = {}, {}
    for name, form in (("direct", lambda *a: direct(config, *a)), ("rule", rule)):
        run = step(form)
        grads[name] = jax.block_until_ready(run(layers, e_BTD))
        times[name] = np.inf
        for _ in range(args.steps):
            began = time.perf_counter()
            jax.block_until_ready(run(layers, e_BTD))
            times[name] = min(times[name], time.perf_counter() - began)
        per_token = 1e6 * times[name] / args.tokens
        print(f"{name:7} {1e3 * times[name]:9.1f} ms, {per_token:.1f} µs a token")
    for a, b in zip(*map(jax.tree.leaves, (grads["direct"], grads["rule"])), strict=True):
        error = np.max(np.abs(np.float64(a) - np.float64(b))) / (
            np.max(np.abs(np.float64(a))) + 1e-30
        )
        limit = 1e-3 if args.dtype == "float32" else 1e-1
        assert error < limit or not np.any(np.float64(a)), f"gradients differ by {error:.1e}"
    print(f"ratio   {times['direct'] / times['rule']:.2f}, {jax.devices()[0].device_kind}")
    moved, speed = least_bytes(L, e_BTD.nbytes), bandwidth()
    print(
        f"memory  {moved / 1e9:.2f} GB at least, {1e3 * moved / speed:.1f} ms at the measured "
        f"{speed / 1e9:.1f} GB/s; the rule takes {times['rule'] * speed / moved:.1f} times that, "
        f"the direct form {times['direct'] * speed / moved:.1f} times"
    )


if __name__ == "__main__":
    main()
