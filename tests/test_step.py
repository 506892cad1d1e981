"""The train step: schedules, decay groups, accumulation, non-finite numbers, dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltares_jax import config as config_lib
from deltares_jax.data import pipeline
from deltares_jax.models import transformer, variants
from deltares_jax.training import optim, step

END = 256


def make_batch(size=8, seq_len=16, valid=None, seed=0, end=END):
    """Rows of random tokens below `end`; `valid` sets how many targets count in each row."""
    stream = np.random.default_rng(seed).integers(0, end, size * seq_len + 1)
    rows = pipeline.Rows(stream, seq_len, END)
    batch = next(pipeline.eval_batches(rows, size, size))
    if valid is not None:
        batch["weights"] *= np.arange(seq_len) < np.asarray(valid)[:, None]
    return batch


def start(config):
    config = config_lib.resolve(config)
    return config, jax.jit(step.init_state, static_argnums=0)(config)


@functools.cache
def jitted(function, config):
    return jax.jit(functools.partial(function, config))


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


RATES = {
    # update: rate, of 10 updates with warm-up 4 from peak 1 to 0.1
    "cosine": {1: 0.25, 2: 0.5, 4: 1.0, 7: 0.55, 10: 0.1},
    "linear": {1: 0.25, 4: 1.0, 5: 0.85, 7: 0.55, 10: 0.1},
    "constant": {1: 0.25, 4: 1.0, 7: 1.0, 10: 1.0},
    "wsd": {1: 0.25, 4: 1.0, 8: 1.0, 9: 0.55, 10: 0.1},
}


@pytest.mark.parametrize("schedule", RATES)
def test_schedules_reach_peak_and_end(tiny, schedule):
    tiny.train.steps = 10
    tiny.optim.update(
        {
            "schedule": schedule,
            "learning_rate": 1.0,
            "final_learning_rate": 0.1,
            "warmup_steps": 4,
            "cooldown_steps": 2 if schedule == "wsd" else 0,
        }
    )
    rate = optim.schedule(config_lib.resolve(tiny))
    for update, expected in RATES[schedule].items():
        np.testing.assert_allclose(rate(update), expected, rtol=1e-6)


def test_logged_learning_rate_is_the_one_used(tiny):
    """Adam's first step moves each parameter that has a gradient by the rate, up to eps."""
    tiny.optim.update({"weight_decay": 0.0, "eps": 1e-20, "warmup_steps": 4, "clip_norm": 0.0})
    config, state = start(tiny)
    after, numbers = jitted(step.train_step, config)(state, make_batch())
    np.testing.assert_allclose(numbers["learning_rate"], 1e-3 / 4, rtol=1e-6)
    moved = np.abs(after.params["layers"]["mlp"]["up"] - state.params["layers"]["mlp"]["up"])
    np.testing.assert_allclose(moved, 1e-3 / 4, rtol=1e-2)


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_decay_groups(tiny, decay):
    """Without gradients only decay moves anything."""
    tiny.optim.update({"decay": decay, "weight_decay": 0.5, "warmup_steps": 0})
    tiny.model.residual.update({"gate": "scalar", "null_source": True})
    config, state = start(tiny)
    params = jax.tree.map(jnp.ones_like, state.params)
    grads = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optim.make_optimizer(config).update(grads, state.opt_state, params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        last = name.rsplit("/", 1)[-1]
        small = last in ("gain", "null_source") or "_reader/" in name
        expected = 0.0 if small and decay == "matrices" else -0.5 * optim.schedule(config)(1)
        np.testing.assert_allclose(update, expected, rtol=1e-5, err_msg=name)


VALID = (16, 3, 1, 0, 16, 7, 2, 0)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulation_equals_one_batch(tiny, parts):
    batch = make_batch(valid=VALID)
    whole_config, state = start(tiny)
    tiny.train.accumulation = parts
    config, _ = start(tiny)
    sums, grads = jitted(step.gradients, whole_config)(state.params, batch)
    part_sums, part_grads = jitted(step.gradients, config)(state.params, batch)
    np.testing.assert_allclose(part_sums.weight, sum(VALID))
    np.testing.assert_allclose(part_sums.loss, sums.loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(part_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_clipping_comes_after_accumulation(tiny):
    """Clipping each micro-batch by itself would end at another norm."""
    tiny.optim.update({"clip_norm": 1e-3, "b1": 0.0})
    batch = make_batch(valid=VALID)
    moments = []
    for parts in (1, 4):
        tiny.train.accumulation = parts
        config, state = start(tiny)
        after, _ = jitted(step.train_step, config)(state, batch)
        moments.append(after.opt_state[1].mu)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(m)) for m in jax.tree.leaves(moments[0])))
    np.testing.assert_allclose(norm, 1e-3, rtol=1e-4)
    for a, b in zip(*map(jax.tree.leaves, moments), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-8)


