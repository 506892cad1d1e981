"""Config checks, what a resumed run may change, and the recipes under configs/."""

import ast
import json
import pathlib
import re
import runpy

import jax
import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax import config_notes, config_resume
from deltares_jax.models import sizes
from deltares_jax.training import workdir

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"

ADDITIVE = ("delta_attnres", "delta_block", "full_additive")
WITH_BLOCKS = ("delta_block", "attnres_block", "delta_block_released")
WITHOUT_BLOCKS = (
    "baseline",
    "delta_attnres",
    "attnres_full",
    "attnres_cumulative",
    "full_additive",
    "delta_replace",
)


def nested(values: dict) -> dict:
    """The default as a nested dict, with some dotted keys changed or added."""
    config = config_lib.default().to_dict()
    for key, value in values.items():
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return config


def resolved(values: dict) -> FrozenConfigDict:
    return config_lib.resolve(config_lib.from_dict(nested(values)))


def refuses(*words: str):
    """Expects a ValueError of one line that holds the words in this order."""
    return pytest.raises(ValueError, match="^.*" + ".*".join(map(re.escape, words)) + ".*$")


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


# Keys that must agree.


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"model.num_heads": 6, "model.num_kv_heads": 4},
            ["model.num_heads=6", "multiple of model.num_kv_heads=4"],
        ),
        (
            {"model.num_heads": 4, "model.num_kv_heads": 8},
            ["model.num_heads=4", "multiple of model.num_kv_heads=8"],
        ),
        ({"model.head_dim": 33}, ["model.head_dim=33", "even"]),
        (
            {"model.residual.centered": True, "model.residual.gate": "alpha"},
            ["model.residual.centered=True", "model.residual.gate=alpha", "gate=scalar"],
        ),
        (
            {"model.residual.null_source": True, "model.norm_eps": 0.0},
            ["model.norm_eps=0", "model.residual.null_source=True"],
        ),
        (
            {"model.residual.kernel": "batched", "model.residual.variant": "baseline"},
            ["model.residual.kernel=batched", "baseline", "delta_attnres", "attnres_block"],
        ),
        (
            {"model.residual.kernel": "pallas"},
            ["model.residual.kernel=pallas", "delta_block", "delta_attnres, attnres_full"],
        ),
        (
            {"model.residual.variant": "delta_attnres", "model.remat": "offload"},
            ["model.remat=offload", "delta_attnres", "model.remat=full"],
        ),
        (
            {"model.scan": "boundaries"},
            ["model.scan=boundaries", "model.remat=full", "model.remat=none"],
        ),
        (
            {"train.batch_size": 8, "train.accumulation": 3},
            ["train.batch_size=8", "multiple of train.accumulation=3", "8 / 3"],
        ),
        (
            {"train.batch_size": 8, "train.accumulation": 16},
            ["train.batch_size=8", "multiple of train.accumulation=16", "8 / 16"],
        ),
        (
            {"train.steps": 30, "optim.warmup_steps": 30},
            ["optim.warmup_steps=30", "below train.steps=30", "cosine"],
        ),
        (
            {"train.steps": 9, "optim.warmup_steps": 30, "optim.schedule": "linear"},
            ["optim.warmup_steps=30", "below train.steps=9", "linear"],
        ),
        (
            {"optim.schedule": "wsd"},
            ["optim.cooldown_steps=0", "train.steps - optim.warmup_steps = 270", "wsd"],
        ),
        (
            {"optim.schedule": "wsd", "optim.cooldown_steps": 271},
            ["optim.cooldown_steps=271", "train.steps - optim.warmup_steps = 270"],
        ),
        ({"optim.cooldown_steps": 10}, ["optim.cooldown_steps=10", "optim.schedule=wsd"]),
        (
            {"optim.learning_rate": 1e-5},
            ["optim.final_learning_rate=0.0001", "not exceed optim.learning_rate=1e-05"],
        ),
        ({"mesh.data": -1}, ["mesh.data", "mesh.fsdp", "-1", "one axis"]),
        ({"train.profile_steps": "10"}, ["train.profile_steps='10'", "FIRST:LAST"]),
        ({"train.profile_steps": "a:b"}, ["train.profile_steps='a:b'", "FIRST:LAST"]),
        ({"train.profile_steps": "0:5"}, ["train.profile_steps='0:5'", "1 <= FIRST"]),
        ({"train.profile_steps": "9:5"}, ["train.profile_steps='9:5'", "FIRST <= LAST"]),
        ({"train.profile_steps": "9:301"}, ["train.profile_steps='9:301'", "train.steps=300"]),
    ],
)
def test_combination_is_refused_with_both_sides(values, words):
    with refuses(*words):
        resolved(values)


