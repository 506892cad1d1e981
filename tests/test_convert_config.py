"""What an import reads from config.json, and what it refuses there."""

import json

import convert_helpers as helpers
import pytest
from convert_helpers import TIED, convert, refuses

from deltares_jax.interop import hf_config

# The rotary base.


def theta(**changes):
    values = json.loads((helpers.GOLDEN / TIED / "config.json").read_text()) | changes
    values = {key: value for key, value in values.items() if value is not ...}
    return hf_config.read(values, "config.json")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 1000000}, 1e6),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5),
        ({"rope_theta": ...}, 1e4),
    ],
)
def test_rotary_base_is_read_from_both_forms(changes, expected):
    model, notes = theta(**changes)
    assert model["rope_theta"] == expected
    said = [note for note in notes if "no rope_theta: 10000, the default" in note]
    assert bool(said) == (len(changes) == 1 and changes["rope_theta"] is ...)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
            ["rope_theta=1000000.0, rope_parameters.rope_theta=10000.0 disagree"],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            ["rope_scaling={'rope_type': 'yarn', 'factor': 4.0} is not supported"],
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["rope_scaling", "not supported"]),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
            ["rope_parameters", "not supported"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            ["rope_parameters", "not supported"],
        ),
        ({"rope_parameters": 1e6}, ["rope_parameters=1000000.0 is not supported"]),
        ({"rope_theta": "1e6"}, ["rope_theta='1e6' must be a number"]),
        ({"rope_theta": float("nan")}, ["rope_theta=nan must be a number"]),
    ],
)
def test_rotary_base_that_is_not_clear_is_refused(changes, words):
    with refuses("config.json: ", *words):
        theta(**changes)


# Other computation.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["model_type='llama' must be qwen3 or qwen3_attnres"]),
        ({"model_type": "qwen3_moe"}, ["model_type='qwen3_moe'"]),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, ["architectures="]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu' is not supported; it must be 'silu'"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types='sliding_attention' is not supported"],
        ),
        ({"layer_types": ["full_attention"]}, ["layer_types=", "full_attention, 2 times"]),
        (
            {
                "layer_types": ...,
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 1,
            },
            ["use_sliding_window=true with max_window_layers=1 below num_hidden_layers=2"],
        ),
        (
            {
                "layer_types": ...,
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": None,
            },
            ["max_window_layers is missing"],
        ),
        ({"layer_types": [["full_attention"]] * 2}, ["layer_types=['full_attention'] is not"]),
        ({"model_type": ["qwen3"]}, ["model_type=['qwen3'] must be qwen3"]),
        ({"attnres_mode": "block"}, ["model_type=qwen3 and attnres_mode='block' disagree"]),
        ({"hidden_size": float("inf")}, ["hidden_size=inf must be a number"]),
        ({"num_key_value_heads": ...}, ["num_key_value_heads is missing"]),
        ({"hidden_size": 32.5}, ["hidden_size=32.5 must be a whole number"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps='small' must be a number"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes' must be true or false"]),
    ],
)
def test_what_is_not_computed_here_is_refused_by_its_field(changes, words):
    with refuses("config.json: ", *words):
        theta(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, "hidden_size=0 must be at least 1"),
        ({"vocab_size": 2**40}, "vocab_size=1099511627776 must be at most"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=4 must be a multiple of num_key_value_heads=3",
        ),
        ({"head_dim": 31}, "head_dim=31 must be even"),
        ({"rms_norm_eps": 5}, "rms_norm_eps=5.0 must be at most 1"),
        ({"rope_theta": -1}, "rope_theta=-1.0 must be above 0"),
    ],
)
def test_a_field_that_no_model_can_have_is_named_as_it_is_there(tmp_path, changes, words):
    source = helpers.copy_case(TIED, tmp_path / "in")
    helpers.edit_json(source / "config.json", **changes)
    with refuses("in/config.json: " + words):
        convert(source, tmp_path / "run")


def test_a_sliding_window_that_is_not_in_use_is_no_hindrance():
    theta(layer_types=..., use_sliding_window=True, sliding_window=64, max_window_layers=2)
    theta(layer_types=..., use_sliding_window=False, sliding_window=64, max_window_layers=0)


def test_keys_that_are_not_read_are_said():
    _, notes = theta(mlp_scale=2.0, other=None)
    assert notes == ["config.json: keys that are not read: mlp_scale"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attnres_mode": "delta_v"}, ["attnres_mode='delta_v' is not supported", "delta_block"]),
        ({"attnres_mode": ...}, ["attnres_mode='None' is not supported"]),
        ({"attnres_gate_type": "sigmoid_vector"}, ["attnres_gate_type='sigmoid_vector'"]),
        ({"attnres_use_null_source": 1}, ["attnres_use_null_source=1 must be true or false"]),
    ],
)
def test_modes_of_the_released_code_that_are_not_here_are_refused(changes, words):
    released = {
        "model_type": "qwen3_attnres",
        "architectures": ["Qwen3AttnResForCausalLM"],
        "attnres_mode": "delta",
    }
    with refuses("config.json: ", *words):
        theta(**released | changes)


def test_released_defaults():
    released = {"model_type": "qwen3_attnres", "architectures": ["Qwen3AttnResForCausalLM"]}
    model, _ = theta(**released, attnres_mode="delta_block")
    assert model["residual"] == {
        "variant": "delta_block_released",
        "num_blocks": 8,
        "gate": "none",
        "null_source": False,
        "centered": False,
    }
    model, notes = theta(**released, attnres_mode="block", attnres_use_null_source=True)
    assert model["residual"]["null_source"] is False
    assert notes == ["attnres_use_null_source has no effect with attnres_mode=block: left out"]