def test_batch_without_valid_targets_is_finite_and_changes_nothing_but_decay(tiny):
    tiny.optim.weight_decay = 0.0
    config, state = start(tiny)
    after, numbers = jitted(step.train_step, config)(state, make_batch(valid=[0] * 8))
    assert float(numbers["loss"]) == 0
    assert_trees_equal(after.params, state.params)


def test_z_loss_adds_its_gradient_but_not_to_the_reported_loss(tiny):
    batch = make_batch()
    plain_config, state = start(tiny)
    tiny.optim.z_loss = 0.1
    config, _ = start(tiny)
    sums, grads = jitted(step.gradients, config)(state.params, batch)

    def objective(params):
        inputs = (batch["inputs"], batch["positions"], batch["segments"])
        hidden_BTD = transformer.apply(config.model, params, *inputs).hidden_BTD
        logits_BTV = jnp.einsum("btd,vd->btv", hidden_BTD, params["embedding"])
        lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
        target_BT = jnp.take_along_axis(logits_BTV, batch["targets"][..., None], -1)[..., 0]
        return jnp.mean(lse_BT - target_BT + 0.1 * jnp.square(lse_BT))

    for a, b in zip(*map(jax.tree.leaves, (grads, jax.grad(objective)(state.params))), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    reported = jitted(step.gradients, plain_config)(state.params, batch)[0].loss
    np.testing.assert_allclose(sums.loss, reported, rtol=1e-6)


def poisoned(batch):
    """A token that does not exist makes its row's hidden states NaN."""
    return {**batch, "inputs": np.where(np.arange(8)[:, None] == 5, 9999, batch["inputs"])}


@pytest.mark.parametrize("parts", [1, 4])
def test_not_finite_loss_leaves_the_state_as_it_was(tiny, parts):
    tiny.train.accumulation = parts
    config, state = start(tiny)
    train_step = jitted(step.train_step, config)
    state, _ = train_step(state, make_batch())  # moments that are not zero
    after, numbers = train_step(state, poisoned(make_batch()))
    assert not numbers["finite"]
    assert_trees_equal(after, state)


def test_not_finite_gradient_with_a_finite_loss_leaves_the_state_as_it_was(tiny):
    tiny.optim.z_loss = 1e30
    config, state = start(tiny)
    after, numbers = jitted(step.train_step, config)(state, make_batch())
    assert np.isfinite(numbers["loss"])
    assert not np.isfinite(numbers["grad_norm"])
    assert not numbers["finite"]
    assert_trees_equal(after, state)


def test_parameters_moments_and_gradients_are_float32_under_bfloat16(tiny):
    tiny.model.dtype = "bfloat16"
    tiny.train.accumulation = 2
    config, state = start(tiny)
    sums, grads = jax.eval_shape(
        functools.partial(step.gradients, config), state.params, make_batch()
    )
    floats = [
        x.dtype
        for x in jax.tree.leaves((state, sums, grads))
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert set(floats) == {jnp.dtype("float32")}


def test_a_small_rate_still_moves_parameters_under_bfloat16(tiny):
    tiny.model.dtype = "bfloat16"
    tiny.optim.update({"learning_rate": 1e-6, "final_learning_rate": 1e-6, "warmup_steps": 0})
    config, state = start(tiny)
    after, _ = jitted(step.train_step, config)(state, make_batch())
    changed = np.mean(after.params["layers"]["mlp"]["up"] != state.params["layers"]["mlp"]["up"])
    assert changed > 0.9


@pytest.mark.slow
def test_bfloat16_overfits_as_float32_does(tiny):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        tiny.model.dtype = dtype
        tiny.train.steps = 300
        config, state = start(tiny)
        for _ in range(300):
            state, numbers = jitted(step.train_step, config)(state, make_batch())
        losses[dtype] = float(numbers["loss"])
    assert losses["float32"] < 4.0  # from 5.5
    assert abs(losses["bfloat16"] / losses["float32"] - 1) < 0.02


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_readers_with_a_choice_learn_and_others_never_move(tiny, name):
    tiny.model.update({"num_layers": 4})
    tiny.model.residual.update({"variant": name, "num_blocks": 2})
    tiny.optim.warmup_steps = 0
    config, state = start(tiny)
    before = state.params
    for seed in range(3):
        state, _ = jitted(step.train_step, config)(state, make_batch(seed=seed))
    sources = variants.source_names(name, 4, 2)
    readers = {"final": (before, state.params)} if "final" in sources else {}
    if name != "baseline":
        for reader, *_ in variants.sites(name, 4, 2):
            _, layer, kind = reader.split(".")
            readers[reader] = tuple(
                {"final_reader": jax.tree.map(lambda p, i=int(layer): p[i], tree)}
                for tree in (p["layers"][f"{kind}_reader"] for p in (before, state.params))
            )
    for reader, (old, new) in readers.items():
        for leaf in ("query", "gain"):
            a = old["final_reader"]["routing"][leaf]
            b = new["final_reader"]["routing"][leaf]
            moved = bool(np.any(a != b))
            assert moved == (len(sources.get(reader, [])) > 1), f"{reader} {leaf}"