@pytest.mark.parametrize(
    "values",
    [
        {"model.num_heads": 4, "model.num_kv_heads": 4},
        {"model.num_heads": 6, "model.num_kv_heads": 1},
        {"model.residual.centered": True, "model.residual.gate": "scalar"},
        {"model.residual.null_source": True, "model.norm_eps": 1e-12},
        {"model.norm_eps": 0.0},
        {"train.batch_size": 8, "train.accumulation": 8},
        {"train.steps": 31, "optim.warmup_steps": 30},
        {"train.steps": 30, "optim.warmup_steps": 30, "optim.schedule": "constant"},
        {"train.steps": 1, "optim.warmup_steps": 0},
        {"optim.schedule": "wsd", "optim.cooldown_steps": 270},
        {"optim.learning_rate": 0.0, "optim.final_learning_rate": 0.0},
        {"optim.clip_norm": 0.0, "optim.b1": 0.0, "optim.weight_decay": 0.0},
        {"mesh.data": -1, "mesh.fsdp": 1},
        {"mesh.data": 2, "mesh.fsdp": 4},
        {"train.profile_steps": "1:300"},
        {"train.seed": 2**32 - 1},
        {"eval.every": 0, "checkpoint.every": 0},
    ],
)
def test_limit_of_a_rule_is_accepted(values):
    config = resolved(values).to_dict()
    assert config == nested(values)


@pytest.mark.parametrize("variant", WITH_BLOCKS + WITHOUT_BLOCKS)
def test_options_go_with_the_variants_that_define_them(variant):
    takers = {
        "gate": {*ADDITIVE, "delta_block_released"},
        "null_source": {*ADDITIVE, "delta_block_released"},
        "centered": set(ADDITIVE),
    }
    for option, value in {"gate": "scalar", "null_source": True, "centered": True}.items():
        values = {"model.residual.variant": variant, f"model.residual.{option}": value}
        if variant in takers[option]:
            assert resolved(values).model.residual[option] == value
            continue
        with refuses(f"model.residual.{option}={value}", variant, "goes with") as caught:
            resolved(values)
        named = str(caught.value).partition("goes with ")[2].split(", ")
        assert set(named) == takers[option]


# Blocks.


def blocks(variant: str, num_layers: int, num_blocks: int, **options) -> list[str]:
    """What start-up says about the blocks."""
    values = {
        "model.residual.variant": variant,
        "model.num_layers": num_layers,
        "model.residual.num_blocks": num_blocks,
        **{f"model.residual.{key}": value for key, value in options.items()},
    }
    return config_notes.notes(resolved(values))


@pytest.mark.parametrize("variant", ["delta_block", "attnres_block"])
@pytest.mark.parametrize(
    ("num_layers", "num_blocks", "near"),
    [(7, 3, "1 or 7"), (12, 8, "4 or 6"), (9, 8, "3 or 9"), (4, 8, "2 or 4"), (1, 8, "1")],
)
def test_number_of_blocks_must_divide_the_layers(variant, num_layers, num_blocks, near):
    with pytest.raises(
        ValueError,
        match=f"num_blocks={num_blocks} must divide model.num_layers={num_layers}; "
        f"nearest valid: {near}$",
    ):
        blocks(variant, num_layers, num_blocks)


@pytest.mark.parametrize("variant", WITH_BLOCKS)
def test_no_blocks_are_refused(variant):
    with refuses("model.residual.num_blocks=0", "at least 1"):
        blocks(variant, 4, 0)


def test_released_form_takes_any_number_of_blocks_up_to_the_layers():
    for num_layers in range(1, 14):
        for num_blocks in range(1, num_layers + 1):
            blocks("delta_block_released", num_layers, num_blocks)
        with refuses(
            f"model.residual.num_blocks={num_layers + 1}",
            f"must not exceed model.num_layers={num_layers}",
        ):
            blocks("delta_block_released", num_layers, num_layers + 1)


