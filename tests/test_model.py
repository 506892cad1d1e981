"""Properties of the model: identities, causality, documents, dtypes, forms of the depth loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import FrozenConfigDict
from model_helpers import all_variants, init, inputs, logits, make, plain_variants, randomise

from deltares_jax.models import depth, transformer, variants
from deltares_jax.training import losses


def query_gradients(config, params, batch):
    def loss(params):
        hidden_BTD = transformer.apply(config, params, *batch).hidden_BTD
        return jnp.sum(jnp.sin(jnp.einsum("btd,vd->btv", hidden_BTD, transformer.head(params))))

    layers = jax.jit(jax.grad(loss))(params)["layers"]
    return [layers[f"{kind}_reader"]["routing"]["query"] for kind in variants.SUBLAYERS]


def without_routing(params):
    layers = {k: v for k, v in params["layers"].items() if not k.endswith("_reader")}
    return {**{k: v for k, v in params.items() if k != "final_reader"}, "layers": layers}


@pytest.mark.parametrize("name", ["attnres_block", "attnres_full", "delta_attnres"])
def test_zero_queries_without_eps_are_the_baseline(tiny, name):
    config = make(tiny, name, norm_eps=0.0)
    params = init(config, jax.random.key(0))
    plain = make(tiny, "baseline", norm_eps=0.0)
    expected = logits(plain, without_routing(params), inputs())
    np.testing.assert_allclose(logits(config, params, inputs()), expected, rtol=0, atol=2e-5)


def test_zero_queries_of_delta_block_are_not_the_baseline(tiny):
    config = make(tiny, "delta_block", norm_eps=0.0)
    params = init(config, jax.random.key(0))
    plain = make(tiny, "baseline", norm_eps=0.0)
    difference = logits(config, params, inputs()) - logits(plain, without_routing(params), inputs())
    assert np.max(np.abs(difference)) > 1e-3


@pytest.mark.parametrize("name", ["delta_attnres", "delta_block", "full_additive"])
@pytest.mark.parametrize(
    ("scan", "remat"), [("blocks", "none"), ("unrolled", "none"), ("unrolled", "full")]
)
def test_centered_starts_as_the_baseline_bit_for_bit_and_learns(tiny, name, scan, remat):
    config = make(tiny, name, scan=scan, remat=remat, centered=True)
    params = init(config, jax.random.key(0))
    plain = make(tiny, "baseline", scan=scan, remat=remat)
    expected = logits(plain, without_routing(params), inputs())
    np.testing.assert_array_equal(logits(config, params, inputs()), expected)
    # The last layer's readers have several sources.
    for query_LD in query_gradients(config, params, inputs()):
        assert np.max(np.abs(query_LD[-1])) > 1e-6


@pytest.mark.parametrize("name", ["delta_attnres", "delta_block", "delta_block_released"])
def test_alpha_gate_starts_as_the_baseline_bit_for_bit(tiny, name):
    config = make(tiny, name, gate="alpha")
    params = init(config, jax.random.key(0))
    expected = logits(make(tiny, "baseline"), without_routing(params), inputs())
    np.testing.assert_array_equal(logits(config, params, inputs()), expected)


@plain_variants
def test_no_token_sees_a_later_one_or_another_document(tiny, name, options):
    config = make(tiny, name, **options)
    params = randomise(init(config, jax.random.key(0)))
    segments_BT = [[1] * 7 + [2] * 5]
    ids_BT, positions_BT, segments_BT = inputs(1, 12, segments=segments_BT)

    def changed(position):
        other_BT = ids_BT.copy()
        other_BT[0, position] = (other_BT[0, position] + 1) % 97
        return logits(config, params, (other_BT, positions_BT, segments_BT))

    base = logits(config, params, (ids_BT, positions_BT, segments_BT))
    for position in (3, 9):
        difference_T = np.max(np.abs(changed(position) - base), axis=(0, 2))
        seen = (np.arange(12) >= position) & (segments_BT[0] == segments_BT[0, position])
        assert np.all(difference_T[~seen] == 0), difference_T
        assert np.all(difference_T[seen] > 0), difference_T


@pytest.mark.parametrize(("scan", "remat"), [("blocks", "none"), ("unrolled", "full")])
def test_a_packed_document_is_as_if_alone(tiny, scan, remat):
    config = make(tiny, scan=scan, remat=remat)
    params = randomise(init(config, jax.random.key(0)))
    packed = inputs(1, 12, segments=[[1] * 7 + [2] * 5])
    alone = inputs(1, 5)
    alone = (packed[0][:, 7:], *alone[1:])
    np.testing.assert_allclose(
        logits(config, params, packed)[:, 7:], logits(config, params, alone), rtol=0, atol=2e-5
    )


@all_variants
@pytest.mark.slow
def test_forms_of_the_depth_loop_agree(tiny, name, options):
    """Every form, remat policy and way to compute the logits: values and gradients."""
    batch = inputs()
    results = {}
    forms = [("blocks", "none", "direct"), ("blocks", "full", "auto"), ("unrolled", "full", "auto")]
    policies = sorted(depth.REMAT_POLICIES.keys() - {"full", "offload"})  # CPUs cannot offload
    forms += [("auto", policy, "auto") for policy in policies]
    if variants.VARIANTS[name].grows == "block":
        forms += [("unrolled", "none", "auto"), ("unrolled", "full", "direct")]
        forms += [("boundaries", "full", "auto"), ("boundaries", "full", "direct")]
    for scan, remat, kernel in forms:
        config = make(tiny, name, scan=scan, remat=remat, kernel=kernel, **options)
        params = randomise(init(config, jax.random.key(0)), scale=0.05)

        @jax.jit
        @jax.value_and_grad
        def loss(params, config=config):
            hidden_BTD = transformer.apply(config, params, *batch).hidden_BTD
            return losses.cross_entropy_sums(
                hidden_BTD, transformer.head(params), batch[0], np.ones((2, 12), np.float32)
            ).loss

        results[scan, remat, kernel] = loss(params)
    value, grads = results.pop(("blocks", "none", "direct"))
    for form, (other_value, other_grads) in results.items():
        np.testing.assert_allclose(other_value, value, rtol=1e-6, err_msg=str(form))
        for a, b in zip(jax.tree.leaves(other_grads), jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.max(np.abs(b)) + 1e-9)


@pytest.mark.parametrize(("num_layers", "num_blocks"), [(7, 3), (1, 1), (5, 5)])
@pytest.mark.parametrize("scan", ["blocks", "unrolled"])
def test_short_last_blocks_read_what_the_table_says(tiny, scan, num_layers, num_blocks):
    config = make(tiny, "delta_block_released", num_layers, num_blocks, scan=scan)
    params = init(config, jax.random.key(0))
    output = jax.jit(lambda params: transformer.apply(config, params, *inputs(), capture=True))(
        params
    )
    routing = transformer.routing_by_reader(config, output.routing)
    names = variants.source_names("delta_block_released", num_layers, num_blocks)
    assert {r: len(s) for r, s in names.items()} == {r: len(w) for r, w in routing.items()}
    for reader, weights_SBT in routing.items():
        # Zero queries weigh what is read alike: nothing that is read is masked, nothing else adds.
        np.testing.assert_allclose(weights_SBT, 1 / len(names[reader]), atol=1e-6)


@plain_variants
def test_captured_weights_are_spread_over_the_visible_sources(tiny, name, options):
    config = make(tiny, name, **options)
    params = randomise(init(config, jax.random.key(0)))
    output = jax.jit(lambda params: transformer.apply(config, params, *inputs(), capture=True))(
        params
    )
    if name == "baseline":
        assert transformer.routing_by_reader(config, output.routing) == {}
        return
    for weights_SBT in transformer.routing_by_reader(config, output.routing).values():
        np.testing.assert_allclose(np.sum(weights_SBT, axis=0), 1.0, atol=1e-5)
        assert np.min(weights_SBT) > 0


@pytest.mark.parametrize(("dtype", "remat"), [("bfloat16", "full"), ("float32", "none")])
def test_padding_and_single_tokens_are_finite_and_add_nothing(tiny, dtype, remat):
    config = make(tiny, num_layers=2, dtype=dtype, remat=remat)
    params = init(config, jax.random.key(0))
    ids_BT, positions_BT, segments_BT = inputs(4, 12)
    weights_BT = np.ones((4, 12), np.float32)
    weights_BT[2] = 0  # a row of padding
    weights_BT[3, 1:] = 0  # a row with one token
    segments_BT[3, 1:] = 2

    @jax.jit
    @jax.value_and_grad
    def loss(params, *batch):
        hidden_BTD = transformer.apply(config, params, *batch[:3]).hidden_BTD
        return losses.cross_entropy_sums(
            hidden_BTD, transformer.head(params), batch[0], batch[3]
        ).loss

    everything = (ids_BT, positions_BT, segments_BT, weights_BT)
    value, grads = loss(params, *everything)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves((value, grads)))
    kept = loss(params, *(x[[0, 1]] for x in everything))
    single = loss(params, *(x[[3, 3]] for x in everything[:3]), weights_BT[[3, 2]])
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(value, kept[0] + single[0], rtol=tolerance)
    for whole, a, b in zip(*map(jax.tree.leaves, (grads, kept[1], single[1])), strict=True):
        np.testing.assert_allclose(whole, a + b, atol=tolerance * np.max(np.abs(whole)) + 1e-9)


@pytest.mark.slow
@all_variants
def test_bfloat16_follows_float32(tiny, name, options):
    config = make(tiny, name, **options)
    params = init(config, jax.random.key(0))
    half = FrozenConfigDict({**config.to_dict(), "dtype": "bfloat16"})
    wide = logits(config, params, inputs())
    error = np.max(np.abs(logits(half, params, inputs()) - wide)) / np.max(np.abs(wide))
    assert 0 < error < 0.05
    assert {p.dtype for p in jax.tree.leaves(init(half, jax.random.key(0)))} == {
        jnp.dtype("float32")
    }


def test_routing_is_computed_in_float32_under_bfloat16(tiny):
    """No bfloat16 value is reduced, exponentiated or divided in a reader."""
    config = make(tiny, "delta_attnres", dtype="bfloat16", scan="unrolled")
    params = init(config, jax.random.key(0))
    jaxpr = jax.make_jaxpr(lambda p: transformer.apply(config, p, *inputs()).hidden_BTD)(params)
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("exp", "rsqrt", "reduce_sum", "reduce_max", "div"):
            for variable in equation.invars:
                assert getattr(variable.aval, "dtype", None) != jnp.bfloat16, equation


def test_initial_values_do_not_depend_on_variant_or_blocks(tiny):
    plain = init(make(tiny, "baseline"), jax.random.key(0))
    for name, blocks in (("delta_block", 2), ("delta_block", 4), ("attnres_full", 1)):
        routed = init(make(tiny, name, num_blocks=blocks), jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, without_routing(routed), plain)


def test_initial_scale(tiny):
    params = init(make(tiny, tied=False), jax.random.key(0))
    for name in ("embedding", "head"):
        assert abs(np.std(params[name]) - 0.02) < 0.002
    assert abs(np.std(params["layers"]["mlp"]["down"]) - 0.02) < 0.002
    assert np.all(params["layers"]["attn"]["query_norm"]["gain"] == 1)
    assert np.all(params["layers"]["attn_reader"]["routing"]["query"] == 0)


def test_token_ids_outside_the_vocabulary_are_not_clipped(tiny):
    config = make(tiny)
    params = init(config, jax.random.key(0))
    ids_BT, *rest = inputs(1, 4)
    ids_BT[0, 1] = 97
    assert np.isnan(logits(config, params, (ids_BT, *rest))[0, 1]).all()


@pytest.mark.parametrize("tied", [True, False])
def test_loss_equals_the_one_from_whole_logits_and_never_holds_them(tiny, monkeypatch, tied):
    monkeypatch.setattr(losses, "_CHUNK_LOGITS", 2 * 12 * 128)
    config = make(tiny, tied=tied, num_layers=2, vocab_size=300)  # chunks of 128, the last of 44
    params = randomise(init(config, jax.random.key(0)))
    batch = inputs(2, 12)
    targets_BT = np.random.default_rng(1).integers(0, 300, (2, 12))
    weights_BT = (np.arange(24).reshape(2, 12) % 3 > 0).astype(np.float32)
    assert len({*targets_BT[weights_BT > 0] // 128}) == 3

    def chunked(params):
        hidden_BTD = transformer.apply(config, params, *batch).hidden_BTD
        head_VD = transformer.head(params)
        return losses.cross_entropy_sums(hidden_BTD, head_VD, targets_BT, weights_BT)

    def whole(params):
        hidden_BTD = transformer.apply(config, params, *batch).hidden_BTD
        logits_BTV = jnp.einsum("btd,vd->btv", hidden_BTD, transformer.head(params))
        log_p_BTV = jax.nn.log_softmax(logits_BTV)
        target_BT = jnp.take_along_axis(log_p_BTV, targets_BT[..., None], axis=-1)[..., 0]
        return jnp.sum(-target_BT * weights_BT)

    value, grads = jax.jit(jax.value_and_grad(lambda p: chunked(p).loss))(params)
    expected, expected_grads = jax.jit(jax.value_and_grad(whole))(params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.max(np.abs(b)) + 1e-9)
    text = str(jax.make_jaxpr(jax.grad(lambda p: chunked(p).loss))(params))
    assert "1,2,12,128]" in text  # a chunk of the logits
    assert not re.search(r"2,12,(300|384)\]", text)
