"""Models of tests: all variants with options, random values, inputs, logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import FrozenConfigDict

from deltares_jax.models import transformer

OPTIONS = [
    ("baseline", {}),
    ("delta_attnres", {}),
    ("delta_attnres", {"null_source": True, "gate": "scalar"}),
    ("delta_attnres", {"centered": True}),
    ("delta_block", {}),
    ("delta_block", {"null_source": True, "gate": "alpha"}),
    ("delta_block", {"centered": True, "gate": "scalar"}),
    ("attnres_block", {}),
    ("attnres_full", {}),
    ("attnres_cumulative", {}),
    ("full_additive", {}),
    ("full_additive", {"centered": True}),
    ("delta_replace", {}),
    ("delta_block_released", {}),
]
IDS = ["-".join([name, *options]) for name, options in OPTIONS]
SLOW = [
    pytest.param(*case, marks=pytest.mark.slow if case[1] else (), id=name)
    for case, name in zip(OPTIONS, IDS, strict=True)
]
plain_variants = pytest.mark.parametrize(("name", "options"), SLOW)  # those with options: slow
all_variants = pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)


def make(tiny, name="delta_block", num_layers=4, num_blocks=2, **changes) -> FrozenConfigDict:
    config = tiny.model
    residual = {
        k: changes.pop(k) for k in ("null_source", "gate", "centered", "kernel") if k in changes
    }
    config.update({"num_layers": num_layers, "vocab_size": 97, **changes})
    config.residual.update({"variant": name, "num_blocks": num_blocks, **residual})
    return FrozenConfigDict(config)


init = jax.jit(transformer.init, static_argnums=0)


def randomise(params, seed=1, scale=0.3):
    """Random values everywhere, so that queries, gates and null sources matter."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    new = [
        p + scale * jax.random.normal(k, p.shape, p.dtype)
        for p, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, new)


def inputs(B=2, T=12, seed=0, segments=None):
    ids_BT = np.random.default_rng(seed).integers(0, 97, (B, T))
    segments_BT = np.ones((B, T), np.int32) if segments is None else np.asarray(segments)
    starts = np.diff(segments_BT, axis=1, prepend=0) != 0
    index = np.broadcast_to(np.arange(T), (B, T))
    positions_BT = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return ids_BT, positions_BT, segments_BT


def logits(config, params, batch):
    @jax.jit
    def forward(params, *batch):
        hidden_BTD = transformer.apply(config, params, *batch).hidden_BTD
        head_VD = transformer.head(params).astype(hidden_BTD.dtype)
        return jnp.einsum("btd,vd->btv", hidden_BTD, head_VD)

    return np.asarray(forward(params, *batch), np.float32)
