"""Keys, types, choices and ranges of a config."""

import re

import pytest
from config_helpers import WITH_BLOCKS, WITHOUT_BLOCKS, refuses, resolved
from ml_collections import ConfigDict

from deltares_jax import config as config_lib

# Keys and types.


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.stesp", "train.steps"),
        ("optim.learning_rat", "optim.learning_rate"),
        ("model.residual.num_block", "model.residual.num_blocks"),
        ("trian.steps", "train.steps"),
        ("model.seq_len", "data.seq_len"),  # the wrong section
        ("model.num_blocks", "model.residual.num_blocks"),
        ("num_blocks", "model.residual.num_blocks"),
        ("keep", "checkpoint.keep"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(key, meant):
    with refuses("unknown config key", key, f"did you mean {meant}?"):
        resolved({key: 3})


def test_unknown_key_in_an_unlocked_recipe_is_refused():
    config = config_lib.default().unlock()
    config.train.stesp = 3
    with refuses("train.stesp", "did you mean train.steps?"):
        config_lib.resolve(config)


def test_a_key_that_resembles_none_gets_no_suggestion():
    with pytest.raises(ValueError, match=r"^unknown config key zzz\.qqq$"):
        resolved({"zzz.qqq": 3})


@pytest.mark.parametrize(("values", "key"), [({"extra": {}}, "extra"), ({"train": 3}, "train")])
def test_unknown_or_replaced_section_is_refused(values, key):
    with refuses("unknown config key", key):
        config_lib.from_dict(config_lib.default().to_dict() | values)


def test_missing_key_is_refused():
    config = config_lib.default().to_dict()
    del config["optim"]["eps"]
    with refuses("optim.eps is missing"):
        config_lib.from_dict(config)
    with refuses("is missing"):
        config_lib.resolve(ConfigDict({"model": {"width": 3}}))


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("train.steps", None, "int"),
        ("train.steps", "300", "int"),
        ("train.steps", 300.0, "int"),
        ("train.steps", True, "int"),
        ("optim.learning_rate", "1e-3", "float"),
        ("optim.learning_rate", True, "float"),
        ("optim.clip_norm", None, "float"),
        ("model.tied", 1, "bool"),
        ("model.tied", "true", "bool"),
        ("model.remat", 3, "str"),
        ("model.residual.variant", None, "str"),
        ("mesh.data", [2], "int"),
    ],
)
def test_value_of_another_type_is_refused(key, value, kind):
    with refuses(f"{key}={value!r} must be of type {kind}"):
        resolved({key: value})


@pytest.mark.parametrize("value", [None, True])
def test_wrong_type_that_a_recipe_can_set_is_refused(value):
    config = config_lib.default()
    config.train.steps = value  # ml_collections lets both pass
    with refuses(f"train.steps={value}", "int"):
        config_lib.resolve(config)


def test_int_serves_as_a_float_and_becomes_one():
    value = resolved({"optim.learning_rate": 1}).optim.learning_rate
    assert type(value) is float
    assert value == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", ["optim.learning_rate", "model.norm_eps", "optim.z_loss"])
def test_number_that_is_not_finite_is_refused(key, value):
    with refuses(f"{key}={value} must be finite"):
        resolved({key: value})


@pytest.mark.parametrize(
    ("key", "value", "choices"),
    [
        ("model.dtype", "float16", ["bfloat16", "float32", "float64"]),
        ("model.remat", "treu", ["none", "full", "save_attention", "save_projections", "offload"]),
        ("model.scan", "layers", ["auto", "blocks", "unrolled", "boundaries"]),
        ("model.attention", "flash", ["auto", "reference", "splash", "cudnn"]),
        ("model.residual.variant", "delta_blok", [*WITH_BLOCKS, *WITHOUT_BLOCKS]),
        ("model.residual.gate", "sigmoid", ["none", "scalar", "alpha"]),
        ("train.platform", "tup", ["''", "cpu", "gpu", "tpu"]),
        ("optim.schedule", "exponential", ["cosine", "linear", "constant", "wsd"]),
        ("optim.decay", "none", ["matrices", "all"]),
    ],
)
def test_choice_that_does_not_exist_is_refused_with_the_list(key, value, choices):
    with pytest.raises(ValueError, match=re.escape(f"{key}={value!r} must be one of ")) as caught:
        resolved({key: value})
    listed = re.search(r"must be one of ([\w', ]+)", str(caught.value))[1].strip().split(", ")
    assert sorted(listed) == sorted(choices)


