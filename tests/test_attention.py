"""Every implementation of attention against the reference, and which one runs where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltares_jax.models import attention


def make_inputs(B=2, T=128, H=4, K=2, d=64, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((B, T, H, d), (B, T, K, d), (B, T, K, d))
    q, k, v = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
    segments_BT = np.where(np.arange(T) < 50, 1, 2) * np.ones((B, 1), np.int32)
    return q, k, v, jnp.asarray(segments_BT)


def test_reference_is_softmax_over_the_visible_tokens():
    q_BTHd, k_BTKd, v_BTKd, segments_BT = map(np.asarray, make_inputs(T=60))
    out_BTHd = np.asarray(attention.reference(q_BTHd, k_BTKd, v_BTKd, segments_BT))
    for t, head in ((0, 0), (49, 1), (50, 2), (59, 3)):
        seen = [s for s in range(t + 1) if (s < 50) == (t < 50)]
        keys, values = k_BTKd[1, seen, head // 2], v_BTKd[1, seen, head // 2]
        scores = np.exp(keys @ q_BTHd[1, t, head] / 8)
        expected = scores / scores.sum() @ values
        np.testing.assert_allclose(out_BTHd[1, t, head], expected, rtol=2e-4, atol=1e-5)


def test_splash_equals_the_reference_and_keeps_documents_apart():
    q, k, v, segments = make_inputs()

    def loss(function, **kwargs):
        def weighted(q, k, v):
            out = function(q, k, v, segments, **kwargs)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

        return jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    (_, out), grads = loss(attention.splash, interpret=True)
    (_, expected), expected_grads = loss(attention.reference)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, wanted, atol=1e-4)
    changed = attention.splash(q, k, v.at[:, :50].add(1.0), segments, interpret=True)
    np.testing.assert_array_equal(changed[:, 50:], out[:, 50:])
    assert np.all(changed[:, :50] != out[:, :50])


@pytest.mark.parametrize("tile", [(64, 64), (64, 32), (32, 128)])
def test_tiles_of_the_causal_mask(tile):
    mask, T = attention.causal_mask_class()((256, 256)), 256
    for row in range(0, T, tile[0]):
        for column in range(0, T, tile[1]):
            part = slice(row, row + tile[0]), slice(column, column + tile[1])
            np.testing.assert_array_equal(mask[part], np.tril(np.ones((T, T), bool))[part])


@pytest.mark.parametrize(
    ("name", "platform", "seq_len", "dtype", "expected"),
    [
        ("auto", "cpu", 2048, "bfloat16", "reference"),
        ("auto", "tpu", 2048, "bfloat16", "splash"),
        ("auto", "tpu", 100, "bfloat16", "reference"),
        ("auto", "tpu", 2048, "float64", "reference"),
        ("auto", "gpu", 2048, "bfloat16", "cudnn"),
        ("auto", "gpu", 2048, "float32", "reference"),
        ("reference", "tpu", 2048, "bfloat16", "reference"),
    ],
)
def test_choice_by_platform(name, platform, seq_len, dtype, expected):
    assert attention.choose(name, platform, seq_len, dtype) == expected


@pytest.mark.parametrize(
    ("name", "platform", "seq_len", "dtype", "reason"),
    [
        ("splash", "cpu", 2048, "bfloat16", "platform cpu, it needs tpu"),
        ("splash", "tpu", 100, "bfloat16", "data.seq_len=100, it needs a multiple of 128"),
        ("cudnn", "tpu", 2048, "bfloat16", "platform tpu, it needs gpu"),
        ("cudnn", "gpu", 2048, "float32", "model.dtype=float32, it needs bfloat16"),
    ],
)
def test_what_cannot_run_is_refused(name, platform, seq_len, dtype, reason):
    with pytest.raises(ValueError, match=f"model.attention={name} does not go with {reason}"):
        attention.choose(name, platform, seq_len, dtype)