@pytest.mark.parametrize(
    ("variant", "num_layers", "num_blocks", "count", "spans"),
    [
        ("delta_block", 4, 2, 2, "0-1, 2-3"),
        ("delta_block", 12, 4, 4, "0-2, 3-5, 6-8, 9-11"),
        ("delta_block", 1, 1, 1, "0-0"),
        ("attnres_block", 3, 3, 3, "0-0, 1-1, 2-2"),
        ("delta_block_released", 7, 3, 3, "0-2, 3-5, 6-6"),
        ("delta_block_released", 12, 8, 6, "0-1, 2-3, 4-5, 6-7, 8-9, 10-11"),
        ("delta_block_released", 9, 8, 5, "0-1, 2-3, 4-5, 6-7, 8-8"),
        ("delta_block_released", 1, 1, 1, "0-0"),
    ],
)
def test_start_says_which_blocks_there_really_are(variant, num_layers, num_blocks, count, spans):
    asked = f" ({num_blocks} asked for)" if count < num_blocks else ""
    line = blocks(variant, num_layers, num_blocks)[0]
    assert line == f"blocks: {count}{asked}, of layers {spans}"


@pytest.mark.parametrize("variant", WITHOUT_BLOCKS)
def test_start_says_that_num_blocks_has_no_effect(variant):
    for num_blocks in (1, 3, 8):  # any number: overriding the variant alone must work
        (line,) = blocks(variant, 4, num_blocks)
        assert "model.residual.num_blocks has no effect" in line
        assert variant in line


def test_one_block_that_never_learns_is_warned_of():
    def warned(*args, **options):
        return any("warning" in line and "never learn" in line for line in blocks(*args, **options))

    assert warned("delta_block", 4, 1)
    assert warned("delta_block_released", 4, 1)
    assert not warned("delta_block", 4, 2)
    assert not warned("attnres_block", 4, 1)  # it reads the running block as well
    assert not warned("delta_block", 4, 1, null_source=True)


# The saved config.


def exact(config: FrozenConfigDict) -> str:
    """Every key with the type of its value: 1 and 1.0 differ."""
    return repr(sorted(config_lib.flatten(config).items()))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            "optim.learning_rate": 1,
            "optim.eps": 1 / 3 * 1e-7,
            "train.seed": 2**32 - 1,
            "data.dir": 'a folder/größe "x"',
            "model.residual.gate": "scalar",
            "model.residual.centered": True,
            "model.norm_eps": 0,
        },
    ],
)
def test_config_saved_in_the_workdir_reloads_to_an_equal_one(tmp_path, values):
    config = resolved(values)
    workdir.write_run_files(tmp_path, config, jax.devices())
    saved = json.loads((tmp_path / workdir.CONFIG).read_text())
    assert exact(config_lib.resolve(config_lib.from_dict(saved))) == exact(config)
    assert config_resume.changed_on_resume(saved, config) == []


