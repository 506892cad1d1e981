"""The same numbers on every mesh, and clear errors for what a mesh does not divide."""

import functools
import logging
import math

import jax
import numpy as np
import pytest
from run_helpers import log, train
from test_step import VALID, make_batch

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.models import variants
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import sharding
from deltares_jax.training import losses, programs, step

ONE = {"replica": 1, "data": 1, "fsdp": 1, "tensor": 1}

# Name: axes, and the accumulation and recomputation that are tried on them.
MESHES = {
    "data8": ({"data": 8}, 1, "none"),
    "fsdp8": ({"fsdp": 8}, 1, "full"),
    "data2-tensor4": ({"data": 2, "tensor": 4}, 4, "full"),
    "replica2-fsdp2-tensor2": ({"replica": 2, "fsdp": 2, "tensor": 2}, 2, "none"),
}


@pytest.fixture
def short(tiny):
    tiny.model.num_kv_heads = 4
    tiny.optim.update({"warmup_steps": 1})
    return tiny


def make_mesh(axes):
    shape = {**ONE, **axes}
    return mesh_lib.make_mesh(shape, jax.devices()[: math.prod(shape.values())])


@functools.cache
def first_state(config):
    """On the host: the step takes the memory of the state that it is given."""
    return jax.device_get(jax.jit(functools.partial(step.init_state, config))())


def run_steps(config, axes, count=5, **batch_options):
    """Losses of some steps on a mesh, and the state after them."""
    config, mesh = config_lib.resolve(config), make_mesh(axes)
    # Most of the time is the compiler's.
    train_step = programs.lower_train(config, mesh).compile({"xla_backend_optimization_level": 0})
    seeded = first_state(config)
    state = jax.device_put(seeded, sharding.state_shardings(seeded, mesh))
    all_losses = []
    for seed in range(count):
        batch = make_batch(seed=seed, **batch_options)
        state, numbers = train_step(state, jax.device_put(batch, sharding.batch_sharding(mesh)))
        all_losses.append(float(numbers["loss"]))
    return all_losses, state


def assert_same_numbers(results, expected):
    for name, found in results.items():
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=str(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", variants.VARIANTS)
def test_losses_of_every_variant_do_not_depend_on_the_mesh(short, name):
    short.model.residual.variant = name
    expected, _ = run_steps(short, {})
    results = {}
    for mesh, (axes, accumulation, remat) in MESHES.items():
        short.train.accumulation, short.model.remat = accumulation, remat
        results[mesh], _ = run_steps(short, axes)
    assert_same_numbers(results, expected)


@pytest.mark.parametrize(
    ("scan", "remat"),
    [
        ("blocks", "none"),
        pytest.param("unrolled", "full", marks=pytest.mark.slow),
        pytest.param("blocks", "save_attention", marks=pytest.mark.slow),
        pytest.param("auto", "save_projections", marks=pytest.mark.slow),
    ],
)
def test_a_short_last_block_has_the_same_losses_on_a_mesh(short, scan, remat):
    short.model.num_layers = 7
    short.model.residual.update({"variant": "delta_block_released", "num_blocks": 3})
    short.model.scan = "blocks"
    expected, _ = run_steps(short, {}, 3)
    short.model.update({"scan": scan, "remat": remat})
    found, _ = run_steps(short, MESHES["data2-tensor4"][0], 3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("data", "accumulation"),
    [(2, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 1), (2, 2), (8, 1)])],
)
def test_gradients_weigh_by_valid_targets_over_devices_and_micro_batches(short, data, accumulation):
    short.model.num_layers = 1
    short.model.residual.variant = "baseline"
    batch = make_batch(valid=VALID)
    config, mesh = config_lib.resolve(short), make_mesh({"data": data})
    params = first_state(config).params
    expected, expected_grads = jax.jit(functools.partial(step.gradients, config))(params, batch)
    short.train.accumulation = accumulation
    split = jax.jit(functools.partial(step.gradients, config_lib.resolve(short)))
    with sharding.activate(mesh):
        sums, grads = split(
            jax.device_put(params, sharding.state_shardings(params, mesh)),
            jax.device_put(batch, sharding.batch_sharding(mesh)),
        )
    np.testing.assert_array_equal(sums.weight, sum(VALID))
    np.testing.assert_allclose(sums.loss, expected.loss, rtol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("tied", "vocab"), [(True, 97), (False, 97), (False, 1033)])
