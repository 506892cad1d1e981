"""Conversion from and to the format of Qwen3: equal logits, equal bits, names and shapes."""

import json
import os
import subprocess
import sys

import convert_helpers as helpers
import jax
import numpy as np
import pytest
from golden_params import Case

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.interop import exporting, hf_config, importing, names
from deltares_jax.training import step

CASES = ("qwen3_v4_tied", "qwen3_v4_untied", "qwen3_v5_tied", "qwen3_v5_untied")
TOLERANCE = 1e-5  # of float32 logits
RELEASED = (
    "A_attnres_block",
    "A_delta_attnres_null",
    "A_delta_block_released",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("A_attnres_full", "A_delta_attnres", "A_delta_replace", "A_full_additive")
    ),
)
# A norm of small sums magnifies rounding in these.
LOOSE = {"A_attnres_block": 5e-4, "A_attnres_full": 5e-4, "A_delta_replace": 5e-4}


def convert(source, out, **asked):
    importing.convert(str(source), str(out), asked)
    return load(out)


def reference(name):
    return np.load(helpers.GOLDEN / name / "reference.npz")


def assert_same_params(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The model of transformers 4 with tied embeddings, imported as it is."""
    return convert(helpers.GOLDEN / "qwen3_v4_tied", tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize("name", CASES)
def test_imported_logits_are_those_of_transformers(tmp_path, name):
    """Positions go to 119; head_dim is 16 where width / heads is 8; norms of q and k vary."""
    expected = reference(name)
    model = convert(helpers.GOLDEN / name, tmp_path / "run")
    np.testing.assert_allclose(
        model.logits(expected["ids"]), expected["logits"], rtol=0, atol=TOLERANCE
    )
    assert model.config.model.head_dim == 16
    assert model.config.model.rope_theta == (1e6 if "_tied" in name else 5e5)


ADDITIVE = [("delta_block", 2), ("delta_attnres", None), ("full_additive", None)]


@pytest.mark.parametrize(("variant", "num_blocks"), ADDITIVE)
def test_converted_model_starts_as_the_plain_one_bit_for_bit(
    tmp_path, plain, capsys, variant, num_blocks
):
    source = helpers.GOLDEN / "qwen3_v4_tied"
    model = convert(source, tmp_path / "run", variant=variant, num_blocks=num_blocks)
    ids = reference("qwen3_v4_tied")["ids"]
    np.testing.assert_array_equal(model.logits(ids), plain.logits(ids))
    fresh = capsys.readouterr().out.split("new parameters, at their start: ")[1]
    assert "layers/mlp_reader/routing/query [2, 32]" in fresh
    assert "layers/attn/" not in fresh


@pytest.mark.parametrize(
    ("variant", "num_blocks"),
    [ADDITIVE[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in ADDITIVE[1:])],
)
def test_queries_of_a_converted_model_learn_from_the_first_step(tmp_path, variant, num_blocks):
    source = helpers.GOLDEN / "qwen3_v4_tied"
    model = convert(source, tmp_path / "run", variant=variant, num_blocks=num_blocks)
    ids = reference("qwen3_v4_tied")["ids"]
    row = {
        "inputs": ids[:, :-1],
        "targets": ids[:, 1:],
        "weights": np.ones(ids[:, 1:].shape, np.float32),
        "positions": np.arange(ids.shape[1] - 1)[None],
        "segments": np.ones(ids[:, 1:].shape, np.int32),
    }
    _, grads = jax.jit(step.gradients, static_argnums=0)(model.config, model.params, row)
    for kind in ("attn", "mlp"):
        query_LD = grads["layers"][f"{kind}_reader"]["routing"]["query"]
        assert np.max(np.abs(query_LD[-1])) > 1e-6


def test_conversion_that_is_not_centred_is_another_model(tmp_path, plain):
    source = helpers.GOLDEN / "qwen3_v4_tied"
    model = convert(source, tmp_path / "run", variant="delta_block", num_blocks=2, centered=False)
    ids = reference("qwen3_v4_tied")["ids"]
    assert np.max(np.abs(model.logits(ids) - plain.logits(ids))) > 0.1


@pytest.mark.parametrize("name", ["qwen3_v4_tied", "qwen3_v5_untied"])
def test_exported_baseline_has_the_tensors_that_were_imported(tmp_path, name):
    model = convert(helpers.GOLDEN / name, tmp_path / "one")
    exporting.export(str(tmp_path / "one"), None, str(tmp_path / "out"))
    before, after = (helpers.read_tensors(f) for f in (helpers.GOLDEN / name, tmp_path / "out"))
    assert before.keys() == after.keys()
    for key, array in before.items():
        np.testing.assert_array_equal(array.astype(np.float32), after[key], err_msg=key)
        assert after[key].dtype == np.float32
    assert_same_params(convert(tmp_path / "out", tmp_path / "two").params, model.params)


def test_exported_config_tells_both_versions_of_transformers(tmp_path):
    convert(helpers.GOLDEN / "qwen3_v5_untied", tmp_path / "run")
    exporting.export(str(tmp_path / "run"), None, str(tmp_path / "out"))
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 5e5
    assert values["head_dim"] == 16
    assert values["tie_word_embeddings"] is False
    assert values["model_type"] == "qwen3"
    assert values["eos_token_id"] == 96  # of the source
    theirs = json.loads((helpers.GOLDEN / "qwen3_v5_untied" / "config.json").read_text())
    same = ("hidden_size", "num_key_value_heads", "intermediate_size", "max_position_embeddings")
    assert {k: values[k] for k in same} == {k: theirs[k] for k in same}


@pytest.mark.parametrize("name", RELEASED)
def test_released_checkpoint_is_imported_with_its_logits_and_exported_as_it_was(tmp_path, name):
    case = Case(name)
    helpers.write_released(case, tmp_path / "in")
    model = convert(tmp_path / "in", tmp_path / "run")
    assert model.config.model.residual.variant == case.meta["variant"]
    np.testing.assert_allclose(
        model.logits(case.ids), case.arrays["logits"], rtol=0, atol=LOOSE.get(name, 2e-5)
    )
    exporting.export(str(tmp_path / "run"), None, str(tmp_path / "out"))
    before, after = (helpers.read_tensors(tmp_path / f) for f in ("in", "out"))
    assert before.keys() == after.keys()
    for key, array in before.items():
        np.testing.assert_array_equal(array, after[key], err_msg=key)
    one, other = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out"))
    assert {k: other[k] for k in one} == one | {"rope_parameters": other["rope_parameters"]}


@pytest.mark.parametrize("name", [path.stem for path in helpers.GOLDEN.glob("A_*_*.npz")])
def test_tensors_have_the_names_of_the_released_code(name):
    """Gates and null sources as well."""
    case = Case(name)
    assert names.tensors(case.config()).keys() == set(case.meta["param_names"])


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("baseline", {}),
        ("delta_block", {"centered": True, "null_source": True, "gate": "scalar"}),
        ("delta_attnres", {"gate": "alpha"}),
        ("attnres_block", {}),
        ("attnres_cumulative", {}),
        ("delta_block_released", {"num_blocks": 3, "null_source": True}),
        ("full_additive", {"centered": True}),
    ],
)
def test_round_trip_of_every_kind_of_routing_is_bit_equal(tmp_path, tiny, variant, options):
    """`delta_block_released` has blocks of 3, 3 and 1 layers of 7."""
    tiny.model.residual.update({"variant": variant, **options})
    tiny.model.num_layers = 7 if variant == "delta_block_released" else 2
    params = helpers.random_run(tmp_path / "run", tiny)
    exporting.export(str(tmp_path / "run"), None, str(tmp_path / "out"))
    importing.convert(str(tmp_path / "out"), str(tmp_path / "again"), {})
    again = load(tmp_path / "again")
    assert_same_params(again.params, params)
    assert again.config.model == config_lib.resolve(tiny).model


@pytest.mark.parametrize(
    ("variant", "options", "mode"),
    [
        ("delta_block", {}, "delta_block_paper"),
        ("attnres_cumulative", {}, "attnres_cumulative"),
        ("delta_attnres", {"centered": True}, "delta"),
    ],
)
def test_what_the_released_code_cannot_express_is_refused_by_transformers(variant, options, mode):
    """That code takes any mode: it would compute something else without a word."""
    transformers = pytest.importorskip("transformers")
    config = config_lib.default()
    config.model.residual.update({"variant": variant, **options})
    values = hf_config.write(config_lib.resolve(config).model, "float32", 128, {})
    assert values["attnres_mode"] == mode
    del values["model_type"]
    with pytest.raises(Exception, match="layer_types"):
        transformers.Qwen3Config(**values)
    transformers.Qwen3Config(**values | {"layer_types": ["full_attention"] * 4})


@pytest.mark.slow
def test_transformers_load_what_was_exported_and_make_the_same_references(tmp_path):
    """With TORCH_PYTHON, interpreters that have torch and transformers, separated by colons."""
    tried = 0
    for python in os.environ.get("TORCH_PYTHON", sys.executable).split(":"):
        probe = [python, "-c", "import torch, transformers; print(transformers.__version__)"]
        found = subprocess.run(probe, capture_output=True, text=True)
        if found.returncode:
            continue
        tried += 1
        major = found.stdout.strip().splitlines()[-1].split(".")[0]
        script = str(helpers.GOLDEN / "qwen3.py")
        made = tmp_path / f"made{major}"
        subprocess.run([python, script, "make", str(made)], check=True)
        for kind in ("tied", "untied"):
            name = f"qwen3_v{major}_{kind}"
            new, old = np.load(made / name / "reference.npz"), reference(name)
            np.testing.assert_allclose(new["logits"], old["logits"], rtol=0, atol=TOLERANCE)
            for key, array in helpers.read_tensors(made / name).items():
                np.testing.assert_array_equal(
                    array, helpers.read_tensors(helpers.GOLDEN / name)[key]
                )
            run, out = tmp_path / f"run{major}{kind}", tmp_path / f"out{major}{kind}"
            convert(made / name, run)
            exporting.export(str(run), None, str(out))
            subprocess.run([python, script, "logits", str(out), str(out) + ".npz"], check=True)
            loaded = np.load(f"{out}.npz")
            assert (str(loaded["kind"]), str(loaded["dtype"])) == (
                "Qwen3ForCausalLM",
                "torch.float32",
            )
            np.testing.assert_allclose(loaded["logits"], old["logits"], rtol=0, atol=TOLERANCE)
    if not tried:
        pytest.skip("no interpreter with torch and transformers; see TORCH_PYTHON")
