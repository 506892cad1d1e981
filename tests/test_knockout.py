"""Sources and readers taken away: equal to models that do not have them."""

import jax
import numpy as np
import pytest
from conftest import tiny_config
from inference_helpers import open_run, write_run
from model_helpers import init, make, randomise

from deltares_jax.data import dataset
from deltares_jax.inference import held_out, knockout, measured, scorer
from deltares_jax.models import readings, transformer, variants
from deltares_jax.training import compare

IDS = np.random.default_rng(0).integers(0, 97, (2, 12))


def run(model, params, capture=False):
    """Hidden states, and the weights of readers where they are captured."""
    positions_BT = np.broadcast_to(np.arange(IDS.shape[1]), IDS.shape)
    inputs = (IDS, positions_BT, np.ones_like(IDS))

    def forward(params):
        output = transformer.apply(model, params, *inputs, capture=capture)
        routing = transformer.routing_by_reader(model, output.routing) if capture else None
        return output.hidden_BTD, routing

    return jax.device_get(jax.jit(forward)(params))


def made(name, **options):
    model = make(tiny_config(), name, scan="blocks", **options)
    return model, randomise(init(model, jax.random.key(0)))


def all_away(model):
    return {kind: np.zeros_like(mask) for kind, mask in knockout.masks(model).items()}


ROUTED = [name for name, row in variants.VARIANTS.items() if row.routing != "none"]
QUICK = ("attnres_block", "attnres_cumulative")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ROUTED]
)
def test_without_any_reader_it_is_the_baseline(name):
    model, params = made(name)
    routed_BTD, _ = run(model, params)
    plain_BTD, _ = run(model, knockout.masked(params, all_away(model)))
    config = tiny_config()
    config.model.update(model.to_dict())
    baseline, rest = compare.without_routing(config, params)
    rest.pop("final_reader", None)
    expected_BTD, _ = run(baseline.model, rest)
    np.testing.assert_allclose(plain_BTD, expected_BTD, atol=2e-4)
    assert np.abs(routed_BTD - expected_BTD).max() > 0.1
    kept_BTD, _ = run(model, knockout.masked(params, knockout.masks(model)))
    np.testing.assert_allclose(kept_BTD, routed_BTD, atol=2e-5)


def test_without_the_null_source_it_is_the_model_without_that_option():
    model, params = made("delta_block", null_source=True)
    away_BTD, _ = run(model, knockout.masked(params, knockout.without_source(model, "null")))
    plain = make(tiny_config(), "delta_block", scan="blocks")
    expected_BTD, _ = run(plain, params)
    np.testing.assert_allclose(away_BTD, expected_BTD, atol=1e-5)


def test_without_a_reader_it_is_the_model_with_that_gate_closed():
    model, params = made("delta_attnres", gate="alpha")
    away_BTD, _ = run(
        model, knockout.masked(params, knockout.without_reader(model, "layers.1.mlp"))
    )
    params["layers"]["mlp_reader"]["gate"] = params["layers"]["mlp_reader"]["gate"].at[1].set(0.0)
    expected_BTD, _ = run(model, params)
    np.testing.assert_allclose(away_BTD, expected_BTD, atol=1e-6)


@pytest.mark.parametrize("name", ["attnres_full", "delta_replace"])
def test_what_is_left_is_renormalised(name):
    """At the first reader with a choice, whose sources do not depend on those taken away."""
    model, params = made(name)
    reader = next(r for r in readings.readers(model) if len(r.sources) > 2)
    _, before = run(model, params, capture=True)
    for place, source in enumerate(reader.sources):
        found = knockout.masks(model)
        _, layer, kind = reader.name.split(".")
        found[kind][int(layer), reader.indices[place]] = False
        _, after = run(model, knockout.masked(params, found), capture=True)
        expected_SBT = np.delete(before[reader.name], place, axis=0)
        expected_SBT /= expected_SBT.sum(axis=0)
        got_SBT = after[reader.name]
        assert not got_SBT[place].any(), source
        np.testing.assert_allclose(np.delete(got_SBT, place, axis=0), expected_SBT, atol=1e-5)


def test_masks_take_a_source_from_all_and_a_reader_its_sources():
    model, _ = made("attnres_block")  # two blocks of two layers
    found = knockout.without_source(model, "blocks.0.sum")
    assert [mask.sum() for mask in found.values()] == [12, 12, 2]  # of 4 × 4, 4 × 4 and 3
    assert [m.all() for m in knockout.without_source(model, "stream").values()] == [0, 0, 1]
    found = knockout.without_reader(model, "layers.2.attn")
    assert found["mlp"].all()
    assert found["final"].all()
    assert found["attn"].all(axis=1).tolist() == [True, True, False, True]
    assert not knockout.without_reader(model, "final")["final"].any()


def test_differences_are_of_the_losses_that_evaluation_gives(corpora, tmp_path):
    config = tiny_config()
    config.data.update({"source": "text", "dir": str(corpora / "long")})
    config.model.residual.update({"variant": "delta_block", "num_blocks": 2})
    model = open_run(write_run(config, tmp_path / "run", devices=1))
    rows = dataset.open_eval_sets(model.config)["text"]
    table = measured.measure(model, rows, 5, 4)
    found = knockout.run(model, rows, 80, 4, table)
    whole = held_out.evaluate(model, scorer.Scorer(model), rows, 80, 4)
    np.testing.assert_allclose(found["loss"], whole.mean, rtol=1e-6)
    assert [row["name"] for row in found["sources"]] == ["embedding", "blocks.0.delta"]
    names = ["layers.0.mlp", "layers.1.attn", "layers.1.mlp"]
    assert [row["name"] for row in found["readers"]] == names
    for row in found["sources"] + found["readers"]:
        np.testing.assert_allclose(row["loss"] - found["loss"], row["difference"], atol=1e-9)
        assert row["difference"] != 0
    mean = np.mean([r["embedding_weight"] for r in table["readers"] if r["sources"]])
    np.testing.assert_allclose(found["sources"][0]["beside"], mean)
