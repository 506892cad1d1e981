"""Every variant and option against reference numbers made by other code (tests/golden)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_params import Case, case_names

from deltares_jax.models import transformer, variants
from deltares_jax.training import losses

# Variants whose float32 logits amplify rounding by nature: (logits, routing, gradients).
LOOSE = {"attnres_block", "attnres_full", "delta_replace"}
TOLERANCE = {False: (2e-5, 2e-5, 5e-5), True: (5e-4, 2e-4, 1e-3)}


def evaluate(case: Case, config):
    """Logits, loss, routing by reader and gradients of a case."""
    B, T = case.ids.shape
    positions_BT = np.broadcast_to(np.arange(T), (B, T))
    segments_BT = np.ones((B, T), np.int32)

    def forward(params, capture):
        output = transformer.apply(
            config, params, case.ids, positions_BT, segments_BT, capture=capture
        )
        targets_BT = np.roll(case.ids, -1, axis=1)
        weights_BT = np.broadcast_to(np.arange(T) < T - 1, (B, T)).astype(np.float32)
        head_VD = transformer.head(params)
        sums = losses.cross_entropy_sums(output.hidden_BTD, head_VD, targets_BT, weights_BT)
        logits_BTV = jnp.einsum("btd,vd->btv", output.hidden_BTD, head_VD)
        routing = transformer.routing_by_reader(config, output.routing) if capture else None
        return sums.loss / sums.weight, (logits_BTV, routing)

    params = case.params(config)
    loss, (logits_BTV, routing) = jax.jit(forward, static_argnums=1)(params, True)
    if not case.name.startswith("B1"):
        return logits_BTV, routing, loss, None
    # What captures routing weights is not under the derivative rules of the depth loop.
    both = jax.jit(jax.value_and_grad(forward, has_aux=True), static_argnums=1)
    (loss, (logits_BTV, _)), grads = both(params, False)
    return logits_BTV, routing, loss, grads


def check(case: Case, config, logits_tol: float, routing_tol: float, grad_tol, gate_tol):
    """grad_tol(name): relative to the largest entry of the array in its layer."""
    logits_BTV, routing, loss, grads = evaluate(case, config)
    np.testing.assert_allclose(logits_BTV, case.arrays["logits"], rtol=0, atol=logits_tol)
    expected = {k.partition("/")[2] for k in case.arrays.files if k.startswith("routing/")}
    assert set(routing) == expected
    for reader, weights_SBT in routing.items():
        reference_SBT = case.arrays[f"routing/{reader}"]
        assert weights_SBT.shape == reference_SBT.shape, reader
        np.testing.assert_allclose(
            weights_SBT, reference_SBT, rtol=0, atol=routing_tol, err_msg=reader
        )
    np.testing.assert_allclose(loss, case.arrays["loss64"], rtol=0, atol=logits_tol)
    if grads is None:
        return
    reference = case.grads(config)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        wanted = reference
        for key in path:
            wanted = wanted[key.key]
        grad, wanted = np.asarray(grad, np.float64), np.asarray(wanted, np.float64)
        if name.endswith("_reader/gate"):
            limit = gate_tol[0] + gate_tol[1] * np.abs(wanted)
        else:
            axes = tuple(range(name.startswith("layers/"), wanted.ndim))
            limit = grad_tol(name) * np.max(np.abs(wanted), axis=axes, keepdims=True) + 1e-12
        excess = np.max(np.abs(grad - wanted) / limit)
        assert excess <= 1, f"{name}: {excess:.2f} times the tolerance"


def check_float32(name: str, **changes):
    case = Case(name)
    logits_tol, routing_tol, grad_tol = TOLERANCE[case.meta["variant"] in LOOSE]
    config = case.config(**changes)
    check(case, config, logits_tol, routing_tol, lambda _: grad_tol, (1e-7, 1e-3))


def check_float64(name: str, **changes):
    case = Case(name)
    with jax.enable_x64(True):
        quantised = case.quantised()

        def grad_tol(ours: str) -> float:
            return 2e-5 if ours.removeprefix("layers/") in quantised else 1e-6

        config = case.config("float64", **changes)
        check(case, config, 1e-6, 1e-6, grad_tol, (1e-7, 1e-6))


NAMES = case_names()
B1 = [name for name in NAMES if name.startswith("B1")]
# Without sources the unrolled form is the scan over one block.
WITH_SOURCES = [n for n in B1 if variants.VARIANTS[Case(n).meta["variant"]].grows != "never"]


def test_every_variant_has_a_reference():
    assert {Case(name).meta["variant"] for name in B1} == set(variants.VARIANTS)


@pytest.mark.parametrize("name", B1)
def test_float32(name):
    check_float32(name, scan="blocks")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in B1])
def test_float32_logits_of_the_wider_model(name):
    check_float32(name, scan="blocks")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_SOURCES)
def test_float32_unrolled(name):
    check_float32(name, scan="unrolled", remat="full")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_float64(name):
    check_float64(name, scan="blocks")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_SOURCES)
def test_float64_unrolled(name):
    check_float64(name, scan="unrolled", remat="full")
