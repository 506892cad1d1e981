"""Runs that start from a converted checkpoint: equal losses, rates of groups, a frozen base."""

import functools
import json
import pathlib
import re
import shutil

import convert_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_helpers import convert, refuses
from data_helpers import prepare_files

from deltares_jax import config as config_lib
from deltares_jax import config_notes, config_resume, load
from deltares_jax.data import sources
from deltares_jax.interop import exporting
from deltares_jax.training import compare, loop, metrics, optim, step, workdir


def train(config, folder, count=8):
    devices = jax.devices()[:count]
    loop.train(config_lib.resolve(config), str(folder), "configs/finetune.py", devices)
    return metrics.read_rows(folder)[0]


@pytest.fixture
def plain(tiny, tmp_path):
    """A plain model of the shape of `tiny`, in the format of Qwen3."""
    config = tiny.copy_and_resolve_references()
    config.model.residual.variant = "baseline"
    helpers.random_run(tmp_path / "pretrained", config, scale=0.1)
    exporting.export(str(tmp_path / "pretrained"), None, str(tmp_path / "hf"))
    (tmp_path / "hf" / "merges.txt").write_text("a b\n")
    return tmp_path / "hf"


@pytest.fixture
def finetune(tiny, plain, tmp_path):
    """The config of a fine-tune of it, and the checkpoint that it starts from."""
    convert(plain, tmp_path / "init", variant="delta_block", num_blocks=2)
    tiny.model.residual.centered = True
    tiny.init_from = str(tmp_path / "init")
    tiny.optim.update({"learning_rate": 5e-5, "final_learning_rate": 5e-6, "warmup_steps": 1})
    tiny.optim.routing_learning_rate = 5e-3
    tiny.train.steps = 3
    return tiny


def routing_and_base(params):
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    routing = {name: leaf for name, leaf in leaves.items() if "reader" in name}
    return routing, {name: leaf for name, leaf in leaves.items() if name not in routing}


def test_start_prints_the_loss_beside_the_plain_models(finetune, tmp_path, capsys):
    """On a mesh that cuts vocabulary and width; the files of the tokenizer go along."""
    finetune.mesh.tensor = 2
    rows = train(finetune, tmp_path / "run")
    printed = capsys.readouterr().out
    found = re.search(
        r"before the first update, on 8 rows: loss (\S+), without routing (\S+); "
        r"largest difference of a logit (\S+)",
        printed,
    )
    assert found, printed
    loss, without, difference = found.groups()
    assert loss == without == f"{rows[1]['loss']:.4f}"
    assert float(difference) == 0
    run = workdir.shown(tmp_path / "run")
    assert f"next: python -m deltares_jax.convert export --workdir={run} --out={run}_hf" in printed
    assert rows[1]["routing_learning_rate"] == pytest.approx(5e-3)
    assert rows[3]["routing_learning_rate"] == pytest.approx(5e-4)
    exporting.export(str(tmp_path / "run"), None, str(tmp_path / "out"))
    assert helpers.read_tensors(tmp_path / "out")["model.embed_tokens.weight"].shape == (257, 32)
    assert (tmp_path / "out" / "merges.txt").read_text() == "a b\n"


def test_comparison_tells_what_routing_changes(tiny, plain, tmp_path):
    """Routing that is not centred changes the model."""
    convert(plain, tmp_path / "init", variant="delta_block", num_blocks=2, centered=False)
    model, plain_model = load(tmp_path / "init"), load(tmp_path / "pretrained")
    random = np.random.default_rng(0)
    inputs, targets = random.integers(0, 257, (2, 2, 16))
    row = {
        "inputs": inputs,
        "targets": targets,
        "weights": np.float32(random.integers(0, 2, (2, 16))),
        "positions": np.tile(np.arange(16), (2, 1)),
        "segments": np.ones((2, 16), np.int32),
    }
    numbers = jax.jit(compare.compare, static_argnums=0)(model.config, model.params, row)
    logits = model.logits(inputs), plain_model.logits(inputs)
    assert numbers["difference"] > 5e-4
    np.testing.assert_allclose(
        numbers["difference"], np.max(np.abs(logits[0] - logits[1])), rtol=0, atol=1e-5
    )
    for name, of_BTV in zip(("loss", "plain"), logits, strict=True):
        log_p_BTV = np.asarray(jax.nn.log_softmax(of_BTV))
        hit_BT = np.take_along_axis(log_p_BTV, targets[..., None], -1)[..., 0]
        loss = -np.sum(hit_BT * row["weights"]) / np.sum(row["weights"])
        np.testing.assert_allclose(numbers[name], loss, rtol=1e-5)


def test_model_that_differs_is_refused_with_both_values(finetune, tmp_path):
    finetune.model.rope_theta = 1e6
    finetune.model.residual.num_blocks = 1
    with refuses("model.residual.num_blocks: 2 → 1", "model.rope_theta: 10000.0 → 1000000.0"):
        train(finetune, tmp_path / "run")


def test_blocks_do_not_matter_where_there_are_none(tiny, plain, tmp_path):
    convert(plain, tmp_path / "init")
    tiny.model.residual.update({"variant": "baseline", "num_blocks": 1})
    saved = load(tmp_path / "init").config
    assert saved.model.residual.num_blocks == 2
    config_resume.changed_on_init(saved.to_dict(), config_lib.resolve(tiny))