def test_a_vocabulary_that_the_tensor_axis_does_not_divide(short, monkeypatch, tied, vocab):
    """Stored at its true size and cut; the loss masks what fills up; every row moves."""
    # 1033 makes two chunks on each of 8 devices, nine on one.
    monkeypatch.setattr(losses, "_CHUNK_LOGITS", 8 * 16 * 128)
    short.model.update({"vocab_size": vocab, "tied": tied, "num_heads": 8, "num_kv_heads": 8})
    short.model.num_layers = 1
    short.model.residual.variant = "baseline"
    # Adam would turn the rounding of gradients near 0 into steps of full size.
    short.optim.update({"eps": 1e-2, "warmup_steps": 0})
    before = first_state(config_lib.resolve(short)).params
    expected, one = run_steps(short, {}, 2, end=vocab)
    numbers, state = run_steps(short, {"tensor": 8}, 2, end=vocab)
    np.testing.assert_allclose(numbers, expected, rtol=1e-6)
    tables = ("embedding",) if tied else ("embedding", "head")
    for name in tables:
        moments = (state.opt_state[1].mu, state.opt_state[1].nu)
        for table_VD in (state.params[name], *(m[name] for m in moments)):
            assert table_VD.shape == (vocab, 32)
            assert {s.data.shape for s in table_VD.addressable_shards} == {(vocab, 32 // 8)}
            assert len({str(s.index) for s in table_VD.addressable_shards}) == 8
    # Every token is wrong somewhere, so the last one of an uneven vocabulary gets a gradient, too.
    assert np.all(np.any(state.params[tables[-1]] != before[tables[-1]], axis=1))
    for a, b in zip(*map(jax.tree.leaves, (state.params, one.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.max(np.abs(b)))


def test_initial_values_do_not_depend_on_the_mesh(short):
    config = config_lib.resolve(short)
    init = functools.partial(step.init_state, config)
    for axes, _, _ in MESHES.values():
        shardings = sharding.state_shardings(jax.eval_shape(init), make_mesh(axes))
        state = jax.jit(init, out_shardings=shardings)()
        jax.tree.map(np.testing.assert_array_equal, state, first_state(config))


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(short, tmp_path):
    """Its vocabulary of 257 is stored alike on all of them."""
    short.optim.schedule = "constant"  # more steps do not change the rates of the first ones
    short.mesh.update({"fsdp": 1, "data": 1})
    short.train.steps = 3
    train(short, tmp_path / "straight")
    for steps, axes in ((2, {"data": 4, "tensor": 2}), (3, {"data": 1, "fsdp": 8, "tensor": 1})):
        short.train.steps = steps
        short.mesh.update(axes)
        train(short, tmp_path / "moved", devices=None)
    found = [[row["loss"] for row in log(tmp_path / n)[0].values()] for n in ("moved", "straight")]
    np.testing.assert_allclose(*found, rtol=1e-6)


class Compiled(logging.Handler):
    """Names of the programs that JAX compiles while it is entered."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.names = []
        self._logger = logging.getLogger("jax._src.dispatch")

    def emit(self, record):
        text = record.getMessage()
        if text.startswith("Finished XLA compilation of "):
            self.names.append(text.split()[4])

    def __enter__(self):
        self._logger.addHandler(self)
        jax.config.update("jax_log_compiles", True)  # in all threads
        return self

    def __exit__(self, *error):
        jax.config.update("jax_log_compiles", False)
        self._logger.removeHandler(self)


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_the_steps_are_compiled_once_in_a_fresh_and_in_a_resumed_run(short, tmp_path, devices):
    short.model.num_layers = 1
    short.model.residual.variant = "baseline"
    short.optim.schedule = "constant"
    short.eval.update({"every": 2, "rows": 11, "batch_size": 8})  # the last batch is partial
    short.checkpoint.every = 2
    for steps in (5, 10):
        short.train.steps = steps
        with Compiled() as compiled:
            train(short, tmp_path / "run", devices=devices)
        assert sorted(log(tmp_path / "run")[0]) == list(range(1, steps + 1))
        for name in ("train_step", "eval_step"):
            assert sum(name in program for program in compiled.names) == 1, compiled.names
    model = load(tmp_path / "run")
    assert {len(p.devices()) for p in jax.tree.leaves(model.params)} == {1}


BAD = [
    ({"train.batch_size": 12}, {"data": 8}, r"train\.batch_size=12 .*8 data.*8 or 16"),
    ({"train.batch_size": 4}, {"data": 8}, r"train\.batch_size=4.*nearest: 8"),
    ({"train.batch_size": 1}, {"data": 8}, r"train\.batch_size=1 .*nearest: 8"),
    (
        {"train.batch_size": 8, "train.accumulation": 2},
        {"data": 8},
        r"train\.batch_size=8 / train\.accumulation=2 = 4 .*8 data",
    ),
    ({"eval.batch_size": 5}, {"data": 8}, r"eval\.batch_size=5 .*8 data"),
    ({}, {"data": 6}, r"mesh\.data=6.*8 devices"),
    ({}, {"data": 16}, r"mesh\.data=16.*8 devices"),
    ({}, {"data": -1, "fsdp": -1}, r"mesh\.data and mesh\.fsdp are -1"),
    (
        {"model.width": 36},
        {"fsdp": 8},
        r"model\.width=36.*mesh\.fsdp=8 × mesh\.tensor=1 = 8.*cuts it on 8 devices: 4$",
    ),
    (
        {"model.width": 36},
        {"fsdp": 4, "tensor": 2},
        r"model\.width=36 .*mesh\.fsdp=4 × mesh\.tensor=2 = 8.*: 4$",
    ),
    (
        {"model.num_heads": 8},
        {"tensor": 4, "data": 2},
        r"model\.num_kv_heads=2 must be a multiple of mesh\.tensor=4; the largest .*"
        r"model\.num_heads=8, model\.mlp_width=64, data\.seq_len=16 on 8 devices: 2$",
    ),
    ({"model.num_heads": 8}, {"tensor": 8}, r"model\.num_kv_heads=2 .*mesh\.tensor=8.*: 2$"),
    (
        {"model.num_heads": 6, "model.num_kv_heads": 6},
        {"tensor": 4, "data": 2},
        r"model\.num_kv_heads=6 .*mesh\.tensor=4.*model\.num_heads=6.*: 2$",
    ),
    (
        {"model.num_heads": 8, "model.num_kv_heads": 8, "model.mlp_width": 100},
        {"tensor": 8},
        r"model\.mlp_width=100 .*mesh\.tensor=8.*: 4$",
    ),
    (
        {"data.seq_len": 18, "model.num_kv_heads": 4},
        {"tensor": 4, "data": 2},
        r"data\.seq_len=18 must be a multiple of mesh\.tensor=4.*: 2$",
    ),
]


@pytest.mark.parametrize(("changes", "axes", "message"), BAD)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(
    tiny, tmp_path, monkeypatch, changes, axes, message
):
    tiny.update_from_flattened_dict(changes)
    tiny.mesh.update({**ONE, **axes})
    monkeypatch.setattr(jax, "jit", None)
    with pytest.raises(ValueError, match=message):
        train(tiny, tmp_path / "run", devices=None)
