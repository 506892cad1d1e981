"""Token by token with cached keys and values, against the whole row at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_model import IDS, OPTIONS, init, inputs, logits, make, randomise

from deltares_jax.models import decode, transformer, variants

B, T, S = 2, 12, 16


def cached_logits(config, params, ids_BT, first):
    """[B, T, V]: `first` tokens at once, filled up to S, then one by one."""
    params = dict(params)

    @jax.jit
    def step(params, cache, ids_BT, positions_BT):
        hidden_BTD, cache = decode.apply(config, params, cache, ids_BT, positions_BT)
        head_VD = transformer.head(params).astype(hidden_BTD.dtype)
        return jnp.einsum("btd,vd->btv", hidden_BTD, head_VD), cache

    cache = decode.empty_cache(config, B, S)
    filled_BS = np.pad(ids_BT[:, :first], ((0, 0), (0, S - first)), constant_values=5)
    part, cache = step(params, cache, filled_BS, np.broadcast_to(np.arange(S), (B, S)))
    parts = [part[:, :first]]
    for at in range(first, T):
        part, cache = step(params, cache, ids_BT[:, at : at + 1], np.full((B, 1), at))
        parts.append(part)
    return np.concatenate(parts, axis=1)


def test_all_variants_are_tried():
    assert {name for name, _ in OPTIONS} == set(variants.VARIANTS)
    assert {option for _, options in OPTIONS for option in options} == {
        "null_source", "gate", "centered"
    }  # fmt: skip


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)
def test_cached_logits_are_those_of_the_whole_row(tiny, name, options):
    config = make(tiny, name, tied=name != "baseline", **options)
    params = randomise(init(config, jax.random.key(0)), scale=0.1)
    batch = inputs(B, T)
    expected = logits(config, params, batch)
    found = cached_logits(config, params, batch[0], 5)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_layers", "num_blocks"), [(7, 3), (3, 3), (1, 1)])
def test_short_last_blocks_and_blocks_of_one_layer(tiny, num_layers, num_blocks):
    config = make(tiny, "delta_block_released", num_layers, num_blocks)
    params = randomise(init(config, jax.random.key(0)), scale=0.1)
    batch = inputs(B, T)
    found = cached_logits(config, params, batch[0], 1)
    np.testing.assert_allclose(found, logits(config, params, batch), rtol=0, atol=1e-5)
