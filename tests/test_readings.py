"""Numbers of routing: against reference weights, and of models whose routing is known."""

import jax
import numpy as np
import pytest
from golden_params import Case
from routing_helpers import EMBEDDING_NORM, known_params, logits_by_reader, small
from test_golden import B1, LOOSE

from deltares_jax.models import readings, transformer, variants

DEFAULT = {"B1_delta_block_null", "B1_attnres_block"}


def measure(model, params, ids_BT, counts_BT=None, details=False):
    B, T = np.shape(ids_BT)
    positions_BT = np.broadcast_to(np.arange(T), (B, T))
    segments_BT = np.ones((B, T), np.int32)
    counts_BT = np.ones((B, T), np.float32) if counts_BT is None else counts_BT

    def run(params):
        output = transformer.apply(model, params, ids_BT, positions_BT, segments_BT, capture=True)
        return readings.sums(model, output.routing, counts_BT, details)

    return jax.device_get(jax.jit(run)(params))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in B1],
)
def test_numbers_are_those_of_the_reference_weights(name):
    """In numpy from the reference weights of each sublayer, over a part of the tokens."""
    case = Case(name)
    model = case.config()
    counts_BT = np.zeros(case.ids.shape, np.float32)
    counts_BT[0, 3:] = counts_BT[1, :7] = 1
    sums = measure(model, case.params(model), case.ids, counts_BT)
    table = readings.table(model, sums)
    assert table["tokens"] == counts_BT.sum()
    known = {k.partition("/")[2] for k in case.arrays.files if k.startswith("routing/")}
    assert {r["name"] for r in table["readers"] if r["sources"]} == known
    tolerance = {"rtol": 0, "atol": 1e-3 if model.residual.variant in LOOSE else 1e-4}
    for reader in table["readers"]:
        if not reader["sources"]:
            assert reader["max_weight"] is reader["routed_norm"] is None
            continue
        a_SN = case.arrays[f"routing/{reader['name']}"][:, counts_BT > 0].astype(np.float64)
        assert len(reader["sources"]) == len(a_SN)
        entropy_N = -np.sum(a_SN * np.log(np.maximum(a_SN, 1e-30)), axis=0)
        expected = {
            "weights": a_SN.mean(axis=1),
            "max_weight": a_SN.max(axis=0).mean(),
            "effective_sources": np.exp(entropy_N).mean(),
        }
        if len(a_SN) > 1:
            expected["entropy"] = entropy_N.mean() / np.log(len(a_SN))
        else:
            assert reader["entropy"] is None
        if "embedding" in reader["sources"]:
            expected["embedding_weight"] = a_SN[reader["sources"].index("embedding")].mean()
        else:
            assert reader["embedding_weight"] is None
        for key, value in expected.items():
            np.testing.assert_allclose(reader[key], value, **tolerance, err_msg=key)


def test_known_queries_give_the_known_heat_map(tmp_path):
    model = small(tmp_path, "delta_attnres", layers=3).model
    logits = logits_by_reader(model)
    params = known_params(model, logits)
    ids_BT = np.arange(32).reshape(2, 16)
    sums = measure(model, params, ids_BT, details=True)
    for reader in readings.table(model, sums)["readers"]:
        np.testing.assert_allclose(reader["stream_norm"], EMBEDDING_NORM, rtol=1e-5)
        S = len(reader["sources"])
        if not S:
            continue
        u = np.exp(logits.get(reader["name"], 0.0))
        expected = np.array([u] + [1.0] * (S - 1)) / (u + S - 1)
        np.testing.assert_allclose(reader["weights"], expected, rtol=1e-5)
        np.testing.assert_allclose(reader["max_weight"], expected[0], rtol=1e-5)
        np.testing.assert_allclose(reader["embedding_weight"], expected[0], rtol=1e-5)
        # The other sources are zero.
        np.testing.assert_allclose(reader["routed_ratio"], expected[0], rtol=1e-5)
        np.testing.assert_allclose(reader["routed_norm"], EMBEDDING_NORM * expected[0], rtol=1e-5)
        number = [r.name for r in readings.readers(model)].index(reader["name"])
        bin_of = min(int(expected[0] * readings.BINS), readings.BINS - 1)
        np.testing.assert_array_equal(np.flatnonzero(sums["histogram"][number]), [bin_of])
        assert sums["histogram"][number][bin_of] == ids_BT.size
    norms = [source["norm"] for source in readings.table(model, sums)["sources"]]
    np.testing.assert_allclose(norms, [EMBEDDING_NORM, 0, 0, 0, 0, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("variant", "cosine"), [("attnres_cumulative", 1), ("delta_block", 0)])
def test_cosines_of_known_sources(tmp_path, variant, cosine):
    """Streams are all the embedding, changes of the stream are all zero."""
    model = small(tmp_path, variant, layers=2).model
    sums = measure(model, known_params(model, {}), np.arange(16)[None], details=True)
    count = sums["cosine"].shape[0]
    expected = np.full((count, count), float(cosine))
    expected[0, 0] = 1
    np.testing.assert_allclose(sums["cosine"] / sums["tokens"], expected, atol=1e-5)
    for reader in readings.table(model, sums)["readers"]:  # equal logits
        S = len(reader["sources"])
        np.testing.assert_allclose(reader["weights"], [1 / max(S, 1)] * S, rtol=1e-5)


def test_a_closed_gate_and_a_centred_mix_route_nothing(tmp_path):
    for residual in ({"gate": "alpha"}, {"centered": True}):
        model = small(tmp_path, "delta_attnres", layers=1, **residual).model
        params = transformer.init(model, jax.random.key(0))
        reader = readings.table(model, measure(model, params, np.arange(8)[None]))["readers"][1]
        assert reader["routed_ratio"] == 0
        np.testing.assert_allclose(reader["max_weight"], 1 / len(reader["sources"]))


def test_readers_and_sources_have_names_for_people(tmp_path):
    model = small(tmp_path, "delta_block_released", layers=7, blocks=3).model
    readers = readings.readers(model)
    assert [r.label for r in readers][:3] == [
        "layer 0 attention",
        "layer 0 MLP",
        "layer 1 attention",
    ]
    last = readers[-1]
    assert [readings.label(s) for s in last.sources] == ["embedding", "block 0", "block 1"]
    assert readings.source_depths(model) == {
        "embedding": 0,
        "blocks.0.change": 3,
        "blocks.1.change": 6,
    }
    model = small(tmp_path, "attnres_cumulative").model
    assert readings.label(readings.readers(model)[-1].sources[1]) == "layer 0 attention"
    assert set(readings.source_depths(model).values()) == {0, 0.5, 1, 1.5}


def test_streams_that_are_not_there_have_no_norm(tmp_path):
    """The sum of a block is empty where it begins; attnres_full keeps no stream."""
    for variant in variants.VARIANTS:
        model = small(tmp_path, variant, layers=4).model
        without = [r.name for r in readings.readers(model) if not r.has_stream]
        expected = {
            "attnres_block": ["layers.0.attn", "layers.2.attn", "final"],
            "attnres_full": [r.name for r in readings.readers(model)],
        }
        assert without == expected.get(variant, [])
