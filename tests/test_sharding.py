"""What is cut along which axis, what a device holds, and which devices are taken."""

import functools
import math
import pathlib
import re
import runpy
import types

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from run_helpers import train
from test_parallel import ONE, first_state, make_mesh

from deltares_jax import config as config_lib
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import report, sharding
from deltares_jax.training import programs, step

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs").glob("*.py"))
GOLDEN = pathlib.Path(__file__).with_name("golden_sharding_7b.txt")


def abstract_mesh(**axes):
    shape = {**ONE, **axes}
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * 4)


def abstract_state(config):
    return jax.eval_shape(functools.partial(step.init_state, config_lib.resolve(config)))


def sharding_table() -> str:
    """Path, shape, mesh axes of each dimension and MiB on a device, a parameter a line."""
    mesh = abstract_mesh(fsdp=16, tensor=4)
    config = runpy.run_path(str(ROOT / "configs" / "7b_delta_block.py"))["get_config"]()
    params = abstract_state(config).params
    shardings = jax.tree.leaves(sharding.state_shardings(params, mesh))
    lines = [f"# 7b_delta_block on {dict(mesh.shape)}: path, shape, axes, KiB on each device"]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), place in zip(leaves, shardings, strict=True):
        axes = [
            "+".join((axis,) if isinstance(axis, str) else axis) if axis else "-"
            for axis in (*place.spec, *[None] * leaf.ndim)[: leaf.ndim]
        ]
        held = report.shard_bytes(leaf, place) / 2**10
        name = sharding.path_name(path)
        lines.append(f"{name:40} {list(leaf.shape)!s:24} {' '.join(axes):24} {held:.1f}")
    return "\n".join(lines) + "\n"


def test_7b_is_cut_as_the_table_says():
    assert sharding_table() == GOLDEN.read_text(), (
        "what is cut along which axis has changed; if that is meant, write the new table with "
        "`python tests/test_sharding.py` and read its diff"
    )


def test_tables_name_axes_that_exist():
    """A misspelt one would leave what it names whole, without a word."""
    mesh_axes = {a for _, axes in sharding.RULES for a in ((axes,) if axes == str(axes) else axes)}
    assert mesh_axes == set(mesh_lib.AXES)
    logical = {name for name, _ in sharding.RULES} | {"tokens", "layers", "head_dim"}
    used = {axis for axes in sharding.PARAMETERS.values() for axis in axes}
    for source in (ROOT / "deltares_jax").rglob("*.py"):
        constraint = re.compile(r"_constraint\([^()]+, \(([^()]+)\)\)")
        for axes in constraint.findall(source.read_text()):
            used |= set(re.findall(r'"(\w+)"', axes))
    assert {"batch", "length", "columns", "vocab"} < used
    assert used - logical == {"embed"}  # a width that is whole
    assert len(sharding.RULES) <= 15


def test_moments_are_cut_as_their_parameters(tiny):
    state = abstract_state(tiny)
    shardings = sharding.state_shardings(state, abstract_mesh(data=2, fsdp=2, tensor=2))
    assert len({str(s.spec) for s in jax.tree.leaves(shardings.params)}) > 5
    for moments in (shardings.opt_state[1].mu, shardings.opt_state[1].nu):
        assert moments == shardings.params


