"""The rule for sources of every sublayer: memory, precision, and its kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from ml_collections.config_dict.config_dict import FrozenConfigDict
from test_parallel import make_mesh

from deltares_jax import config as config_lib
from deltares_jax.models import routing_kernels, routing_loops, transformer, variants
from deltares_jax.parallel import sharding, topology

PER_SUBLAYER = [name for name, row in variants.VARIANTS.items() if row.grows == "sublayer"]
per_sublayer = pytest.mark.parametrize("name", PER_SUBLAYER)


def model(name: str, num_layers: int, **changes) -> FrozenConfigDict:
    config = config_lib.default().model
    config.update({"width": 32, "num_layers": num_layers, "num_heads": 2, "num_kv_heads": 1})
    config.update({"head_dim": 16, "mlp_width": 64, "vocab_size": 64, "remat": "full"})
    config.residual.variant = name
    residual = {k: changes.pop(k) for k in list(changes) if k in config.residual}
    config.residual.update({"num_blocks": 1, **residual})
    config.update(changes)
    return FrozenConfigDict(config.to_dict())


def batch(rows: int, length: int):
    ids_BT = np.asarray(jax.random.randint(jax.random.key(3), (rows, length), 0, 64))
    positions_BT = np.broadcast_to(np.arange(length), (rows, length))
    return ids_BT, positions_BT, np.ones((rows, length), np.int32)


def loss_of(config: FrozenConfigDict, inputs):
    def loss(params):
        hidden_BTD = transformer.apply(config, params, *inputs).hidden_BTD.astype(jnp.float32)
        logits_BTV = jnp.einsum("btd,vd->btv", hidden_BTD, transformer.head(params))
        log_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_BTV, inputs[0][:, 1:, None], axis=-1))

    return loss


def parameters(config: FrozenConfigDict, scale: float):
    """Initial parameters with queries that choose."""
    params = transformer.init(config, jax.random.key(0))
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    changed = [
        leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)
        if jax.tree_util.keystr(path).endswith("['routing']['query']")
        else leaf
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, changed)


def flat_gradient(config: FrozenConfigDict, params, inputs) -> np.ndarray:
    grads = jax.jit(jax.grad(loss_of(config, inputs)))(params)
    return np.concatenate([np.ravel(np.asarray(g, np.float64)) for g in jax.tree.leaves(grads)])


@pytest.mark.slow
@per_sublayer
def test_twelve_layers_in_float64_have_the_gradient_of_the_plain_loop(name):
    with jax.enable_x64(True):
        inputs = batch(1, 6)
        rule = model(name, 12, dtype="float64")
        plain = model(name, 12, dtype="float64", scan="blocks", remat="none", kernel="direct")
        params = parameters(rule, 0.3)
        expected = flat_gradient(plain, params, inputs)
        found = flat_gradient(rule, params, inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * np.max(np.abs(expected)))


def error_of_bfloat16(name: str, **options) -> float:
    """The distance of the whole gradient at depth 36 from that in float32, relative."""
    inputs = batch(2, 32)
    wide, narrow = (model(name, 36, dtype=d, **options) for d in ("float32", "bfloat16"))
    params = parameters(wide, 0.3)
    exact, found = flat_gradient(wide, params, inputs), flat_gradient(narrow, params, inputs)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta_attnres", "full_additive", "attnres_cumulative"])
def test_bfloat16_gradients_at_depth_36_are_as_good_as_the_baselines(name):
    assert error_of_bfloat16(name) <= 1.2 * error_of_bfloat16("baseline")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attnres_full", "delta_replace"])
def test_bfloat16_gradients_without_a_stream_are_as_good_as_by_autodiff(name):
    plain = error_of_bfloat16(name, scan="blocks", remat="none", kernel="direct")
    assert error_of_bfloat16(name) <= 1.2 * plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        *((name, remat) for name in PER_SUBLAYER for remat in ("none", "full")),
        ("delta_block", "full"),
        ("attnres_block", "full"),
    ],
)
def test_memory_grows_linearly_with_depth(name, remat):
    inputs = batch(4, 16)
    widths = {"width": 256, "mlp_width": 512}  # so that sources outweigh logits of readers

    def peak(num_layers: int) -> int:
        config = model(name, num_layers, num_blocks=num_layers, remat=remat, **widths)
        params = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
        compiled = jax.jit(jax.grad(loss_of(config, inputs))).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, some, many = peak(12), peak(24), peak(48)
    assert many - some <= 2.1 * (some - few)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(routing_kernels, "INTERPRET", True)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def gathered(ops, buffer_SBTD, direction_RD, stats_3RBT, slot, count, centered):
    """Gradients of sources; the last reader has a single source, others do not see all of them."""
    R = len(direction_RD)
    end_R, count_R = np.arange(R) + 1, np.arange(R) + 2
    end_R[-3], count_R[-1] = 3, 1
    stats = (3 + jnp.exp(stats_3RBT[0]), 1 + jnp.exp(stats_3RBT[1]), stats_3RBT[2])
    args = (buffer_SBTD, slot, count, direction_RD, end_R, count_R, stats, 1e-6, centered)
    return ops.gather(*args)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("slot", "count"), [(3, 2), (0, 1), (9, 2)])
def test_the_kernel_of_the_backward_pass_has_the_gradients_of_the_loop(
    interpreted, slot, count, centered
):
    S, B, T, D = 11, 2, 256, 32
    unread_S111 = (jnp.arange(S) < slot)[:, None, None, None]
    buffer_SBTD = jnp.where(unread_S111, jnp.nan, normal(0, S, B, T, D))
    arrays = (buffer_SBTD, 0.2 * normal(1, S - 1, D), normal(2, 3, S - 1, B, T))
    found = gathered(routing_kernels, *arrays, slot, count, centered)
    expected = gathered(routing_loops, *arrays, slot, count, centered)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * jnp.max(jnp.abs(b)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width"), [("v5e:2x2", 1280), ("v5p:2x2x1", 4096), ("v6e:2x2", 1280)]
)
def test_kernels_for_36_layers_have_room_in_the_fast_memory_of_a_tpu(name, width):
    pytest.importorskip("libtpu")
    S, B, T = 73, 2, 512
    device = SingleDeviceSharding(topology.devices(topology.parse(name))[0])

    def kernels(buffer_SBTD, direction_RD, stats_3RBT, slot):
        ends = jnp.arange(2) + slot
        read = routing_kernels.read(buffer_SBTD, direction_RD[:2], (0, slot), ends, 1e-6, True)
        return read, gathered(routing_kernels, buffer_SBTD, direction_RD, stats_3RBT, slot, 2, True)

    shapes = (S, B, T, width), (S - 1, width), (3, S - 1, B, T), ()
    dtypes = jnp.bfloat16, jnp.float32, jnp.float32, jnp.int32
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=device)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    program = jax.jit(kernels).lower(*args).compile().as_text()
    assert program.count("tpu_custom_call") >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("delta_attnres", {}),
        ("delta_attnres", {"centered": True, "null_source": True, "gate": "scalar"}),
        ("attnres_full", {}),
        ("attnres_cumulative", {}),
        ("delta_replace", {}),
    ],
)
def test_kernels_have_the_gradient_of_the_plain_loop(interpreted, name, options):
    inputs = batch(2, 128)
    kernels = model(name, 3, kernel="pallas", **options)
    plain = model(name, 3, scan="blocks", remat="none", kernel="direct", **options)
    params = parameters(kernels, 0.3)
    expected = flat_gradient(plain, params, inputs)
    found = flat_gradient(kernels, params, inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.max(np.abs(expected)))


def test_kernels_on_a_mesh_have_the_values_of_one_device(interpreted):
    S, B, T, D = 5, 4, 256, 32
    buffer_SBTD, direction_RD = normal(0, S, B, T, D), normal(1, S - 1, D)
    stats_3RBT = normal(2, 3, S - 1, B, T)

    @jax.jit
    def both(buffer_SBTD, stats_3RBT):
        buffer_SBTD = routing_kernels.put(buffer_SBTD, [2 * buffer_SBTD[0], buffer_SBTD[4]], 1)
        ends = jnp.array([3, 4])
        read = routing_kernels.read(buffer_SBTD, direction_RD[:2], (1, 4), ends, 1e-6, True)
        back = gathered(routing_kernels, buffer_SBTD, direction_RD, stats_3RBT, 1, 2, False)
        return read, back, buffer_SBTD

    arrays = (buffer_SBTD, stats_3RBT)
    expected = both(*arrays)
    mesh = make_mesh({"fsdp": 2, "tensor": 2})
    with sharding.activate(mesh):
        cut = ((None, "fsdp", "tensor"), (None, None, "fsdp", "tensor"))
        placed = [
            jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))
            for x, axes in zip(arrays, cut, strict=True)
        ]
        found = both(*placed)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(10, np.max(np.abs(b))))


def test_kernels_are_chosen_where_they_can_run():
    def chosen(platform: str, tokens: int, **changes) -> str:
        return routing_kernels.choose(model("delta_attnres", 2, **changes), platform, tokens)

    assert chosen("tpu", 256) == "pallas"
    assert chosen("tpu", 64) == chosen("cpu", 256) == chosen("gpu", 256) == "direct"
    assert chosen("tpu", 256, kernel="batched") == "batched"
    assert routing_kernels.choose(model("delta_block", 2), "tpu", 256) == "batched"
    assert routing_kernels.choose(model("baseline", 2), "tpu", 256) == "auto"
    for platform, tokens, changes, reason in (
        ("cpu", 256, {}, "platform cpu, it needs tpu"),
        ("tpu", 64, {}, "64 tokens of a row on a device, it needs a multiple of 128"),
        ("tpu", 256, {"width": 40}, "model.width=40, it needs a multiple of 16"),
        ("tpu", 256, {"dtype": "float64"}, "model.dtype=float64"),
    ):
        with pytest.raises(ValueError, match=f"kernel=pallas does not go with {reason}"):
            chosen(platform, tokens, kernel="pallas", **changes)
