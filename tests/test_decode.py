"""Token by token with cached keys and values, against the whole row at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import OPTIONS, init, inputs, logits, make, plain_variants, randomise

from deltares_jax.models import decode, transformer, variants

B, T, S = 2, 12, 16


def cached_logits(config, params, ids_BT):
    """[B, T, V] by parts of four tokens; each is filled up with another, as prompts are."""

    @jax.jit
    def step(params, cache, ids_BT, positions_BT):
        hidden_BTD, cache = decode.apply(config, params, cache, ids_BT, positions_BT)
        head_VD = transformer.head(params).astype(hidden_BTD.dtype)
        return jnp.einsum("btd,vd->btv", hidden_BTD, head_VD), cache

    cache, parts = decode.empty_cache(config, B, S), []
    for at in range(0, T, 4):
        filled_BT = np.pad(ids_BT[:, at : at + 4], ((0, 0), (0, 1)), constant_values=5)
        positions_BT = np.broadcast_to(np.arange(at, at + 5), (B, 5))
        part_BTV, cache = step(params, cache, filled_BT, positions_BT)
        parts.append(part_BTV[:, :4])
    return np.concatenate(parts, axis=1)


def test_all_variants_are_tried():
    assert {name for name, _ in OPTIONS} == set(variants.VARIANTS)
    assert {option for _, options in OPTIONS for option in options} == {
        "null_source", "gate", "centered"
    }  # fmt: skip


@plain_variants
def test_cached_logits_are_those_of_the_whole_row(tiny, name, options):
    config = make(tiny, name, tied=name != "baseline", **options)
    params = randomise(init(config, jax.random.key(0)), scale=0.1)
    batch = inputs(B, T)
    expected = logits(config, params, batch)
    found = cached_logits(config, params, batch[0])
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("num_layers", "num_blocks"),
    [
        (7, 3),
        pytest.param(3, 3, marks=pytest.mark.slow),
        pytest.param(1, 1, marks=pytest.mark.slow),
    ],
)
def test_short_last_blocks_and_blocks_of_one_layer(tiny, num_layers, num_blocks):
    config = make(tiny, "delta_block_released", num_layers, num_blocks)
    params = randomise(init(config, jax.random.key(0)), scale=0.1)
    batch = inputs(B, T)
    found = cached_logits(config, params, batch[0])
    np.testing.assert_allclose(found, logits(config, params, batch), rtol=0, atol=1e-5)