# Resume: the rule of every key, and another value to try it with.
RESUME = {
    "init_from": ("free", "runs/other@7"),
    "init_optimizer": ("free", True),
    "model.vocab_size": ("fixed", 300),
    "model.width": ("fixed", 64),
    "model.num_layers": ("fixed", 6),
    "model.num_heads": ("fixed", 8),
    "model.num_kv_heads": ("fixed", 4),
    "model.head_dim": ("fixed", 16),
    "model.mlp_width": ("fixed", 256),
    "model.tied": ("fixed", False),
    "model.rope_theta": ("fixed", 5000.0),
    "model.norm_eps": ("fixed", 1e-5),
    "model.dtype": ("free", "bfloat16"),
    "model.remat": ("free", "full"),
    "model.scan": ("free", "unrolled"),
    "model.attention": ("free", "reference"),
    "model.residual.variant": ("fixed", "attnres_block"),
    "model.residual.num_blocks": ("fixed", 4),
    "model.residual.gate": ("fixed", "scalar"),
    "model.residual.null_source": ("fixed", True),
    "model.residual.centered": ("fixed", True),
    "model.residual.kernel": ("free", "direct"),
    "data.source": ("data", "fineweb_edu/sample-10BT"),
    "data.dir": ("free", "elsewhere"),
    "data.tokenizer": ("data", "Qwen/Qwen3-0.6B"),
    "data.seq_len": ("data", 64),
    "data.mixture": ("data", "py_stdlib=1"),
    "data.document_masking": ("fixed", False),
    "data.repeat": ("free", False),
    "data.allow_change": ("free", True),
    "data.workers": ("free", 2),
    "train.steps": ("upwards", 400),
    "train.batch_size": ("free", 16),
    "train.accumulation": ("free", 2),
    "train.log_every": ("free", 10),
    "train.seed": ("data", 1),
    "train.nonfinite": ("free", "skip"),
    "train.nonfinite_limit": ("free", 3),
    "train.spike_factor": ("free", 5.0),
    "train.stall_factor": ("free", 0.0),
    "train.platform": ("free", "tpu"),
    "train.profile_steps": ("free", "5:6"),
    "train.compile_cache": ("free", "off"),
    "optim.learning_rate": ("fixed", 2e-3),
    "optim.final_learning_rate": ("fixed", 1e-5),
    "optim.warmup_steps": ("fixed", 10),
    "optim.schedule": ("fixed", "linear"),
    "optim.cooldown_steps": ("fixed", 20),
    "optim.weight_decay": ("fixed", 0.0),
    "optim.decay": ("fixed", "all"),
    "optim.b1": ("fixed", 0.8),
    "optim.b2": ("fixed", 0.99),
    "optim.eps": ("fixed", 1e-6),
    "optim.clip_norm": ("fixed", 0.5),
    "optim.z_loss": ("fixed", 1e-4),
    "optim.routing_learning_rate": ("fixed", 5e-3),
    "optim.freeze_base": ("fixed", True),
    "eval.every": ("free", 50),
    "eval.rows": ("free", 32),
    "eval.batch_size": ("free", 4),
    "eval.sets": ("free", "own=py_stdlib"),
    "checkpoint.every": ("free", 50),
    "checkpoint.every_minutes": ("free", 10.0),
    "checkpoint.keep": ("free", 5),
    "checkpoint.keep_period": ("free", 1000),
    "checkpoint.keep_best": ("free", 1),
    "metrics.tensorboard": ("free", False),
    "metrics.wandb": ("free", True),
    "metrics.routing_every": ("free", 10),
    "mesh.replica": ("free", 2),
    "mesh.data": ("free", 2),
    "mesh.fsdp": ("free", 4),
    "mesh.tensor": ("free", 2),
    "mesh.allow_replicated": ("free", True),
    "distributed.coordinator": ("free", "host0:9000"),
    "distributed.process_id": ("free", 1),
    "distributed.num_processes": ("free", 2),
    "distributed.timeout": ("free", 20.0),
    "distributed.heartbeat": ("free", 10.0),
}


def resume(saved: dict, asked: dict) -> list[str]:
    config = FrozenConfigDict(config_lib.from_dict(nested(asked)))
    return config_resume.changed_on_resume(nested(saved), config)


def test_resume_rule_of_every_key_is_tested():
    assert set(RESUME) == set(config_lib.flatten(config_lib.default()))


@pytest.mark.parametrize(("key", "rule", "other"), [(key, *row) for key, row in RESUME.items()])
def test_resume_refuses_or_lists_a_change(key, rule, other):
    usual = config_lib.flatten(config_lib.default())[key]
    line = f"{key}: {usual} → {other}"
    if rule in ("fixed", "data"):
        with refuses("cannot be resumed", line, "--workdir"):
            resume({}, {key: other})
        allowed = {key: other, "data.allow_change": True}
        if rule == "data":
            assert resume({}, allowed) == ["data.allow_change: False → True", line]
        else:
            with refuses("cannot be resumed", line):
                resume({}, allowed)
    else:
        assert resume({}, {key: other}) == [line]
    back = f"{key}: {other} → {usual}"
    if rule == "free":
        assert resume({key: other}, {}) == [back]
    else:  # steps may not become fewer
        with refuses("cannot be resumed", back):
            resume({key: other}, {})