def test_any_vocabulary_is_cut_over_many_devices():
    """151936 rows cannot be cut in 256."""
    config = config_lib.paper("7b", "delta_block")
    state = abstract_state(config)
    shardings = sharding.state_shardings(state, abstract_mesh(tensor=256))
    place = shardings.params["embedding"]
    assert place.shard_shape((151936, 4096)) == (151936, 4096 // 256)
    assert shardings.opt_state[1].nu["embedding"] == place


# The start-up report.


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_leave_nothing_replicated_on_64_devices(recipe):
    config = runpy.run_path(str(recipe))["get_config"]()
    state = abstract_state(config)
    for axes in ({"fsdp": 64}, {"fsdp": 32, "tensor": 2}):
        mesh = abstract_mesh(**axes)
        assert report.replicated(state, sharding.state_shardings(state, mesh), mesh) == []


def lines(config, axes):
    config, mesh = config_lib.resolve(config), make_mesh(axes)
    state = abstract_state(config)
    shardings = sharding.state_shardings(state, mesh)
    batch = programs.abstract_batch(config, config.train.batch_size)
    return report.lines(config, mesh, state, shardings, batch)


def test_report_counts_what_the_arrays_really_take(tiny):
    axes = {"data": 2, "fsdp": 2, "tensor": 2}
    devices, mesh = lines(tiny, axes)
    assert devices == "devices: 8 cpu (cpu); train.platform: any"
    state = first_state(config_lib.resolve(tiny))
    state = jax.device_put(state, sharding.state_shardings(state, make_mesh(axes)))
    first = jax.devices()[0]

    def held(tree):
        shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
        return sum(s.data.nbytes for s in shards if s.device == first) / 2**10

    batch = 8 / 4 * 16 * 4 * 5 / 2**10  # rows of a device, tokens, bytes, arrays
    assert mesh == (
        "mesh: replica 1, data 2, fsdp 2, tensor 2; on each device: "
        f"parameters {held(state.params):.1f} KiB, optimizer {held(state.opt_state):.1f} KiB, "
        f"batch {batch:.1f} KiB"
    )


@pytest.fixture
def wide(tiny):
    """Its MLP would be replicated if the table of parameters did not list it."""
    tiny.model.mlp_width = 2**14 + 2**13
    return tiny


@pytest.fixture
def forgotten(monkeypatch):
    monkeypatch.delitem(sharding.PARAMETERS, "mlp/up")


def test_large_replicated_arrays_are_refused_before_anything_is_compiled(
    wide, forgotten, tmp_path, monkeypatch
):
    wide.mesh.fsdp = 8
    monkeypatch.setattr(jax, "jit", None)
    message = (
        r"mesh\.fsdp=8 × mesh\.tensor=1 would leave .* replicated: "
        r".*params/layers/mlp/up \[2, 32, 24576\] 6\.00 MiB.*mesh\.allow_replicated=True"
    )
    with pytest.raises(ValueError, match=message) as refused:
        train(wide, tmp_path / "run", devices=None)
    assert "mlp/down" not in str(refused.value)


def test_replicated_arrays_are_listed_where_they_are_allowed(wide, forgotten):
    wide.mesh.allow_replicated = True
    *_, last = lines(wide, {"fsdp": 8})
    assert last.startswith("replicated, bytes on each device: ")
    assert "params/layers/mlp/up [2, 32, 24576] 6.00 MiB" in last


def test_data_parallel_runs_list_what_every_device_holds(wide):
    *_, last = lines(wide, {"data": 8})
    assert "params/layers/mlp/down [2, 24576, 32] 6.00 MiB" in last
    assert "and 3 more" in last  # three matrices with two moments each
    assert len(lines(wide, {})) == 2  # one device shares nothing


# Devices.


@pytest.mark.parametrize("asked", ["tpu", "gpu"])
def test_another_platform_than_asked_for_is_refused_at_once(tiny, tmp_path, monkeypatch, asked):
    tiny.train.platform = asked
    tiny.mesh.update({"fsdp": 1, "data": 4})
    for name in ("jit", "eval_shape"):
        monkeypatch.setattr(jax, name, None)
    message = rf"train\.platform={asked} and a mesh of 4 devices was asked for, but JAX found 8 cpu"
    with pytest.raises(ValueError, match=message):
        train(tiny, tmp_path / "run", devices=None)


@pytest.mark.parametrize("asked", ["", "cpu"])
def test_the_platform_that_is_there_is_taken_and_named(tiny, asked):
    tiny.train.platform = asked
    assert len(mesh_lib.find_devices(config_lib.resolve(tiny))) == 8
    assert lines(tiny, {"data": 8})[0].endswith(f"8 cpu (cpu); train.platform: {asked or 'any'}")


def test_an_accelerator_that_jax_was_told_to_use_is_not_replaced_by_the_cpu(tiny, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    with pytest.raises(ValueError, match=r"JAX_PLATFORMS=cuda,cpu was asked for.*found 8 cpu"):
        mesh_lib.find_devices(config_lib.resolve(tiny))


def test_a_platform_that_jax_cannot_start_is_one_line(command, tmp_path):
    arguments = ("--config=configs/debug.py", f"--workdir={tmp_path}/run")
    result = command("train", *arguments, env={"JAX_PLATFORMS": "tpu"})
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]  # libtpu, where it is installed, has its say before
    assert re.fullmatch(r"error: JAX_PLATFORMS='tpu': .*backend 'tpu'.*", last)


def fake_tpus(slices, side=2):
    """Slices of side × side chips, out of order, as JAX shows them."""
    coordinates = [(s, x, y) for y in range(side) for s in range(slices) for x in range(side)]
    return [
        types.SimpleNamespace(
            id=number,
            platform="tpu",
            device_kind="TPU v5 lite",
            slice_index=s,
            coords=(x, y, 0),
            core_on_chip=0,
            process_index=number,
        )
        for number, (s, x, y) in enumerate(coordinates)
    ]


def test_replica_goes_across_slices_and_the_other_axes_stay_inside():
    shape = {"replica": 4, "data": 1, "fsdp": 2, "tensor": 1}
    devices = mesh_lib.device_array(shape, fake_tpus(slices=2))
    assert devices.shape == (4, 1, 2, 1)
    slices = np.vectorize(lambda device: device.slice_index)(devices)
    assert np.all(slices == slices[:, :, :1])
    assert sorted(slices[:, 0, 0, 0]) == [0, 0, 1, 1]
    assert len({device.id for device in devices.flat}) == 8


@pytest.mark.parametrize("replica", [1, 3])
def test_replica_that_slices_do_not_divide_is_refused(replica):
    shape = {**ONE, "replica": replica, "fsdp": 12 // replica}
    message = rf"mesh\.replica={replica} must be a multiple of the 2 slices of these 12 devices"
    with pytest.raises(ValueError, match=message):
        mesh_lib.device_array(shape, fake_tpus(slices=2)[:4] * 3)


def test_an_axis_smaller_than_a_side_of_the_torus_fits():
    devices = mesh_lib.device_array({**ONE, "fsdp": 8, "tensor": 2}, fake_tpus(slices=1, side=4))
    assert len({device.id for device in devices.flat}) == 16


# The compiled step.


@pytest.fixture(scope="module")
def compiled_steps():
    """The train step on 2 × 1 and on 2 × 4 devices (data × tensor)."""
    config = config_lib.default()
    config.model.update({"vocab_size": 388, "width": 32, "num_kv_heads": 4, "head_dim": 16})
    config.model.update({"mlp_width": 160, "remat": "full", "scan": "blocks"})
    config.data.seq_len = 64
    resolved = config_lib.resolve(config)
    return [
        programs.lower_train(resolved, make_mesh({"data": 2, "tensor": tensor})).compile(
            {"xla_backend_optimization_level": 0}
        )
        for tensor in (1, 4)
    ]


def shapes_in(compiled, pattern):
    """Shapes of floating-point arrays in the instructions that match."""
    text = "\n".join(line for line in compiled.as_text().splitlines() if re.search(pattern, line))
    return {tuple(map(int, s.split(","))) for s in re.findall(r"f32\[([\d,]+)\]", text)}


def test_the_stream_between_sublayers_is_cut_along_the_sequence(compiled_steps):
    carried = [
        {s for s in shapes_in(compiled, r" while\(") if len(s) > 2 and s[-1] == 32 and 4 in s}
        for compiled in compiled_steps
    ]
    assert (4, 64, 32) in carried[0]
    assert (4, 16, 32) in carried[1]  # the stream
    assert (2, 4, 16, 32) in carried[1]  # what is kept of it for the backward pass, by layer
    assert (3, 4, 16, 32) in carried[1]  # the sources
    assert not [s for s in carried[1] if s[-3:] == (4, 64, 32) and s[:-3] not in ((), (1,))]


def test_logits_are_cut_along_the_vocabulary(compiled_steps):
    whole, cut = (shapes_in(compiled, "") for compiled in compiled_steps)
    assert [s for s in whole if s[-2:] == (64, 388)]
    assert [s for s in cut if s[-2:] == (64, 388 // 4)]
    assert not [s for s in cut if s[-1] == 388 and math.prod(s) >= 4 * 64 * 388]


def test_memory_of_activations_falls_with_the_tensor_axis(compiled_steps):
    one, four = (c.memory_analysis().temp_size_in_bytes for c in compiled_steps)
    assert four < one / 2.5


if __name__ == "__main__":
    GOLDEN.write_text(sharding_table())