def test_frozen_base_moves_routing_alone_and_resumes(finetune, tmp_path):
    finetune.optim.freeze_base = True
    finetune.checkpoint.every = 2
    train(finetune, tmp_path / "run")
    before, after = (load(tmp_path / name).params for name in ("init", "run"))
    (old_routing, old_base), (routing, base) = map(routing_and_base, (before, after))
    for name, leaf in base.items():
        np.testing.assert_array_equal(leaf, old_base[name], err_msg=name)
    for name in ("layers/attn_reader/routing/query", "layers/mlp_reader/routing/query"):
        assert np.max(np.abs(routing[name][-1] - old_routing[name][-1])) > 1e-3
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "3")
    train(finetune, tmp_path / "run")  # from step 2 on
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "run").params, after)


def test_frozen_base_has_no_moments_and_no_part_in_the_norm(tiny):
    tiny.optim.freeze_base = True
    config = config_lib.resolve(tiny)
    state = jax.eval_shape(functools.partial(step.init_state, config))
    routing, base = routing_and_base(state.params)
    moments, others = routing_and_base(state.opt_state)
    assert len(moments) == 2 * len(routing)
    assert not [name for name in others if any(name.endswith(of) for of in base)]
    grads = jax.tree.map(jnp.ones_like, state.params)
    left, none = routing_and_base(optim.without_frozen(config, grads))
    assert all(np.all(leaf == 1) for leaf in left.values())
    assert all(np.all(leaf == 0) for leaf in none.values())


@pytest.mark.parametrize("freeze_base", [False, True])
def test_routing_parameters_have_a_rate_of_their_own(tiny, freeze_base):
    """Adam's first update is the rate, whatever the gradient."""
    tiny.optim.update({"weight_decay": 0.0, "eps": 1e-20, "warmup_steps": 4, "clip_norm": 0.0})
    tiny.optim.update({"routing_learning_rate": 0.1, "freeze_base": freeze_base})
    config = config_lib.resolve(tiny)
    optimizer = optim.make_optimizer(config)
    shapes = jax.eval_shape(functools.partial(step.init_state, config)).params
    params = jax.tree.map(lambda x: jnp.ones(x.shape), shapes)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 0.3), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    routing, base = routing_and_base(updates)
    for leaf in routing.values():
        np.testing.assert_allclose(leaf, -0.1 / 4, rtol=1e-5)
    for leaf in base.values():
        np.testing.assert_allclose(leaf, 0.0 if freeze_base else -1e-3 / 4, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"optim.routing_learning_rate": 1e-3, "optim.learning_rate": 0.0},
            ["optim.routing_learning_rate=0.001", "must be above 0"],
        ),
        (
            {"optim.freeze_base": True, "model.residual.variant": "baseline"},
            ["optim.freeze_base=True", "baseline has none"],
        ),
        ({"optim.routing_learning_rate": -1.0}, ["must be at least 0"]),
    ],
)
def test_rates_that_train_nothing_are_refused(tiny, changes, words):
    if "optim.learning_rate" in changes:
        tiny.optim.final_learning_rate = 0.0
    tiny.update_from_flattened_dict(changes)
    with refuses(*words):
        config_lib.resolve(tiny)


def test_a_rate_without_effect_is_said(tiny):
    tiny.optim.routing_learning_rate = 1e-3
    tiny.model.residual.variant = "baseline"
    lines = config_notes.notes(config_lib.resolve(tiny))
    assert "optim.routing_learning_rate has no effect on baseline" in lines


@pytest.mark.slow
def test_fifty_steps_on_real_text_show_no_spike(tiny, tmp_path, monkeypatch):
    """Each step sees the same 64 rows, so that a loss that grows is no chance of the batch."""
    text = pathlib.Path(json.__file__).read_bytes()[:4096]
    assert len(text) == 4096
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "json.txt").write_bytes(text)
    with monkeypatch.context() as patch:
        patch.setattr(sources.Source, "split", lambda self, part, document: "train")
        prepare_files(tmp_path / "rows", tmp_path / "text")
    tiny.data.seq_len = 64
    tiny.train.update({"steps": 200, "batch_size": 16})
    tiny.optim.warmup_steps = 20
    plain = tiny.copy_and_resolve_references()
    plain.model.residual.variant = "baseline"
    losses = train(plain, tmp_path / "pretrained", 1)
    assert losses[200]["loss"] < losses[1]["loss"] - 1.5
    exporting.export(str(tmp_path / "pretrained"), None, str(tmp_path / "hf"))
    tiny.data.source = str(tmp_path / "rows")
    tiny.train.update({"steps": 50, "batch_size": 64})
    tiny.optim.update({"learning_rate": 5e-5, "final_learning_rate": 5e-6, "warmup_steps": 5})
    tiny.optim.routing_learning_rate = 5e-3
    for variant in ("delta_block", "delta_attnres", "full_additive"):
        convert(tmp_path / "hf", tmp_path / f"{variant}_init", variant=variant, num_blocks=2)
        tiny.model.residual.update({"variant": variant, "num_blocks": 2, "centered": True})
        tiny.init_from = str(tmp_path / f"{variant}_init")
        rows = train(tiny, tmp_path / variant, 1)
        assert sorted(rows) == list(range(1, 51))
        largest = max(row["loss"] for row in rows.values())
        assert largest <= rows[1]["loss"] + 0.05
        assert rows[50]["loss"] < rows[1]["loss"]
        routing, _ = routing_and_base(load(tmp_path / variant).params)
        assert np.max(np.abs(routing["layers/mlp_reader/routing/query"][-1])) > 1e-2