@pytest.mark.parametrize("other", ["float32", "bfloat16"])
def test_resume_refuses_a_change_from_or_to_float64(other):
    for saved, asked in ((other, "float64"), ("float64", other)):
        with refuses(f"model.dtype: {saved} → {asked}"):
            resume({"model.dtype": saved}, {"model.dtype": asked})


def test_resume_names_every_change_that_it_refuses():
    asked = {"model.width": 64, "train.log_every": 7, "train.steps": 200, "optim.b1": 0.8}
    with refuses("model.width: 128 → 64", "optim.b1: 0.9 → 0.8", "train.steps: 300 → 200") as error:
        resume({}, asked)
    assert "log_every" not in str(error.value)


def test_resume_of_a_run_with_keys_of_another_version():
    older = config_lib.default().to_dict()
    del older["optim"]["z_loss"], older["distributed"]
    assert config_resume.completed(older) == config_lib.default().to_dict()
    with refuses("model.experts: 8 → absent"):
        resume({"model.experts": 8}, {})
    with refuses("router.kind: top → absent"):
        resume({"router.kind": "top"}, {})
    assert resume({"metrics.csv": True}, {}) == ["metrics.csv: True → absent"]


@pytest.mark.parametrize(
    ("every", "period", "said"), [(7, 10, True), (0, 50, True), (7, 14, False), (100, 50, False)]
)
def test_period_of_steps_that_are_not_saved_is_said(every, period, said):
    keys = {"checkpoint.every": every, "checkpoint.keep_period": period}
    lines = [line for line in config_notes.notes(resolved(keys)) if "keep_period" in line]
    assert bool(lines) == said, lines
    assert all(f"checkpoint.every={every} saves" in line for line in lines)


# Recipes.

RECIPES = sorted(CONFIGS.glob("*.py"))

# width, layers, heads, KV heads, head_dim, MLP width
SHAPES = {
    "220m": (768, 12, 12, 4, 64, 3072),
    "533m": (1024, 24, 16, 8, 64, 4096),
    "600m": (1024, 28, 16, 8, 128, 3072),
    "1b": (1280, 36, 20, 4, 64, 5120),
    "7b": (4096, 36, 32, 8, 128, 12288),
}

# Validation perplexity as published in arXiv 2605.18855; the keys are all recipes but debug.
PUBLISHED = {
    ("220m", "baseline"): "38.71",
    ("220m", "attnres_block"): "37.39",
    ("220m", "attnres_full"): "37.30",
    ("220m", "delta_block"): "37.08",
    ("220m", "delta_attnres"): "36.83",
    ("533m", "baseline"): "32.00",
    ("533m", "attnres_block"): "31.75",
    ("533m", "attnres_full"): "31.68",
    ("533m", "delta_block"): "31.16",
    ("533m", "delta_attnres"): "31.05",
    ("1b", "baseline"): "29.70",
    ("1b", "attnres_block"): "31.76",
    ("1b", "attnres_full"): "33.36",
    ("1b", "delta_block"): "29.19",
    ("1b", "delta_attnres"): "29.13",
    ("600m", "baseline"): "32.22",
    ("600m", "attnres_block"): "32.38",
    ("600m", "delta_block"): "31.45",
    ("7b", "baseline"): "17.43",
    ("7b", "attnres_block"): "18.58",
    ("7b", "delta_block"): "16.00",
}


# These start from a checkpoint of one variant.
FINETUNE = {
    CONFIGS / f"finetune_600m_{variant}.py": variant
    for variant in ("baseline", "attnres_block", "delta_block")
}


def load_recipe(path: pathlib.Path) -> FrozenConfigDict:
    return config_lib.resolve(runpy.run_path(str(path))["get_config"]())


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request) -> pathlib.Path:
    return request.param


@pytest.fixture(params=PUBLISHED, ids="_".join)
def published(request) -> tuple[str, str]:
    """(size, variant) of a recipe of the paper."""
    return request.param


def recipe_of(size: str, variant: str) -> pathlib.Path:
    return CONFIGS / f"{size}_{variant}.py"


def test_recipes_are_those_of_the_paper_and_debug():
    expected = {"debug.py", "7b_delta_attnres.py"} | {recipe_of(*names).name for names in PUBLISHED}
    expected |= {path.name for path in FINETUNE}
    assert {path.name for path in RECIPES} == expected


