"""Rules between keys: combinations, options of variants, blocks."""

import pytest
from config_helpers import ADDITIVE, WITH_BLOCKS, WITHOUT_BLOCKS, nested, refuses, resolved

from deltares_jax import config_notes

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
