"""Live curves of routing: their numbers, their names, and that nothing else changes."""

import json

import jax
import numpy as np
import pytest
from model_helpers import init
from routing_helpers import EMBEDDING_NORM, known_params, logits_by_reader, small
from run_helpers import losses, train

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.data import dataset
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.training import metrics, probes, programs


@pytest.fixture(scope="module")
def runs(corpora, tmp_path_factory):
    """The same run without and with curves; rows are documents of their own."""
    from conftest import tiny_config

    folders = {}
    for every in (0, 2):
        config = tiny_config()
        config.data.update({"source": "text", "dir": str(corpora / "long")})
        config.data.document_masking = False
        config.model.residual.update({"variant": "delta_block", "null_source": True})
        config.train.update({"steps": 4, "log_every": 4, "accumulation": 2})
        config.metrics.update({"routing_every": every, "tensorboard": bool(every)})
        folders[every] = tmp_path_factory.mktemp("probes") / str(every)
        train(config, folders[every], devices=2)
    return folders


def test_curves_are_those_of_the_checkpoint(runs):
    """By `load` on the first rows of the order, those of a micro-batch."""
    row = metrics.read_rows(runs[2])[0][4]
    model = load(runs[2])
    data = dataset.open_data(model.config)
    ids = np.stack([data.rows[s][n]["inputs"] for s, n in (data.order[i] for i in range(4))])
    weights = model.routing(ids)
    assert list(weights) == [f"layers.{n}.{kind}" for n in (0, 1) for kind in ("attn", "mlp")]
    largest = []
    for name, w_SBT in weights.items():
        _, layer, kind = name.split(".")
        tag = f"layer_{layer}_{'attention' if kind == 'attn' else 'MLP'}"
        found = row[f"routing_max_weight/{tag}"]
        np.testing.assert_allclose(found, w_SBT.max(axis=0).mean(), rtol=1e-5)
        if len(w_SBT) > 1:
            largest.append(found)
            found = row[f"routing_embedding_weight/{tag}"]
            np.testing.assert_allclose(found, w_SBT[1].mean(), rtol=1e-5)
    np.testing.assert_allclose(row["routing_max_weight/mean"], np.mean(largest), rtol=1e-6)
    embedding = np.asarray(model.params["embedding"])[ids]
    norm = np.linalg.norm(embedding, axis=-1).mean()
    np.testing.assert_allclose(row["source_norm/embedding"], norm, rtol=1e-5)
    np.testing.assert_allclose(row["stream_norm/layer_0_attention"], norm, rtol=1e-5)
    assert "source_norm/block_0" in row
    assert "source_norm/block_1" not in row  # which no reader reads


def test_rows_are_written_when_they_are_due_and_change_nothing_else(runs):
    plain, curves = (metrics.read_rows(runs[every])[0] for every in (0, 2))
    assert sorted(plain) == [1, 4]  # the first, the last, and each train.log_every
    assert sorted(curves) == [1, 2, 4]
    routed = {step: [k for k in row if "/" in k] for step, row in curves.items()}
    assert [bool(routed[step]) for step in (1, 2, 4)] == [False, True, True]
    assert routed[2] == routed[4]
    assert losses(runs[0]) == {step: curves[step]["loss"] for step in (1, 4)}
    assert curves[2]["routing_entropy/mean"] != curves[4]["routing_entropy/mean"]
    assert set(plain[4]) == set(curves[4]) - set(routed[4])


def test_tensorboard_has_them_under_the_same_names(runs):
    row = metrics.read_rows(runs[2])[0][4]
    (events,) = (runs[2] / "tensorboard").iterdir()
    written = events.read_bytes()
    names = [name for name in row if "/" in name]
    assert all(written.count(name.encode()) == 2 for name in names), names  # of steps 2 and 4


def test_known_queries_give_known_curves(tmp_path):
    config = small(tmp_path, "delta_attnres", layers=12)
    logits = logits_by_reader(config.model)
    ids = np.arange(16)[None]
    batch = {"inputs": ids, "positions": ids, "segments": np.ones_like(ids)}
    measure = jax.jit(lambda params: probes.measure(config, params, batch))
    row = probes.row(config, jax.device_get(measure(known_params(config.model, logits))))
    for name, logit in logits.items():
        _, layer, kind = name.split(".")
        tag = f"layer_{int(layer):02}_{'attention' if kind == 'attn' else 'MLP'}"
        S = 2 * int(layer) + (kind == "mlp") + 1
        weight = np.exp(logit) / (np.exp(logit) + S - 1)
        rest = 1 / (np.exp(logit) + S - 1)
        entropy = -weight * np.log(weight) - (S - 1) * rest * np.log(rest)
        expected = {
            "routing_max_weight": weight,
            "routing_embedding_weight": weight,
            "routing_ratio": weight,
            "routing_entropy": entropy / np.log(S),
            "routing_effective_sources": np.exp(entropy),
            "stream_norm": EMBEDDING_NORM,
        }
        for key, value in expected.items():
            np.testing.assert_allclose(row[f"{key}/{tag}"], value, rtol=1e-4, err_msg=key)
    assert "routing_max_weight/layer_00_attention" not in row  # which has no source


def test_the_train_step_is_the_same_program(corpora):
    texts = []
    for every in (0, 3):
        config = config_lib.from_dict(small(corpora / "long", "delta_block").to_dict())
        config.metrics.routing_every = every
        config = config_lib.resolve(config)
        mesh = mesh_lib.make_mesh(mesh_lib.mesh_shape(config.mesh, 1), jax.devices()[:1])
        texts.append(programs.lower_train(config, mesh).as_text())
    assert texts[0] == texts[1]


def test_what_is_not_finite_is_null(tmp_path):
    config = small(tmp_path, "delta_attnres")
    ids = np.arange(16)[None]
    batch = {"inputs": ids, "positions": ids, "segments": np.ones_like(ids)}
    params = init(config.model, jax.random.key(0))
    params["embedding"] *= np.nan
    measure = jax.jit(lambda params: probes.measure(config, params, batch))
    row = probes.row(config, jax.device_get(measure(params)))
    assert row["stream_norm/layer_0_MLP"] is None
    json.dumps(row, allow_nan=False)


def test_a_baseline_logs_its_stream_and_says_so(corpora, tmp_path, capsys):
    config = config_lib.from_dict(small(corpora / "long", "baseline", layers=1).to_dict())
    config.train.update({"steps": 2, "batch_size": 8})
    config.optim.warmup_steps = 1
    config.eval.every = 0
    config.metrics.update({"routing_every": 1, "tensorboard": False})
    train(config, tmp_path / "run")
    said = capsys.readouterr().out
    assert "metrics.routing_every: baseline routes nothing; the norm of its stream alone" in said
    assert "routing on 8 rows every 1 steps: " in said
    row = metrics.read_rows(tmp_path / "run")[0][2]
    names = {name for name in row if "/" in name}
    assert names == {"stream_norm/layer_0_attention", "stream_norm/layer_0_MLP"}
