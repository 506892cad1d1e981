"""The same numbers on every mesh, and clear errors for what a mesh does not divide."""

import functools

import jax
import numpy as np
import pytest
from test_loop import log, train

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.models import variants
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import sharding
from deltares_jax.training import step

MESHES = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "data2-fsdp4": {"data": 2, "fsdp": 4},
    "replica2-fsdp2-tensor2": {"replica": 2, "fsdp": 2, "tensor": 2},
}


def run(config, workdir, mesh=None):
    """Losses and first checkpoint of three steps, on one device or on a mesh of eight."""
    config.mesh.update({"replica": 1, "data": 1, "fsdp": 1, "tensor": 1, **(mesh or {})})
    train(config, workdir, devices=jax.devices()[: 8 if mesh else 1])
    rows = log(workdir)
    return [rows[s]["loss"] for s in sorted(rows)]


@pytest.fixture
def short(tiny):
    tiny.model.vocab_size = 258  # a multiple of the tensor axis
    tiny.train.steps = 3
    tiny.optim.update({"warmup_steps": 1})
    tiny.checkpoint.update({"every": 1, "keep": 3})
    return tiny


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_do_not_depend_on_the_mesh(short, tmp_path, mesh):
    expected = run(short, tmp_path / "one")
    np.testing.assert_allclose(run(short, tmp_path / mesh, MESHES[mesh]), expected, rtol=1e-6)


def test_losses_do_not_depend_on_the_mesh_with_a_short_last_block(short, tmp_path):
    short.model.num_layers = 7
    short.model.residual.update({"variant": "delta_block_released", "num_blocks": 3})
    expected = run(short, tmp_path / "one")
    sharded = run(short, tmp_path / "eight", MESHES["data2-fsdp4"])
    np.testing.assert_allclose(sharded, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", variants.VARIANTS)
def test_every_variant_on_a_mesh_with_remat_and_accumulation(short, tmp_path, name):
    short.model.residual.variant = name
    expected = run(short, tmp_path / "one")
    short.model.remat = "full"
    short.train.accumulation = 2
    sharded = run(short, tmp_path / "eight", {"data": 2, "fsdp": 2, "tensor": 2})
    np.testing.assert_allclose(sharded, expected, rtol=1e-6)


def test_initial_values_do_not_depend_on_the_mesh(short):
    config = config_lib.resolve(short)
    init = functools.partial(step.init_state, config)
    expected = jax.jit(init)()
    for shape in ({"replica": 1, "data": 2, "fsdp": 4, "tensor": 1},
                  {"replica": 1, "data": 1, "fsdp": 8, "tensor": 1},
                  {"replica": 1, "data": 1, "fsdp": 4, "tensor": 2}):  # fmt: skip
        mesh = mesh_lib.make_mesh(shape, jax.devices())
        shardings = sharding.state_shardings(jax.eval_shape(init), mesh)
        state = jax.jit(init, out_shardings=shardings)()
        jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_parameters_and_moments_are_cut_and_norms_are_not(short):
    config = config_lib.resolve(short)
    init = functools.partial(step.init_state, config)
    mesh = mesh_lib.make_mesh({"replica": 1, "data": 1, "fsdp": 4, "tensor": 2}, jax.devices())
    shardings = sharding.state_shardings(jax.eval_shape(init), mesh)
    state = jax.jit(init, out_shardings=shardings)()
    up_LDF = state.params["layers"]["mlp"]["up"]
    assert up_LDF.addressable_shards[0].data.shape == (2, 32 // 4, 64 // 2)
    assert state.opt_state[1].mu["layers"]["mlp"]["up"].sharding == up_LDF.sharding
    assert state.params["embedding"].addressable_shards[0].data.shape == (258 // 2, 32 // 4)
    assert state.params["final_norm"]["gain"].sharding.is_fully_replicated


def test_a_run_of_eight_devices_loads_on_one(short, tmp_path):
    run(short, tmp_path / "eight", MESHES["fsdp8"])
    model = load(tmp_path / "eight")
    assert {len(p.devices()) for p in jax.tree.leaves(model.params)} == {1}


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(short, tmp_path):
    short.optim.schedule = "constant"  # more steps do not change the rates of the first ones
    expected = run(short, tmp_path / "straight")
    short.train.steps = 2
    run(short, tmp_path / "moved", MESHES["data8"])
    short.train.steps = 3
    moved = run(short, tmp_path / "moved", MESHES["fsdp8"])
    np.testing.assert_allclose(moved, expected, rtol=1e-6)


BAD = [
    ({"train.batch_size": 12}, {"data": 8}, r"train\.batch_size=12 .*8 data.*8 or 16"),
    ({"train.batch_size": 4}, {"data": 8}, r"train\.batch_size=4.*nearest: 8"),
    (
        {"train.batch_size": 8, "train.accumulation": 2},
        {"data": 8},
        r"train\.batch_size=8 / train\.accumulation=2 = 4 .*8 data",
    ),
    ({"eval.batch_size": 5}, {"data": 8}, r"eval\.batch_size=5 .*8 data"),
    ({}, {"data": 6}, r"mesh\.data=6.*8 devices"),
    ({}, {"data": 16}, r"mesh\.data=16.*8 devices"),
    ({"model.width": 36}, {"fsdp": 8}, r"model\.width=36.*mesh\.fsdp=8"),
    ({}, {"tensor": 8}, r"model\.num_heads=4.*mesh\.tensor=8"),
    ({"model.num_heads": 8}, {"tensor": 4, "data": 2}, r"model\.num_kv_heads=2.*mesh\.tensor=4"),
    ({"model.vocab_size": 257}, {"tensor": 2, "data": 4}, r"model\.vocab_size=257.*mesh\.tensor=2"),
]


@pytest.mark.parametrize(("changes", "mesh", "message"), BAD)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(
    tiny, tmp_path, monkeypatch, changes, mesh, message
):
    tiny.model.vocab_size = 264
    tiny.update_from_flattened_dict(changes)
    tiny.mesh.update({"replica": 1, "data": 1, "fsdp": 1, "tensor": 1, **mesh})
    monkeypatch.setattr(jax, "jit", None)
    with pytest.raises(ValueError, match=message):
        train(tiny, tmp_path / "run", devices=jax.devices())