def test_misspelt_choice_gets_the_nearest():
    with refuses("model.residual.variant='delta_blok'", "did you mean delta_block?"):
        resolved({"model.residual.variant": "delta_blok"})


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("model.vocab_size", 1, "at least 2"),
        ("model.width", 0, "at least 1"),
        ("model.num_layers", 0, "at least 1"),
        ("model.num_kv_heads", 0, "at least 1"),
        ("model.head_dim", 0, "at least 2"),
        ("model.norm_eps", -1e-6, "at least 0"),
        ("model.rope_theta", 0.0, "above 0"),
        ("model.residual.num_blocks", 0, "at least 1"),
        ("data.seq_len", 0, "at least 1"),
        ("train.steps", 0, "at least 1"),
        ("train.batch_size", 0, "at least 1"),
        ("train.accumulation", 0, "at least 1"),
        ("train.log_every", 0, "at least 1"),
        ("train.seed", -1, "at least 0"),
        ("train.seed", 2**32, "at most 4294967295"),
        ("optim.learning_rate", -1e-3, "at least 0"),
        ("optim.warmup_steps", -1, "at least 0"),
        ("optim.weight_decay", -0.1, "at least 0"),
        ("optim.b1", 1.0, "below 1"),
        ("optim.b2", 1.5, "below 1"),
        ("optim.b2", -0.5, "at least 0"),
        ("optim.eps", 0.0, "above 0"),
        ("optim.clip_norm", -1.0, "at least 0"),
        ("optim.z_loss", -1e-4, "at least 0"),
        ("eval.every", -1, "at least 0"),
        ("eval.rows", 0, "at least 1"),
        ("eval.batch_size", 0, "at least 1"),
        ("checkpoint.every", -1, "at least 0"),
        ("checkpoint.keep", 0, "at least 1"),
        ("distributed.timeout", 1e30, "at most 604800"),
        ("distributed.heartbeat", 1e30, "at most 604800"),
        ("distributed.num_processes", 99999999, "at most 65536"),
        ("mesh.data", 0, "at least 1, or -1"),
        ("mesh.tensor", -2, "at least 1, or -1"),
    ],
)
def test_value_out_of_range_is_refused(key, value, rule):
    with refuses(f"{key}={value}", f"must be {rule}"):
        resolved({key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("data.dir", "hdfs://x/folder"), ("train.compile_cache", "gs://x/folder")]
)
def test_buckets_are_refused(key, value):
    config = config_lib.default()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=rf"{key}='{value}' must be a local folder"):
        config_lib.resolve(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.steps", 3_000_000_000),
        ("data.seq_len", 99_999_999_999),
        ("model.width", 10**12),
        ("model.num_layers", 100_000),
        ("train.batch_size", 100_000_000),
        ("eval.batch_size", 1_000_000_000),
        ("eval.rows", 2**31),
        ("optim.learning_rate", 1e39),
        ("model.norm_eps", 1e300),
    ],
)
def test_numbers_that_must_be_typing_errors_are_refused(key, value):
    config = config_lib.default()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=f"{re.escape(f'{key}={value}')} must be at most"):
        config_lib.resolve(config)


def test_an_empty_compile_cache_is_refused():
    config = config_lib.default()
    config.train.compile_cache = ""
    with pytest.raises(ValueError, match=r"train\.compile_cache='' must be a folder"):
        config_lib.resolve(config)


def test_home_of_nobody_is_refused():
    with refuses("init_from='~no-such-user/run'", "no such home folder"):
        resolved({"init_from": "~no-such-user/run"})