def test_recipe_is_short_and_says_how_it_is_run(recipe):
    text = recipe.read_text()
    assert len(text.splitlines()) <= 30
    lines = [line.strip() for line in ast.get_docstring(ast.parse(text)).splitlines()]
    assert f"python -m deltares_jax.train --config=configs/{recipe.name}" in lines
    assert any(line.startswith("Hardware: ") for line in lines)


def test_recipe_states_its_tokens_blocks_and_expected_result(published):
    path = recipe_of(*published)
    text, config = ast.get_docstring(ast.parse(path.read_text())), load_recipe(path)
    batch, length = config.train.batch_size, config.data.seq_len
    assert f"\nTokens: 10 000 updates of {batch} x {length} = " in text
    assert f"\nExpected: validation perplexity {PUBLISHED[published]}, " in text
    residual = config.model.residual
    stated = f"{residual.num_blocks} blocks" in text
    assert stated == (residual.variant in WITH_BLOCKS)


def test_recipe_is_what_its_name_says(published):
    size, variant = published
    model = load_recipe(recipe_of(size, variant)).model
    assert model.residual.variant == variant
    assert SHAPES[size] == (
        model.width,
        model.num_layers,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.mlp_width,
    )
    if variant in WITH_BLOCKS:
        assert model.residual.num_blocks == (28 if size == "600m" else 4)


def test_recipe_holds_the_numbers_of_the_paper(published):
    config = load_recipe(recipe_of(*published))
    model, data, train, optim = config.model, config.data, config.train, config.optim
    large = published[0] == "7b"
    assert (model.vocab_size, model.tied, model.rope_theta) == (151936, True, 10000)
    assert model.dtype == "bfloat16"
    assert (model.residual.gate, model.residual.null_source, model.residual.centered) == (
        "none",
        False,
        False,
    )
    assert (data.source, data.tokenizer) == ("fineweb_edu/sample-10BT", "Qwen/Qwen3-0.6B")
    assert (train.steps, data.seq_len) == (10_000, 2048)
    assert train.batch_size * data.seq_len == (128 if large else 64) * 1024
    assert (optim.b1, optim.b2, optim.eps) == (0.9, 0.95, 1e-8)
    assert (optim.weight_decay, optim.decay, optim.clip_norm) == (0.1, "matrices", 1.0)
    assert (optim.schedule, optim.warmup_steps) == ("cosine", 500 if large else 1000)
    assert optim.learning_rate == (3e-4 if large else 6e-4)
    assert optim.final_learning_rate == (3e-5 if large else 6e-5)


@pytest.mark.parametrize("recipe", FINETUNE, ids=lambda path: path.stem)
def test_recipe_of_fine_tuning_is_that_of_the_paper(recipe):
    variant, config, text = FINETUNE[recipe], load_recipe(recipe), recipe.read_text()
    model, optim = config.model, config.optim
    assert SHAPES["600m"][0] == model.width
    assert (model.rope_theta, model.residual.variant, model.residual.num_blocks) == (
        1e6,
        variant,
        4,
    )
    assert model.residual.centered == (variant == "delta_block")
    assert (optim.learning_rate, optim.routing_learning_rate) == (5e-5, 5e-3)
    assert (config.train.steps, config.train.batch_size, config.data.seq_len) == (20_000, 32, 2048)
    assert not optim.freeze_base
    blocks = " --num_blocks=4" if variant in WITH_BLOCKS else ""
    assert f" --variant={variant}{blocks} --out={config.init_from}\n" in text


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if path not in FINETUNE], ids=lambda path: path.stem
)
def test_variant_alone_can_be_overridden_on_every_recipe(recipe):
    for variant in WITH_BLOCKS + WITHOUT_BLOCKS:
        config = runpy.run_path(str(recipe))["get_config"]()
        config.model.residual.variant = variant
        assert config_lib.resolve(config).model.residual.variant == variant


def test_debug_recipe_needs_no_download_and_fits_a_laptop():
    config = load_recipe(CONFIGS / "debug.py")
    assert (config.data.source, config.data.tokenizer) == ("py_stdlib", "byte")
    assert sum(sizes.parameter_counts(config.model).values()) < 2e6
    assert config.train.steps * config.train.batch_size * config.data.seq_len < 1e6


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
