"""The recipes under configs/."""

import ast
import pathlib
import runpy

import pytest
from config_helpers import CONFIGS, WITH_BLOCKS, WITHOUT_BLOCKS
from ml_collections import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.models import sizes

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
