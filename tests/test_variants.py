"""The sources of every reader, written out by hand for four layers in two blocks."""

import pytest

from deltares_jax.models import variants

E = "embedding"
Y = [f"layers.{layer}.{kind}.out" for layer in range(4) for kind in ("attn", "mlp")]
H = [f"layers.{layer}.{kind}.stream" for layer in range(4) for kind in ("attn", "mlp")]

EXPECTED = {
    "baseline": {},
    "delta_attnres": {
        "layers.0.mlp": [E, Y[0]],
        "layers.1.attn": [E, Y[0], Y[1]],
        "layers.1.mlp": [E, Y[0], Y[1], Y[2]],
        "layers.2.attn": [E, Y[0], Y[1], Y[2], Y[3]],
        "layers.2.mlp": [E, Y[0], Y[1], Y[2], Y[3], Y[4]],
        "layers.3.attn": [E, Y[0], Y[1], Y[2], Y[3], Y[4], Y[5]],
        "layers.3.mlp": [E, Y[0], Y[1], Y[2], Y[3], Y[4], Y[5], Y[6]],
    },
    "delta_block": {
        "layers.0.mlp": [E],
        "layers.1.attn": [E],
        "layers.1.mlp": [E],
        "layers.2.attn": [E, "blocks.0.delta"],
        "layers.2.mlp": [E, "blocks.0.delta"],
        "layers.3.attn": [E, "blocks.0.delta"],
        "layers.3.mlp": [E, "blocks.0.delta"],
    },
    "attnres_block": {
        "layers.0.attn": [E],
        "layers.0.mlp": [E, "stream"],
        "layers.1.attn": [E, "stream"],
        "layers.1.mlp": [E, "stream"],
        "layers.2.attn": [E, "blocks.0.sum"],
        "layers.2.mlp": [E, "blocks.0.sum", "stream"],
        "layers.3.attn": [E, "blocks.0.sum", "stream"],
        "layers.3.mlp": [E, "blocks.0.sum", "stream"],
        "final": [E, "blocks.0.sum", "blocks.1.sum"],
    },
    "attnres_full": {
        "layers.0.attn": [E],
        "layers.0.mlp": [E, Y[0]],
        "layers.1.attn": [E, Y[0], Y[1]],
        "layers.1.mlp": [E, Y[0], Y[1], Y[2]],
        "layers.2.attn": [E, Y[0], Y[1], Y[2], Y[3]],
        "layers.2.mlp": [E, Y[0], Y[1], Y[2], Y[3], Y[4]],
        "layers.3.attn": [E, Y[0], Y[1], Y[2], Y[3], Y[4], Y[5]],
        "layers.3.mlp": [E, Y[0], Y[1], Y[2], Y[3], Y[4], Y[5], Y[6]],
        "final": [E, Y[0], Y[1], Y[2], Y[3], Y[4], Y[5], Y[6], Y[7]],
    },
    "attnres_cumulative": {
        "layers.0.attn": [E],
        "layers.0.mlp": [E, H[0]],
        "layers.1.attn": [E, H[0], H[1]],
        "layers.1.mlp": [E, H[0], H[1], H[2]],
        "layers.2.attn": [E, H[0], H[1], H[2], H[3]],
        "layers.2.mlp": [E, H[0], H[1], H[2], H[3], H[4]],
        "layers.3.attn": [E, H[0], H[1], H[2], H[3], H[4], H[5]],
        "layers.3.mlp": [E, H[0], H[1], H[2], H[3], H[4], H[5], H[6]],
    },
    "full_additive": {
        "layers.0.mlp": [H[0]],
        "layers.1.attn": [H[0], H[1]],
        "layers.1.mlp": [H[0], H[1], H[2]],
        "layers.2.attn": [H[0], H[1], H[2], H[3]],
        "layers.2.mlp": [H[0], H[1], H[2], H[3], H[4]],
        "layers.3.attn": [H[0], H[1], H[2], H[3], H[4], H[5]],
        "layers.3.mlp": [H[0], H[1], H[2], H[3], H[4], H[5], H[6]],
    },
    "delta_replace": {
        "layers.0.attn": ["stream"],
        "layers.0.mlp": [Y[0], "stream"],
        "layers.1.attn": [Y[0], Y[1], "stream"],
        "layers.1.mlp": [Y[0], Y[1], Y[2], "stream"],
        "layers.2.attn": [Y[0], Y[1], Y[2], Y[3], "stream"],
        "layers.2.mlp": [Y[0], Y[1], Y[2], Y[3], Y[4], "stream"],
        "layers.3.attn": [Y[0], Y[1], Y[2], Y[3], Y[4], Y[5], "stream"],
        "layers.3.mlp": [Y[0], Y[1], Y[2], Y[3], Y[4], Y[5], Y[6], "stream"],
    },
    "delta_block_released": {
        "layers.0.mlp": [E],
        "layers.1.attn": [E],
        "layers.1.mlp": [E],
        "layers.2.attn": [E],
        "layers.2.mlp": [E, "blocks.0.change"],
        "layers.3.attn": [E, "blocks.0.change"],
        "layers.3.mlp": [E, "blocks.0.change"],
    },
}


def test_every_variant_is_listed():
    assert EXPECTED.keys() == variants.VARIANTS.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_sources(name):
    assert variants.source_names(name, num_layers=4, num_blocks=2) == EXPECTED[name]


@pytest.mark.parametrize("name", ["delta_attnres", "delta_block", "full_additive"])
def test_the_null_source_comes_first_and_gives_reader_one_a_source(name):
    expected = {"layers.0.attn": ["null"]}
    expected |= {reader: ["null", *names] for reader, names in EXPECTED[name].items()}
    assert variants.source_names(name, 4, 2, null_source=True) == expected


@pytest.mark.parametrize(
    ("name", "num_layers", "num_blocks", "lengths"),
    [
        ("delta_block", 12, 4, (3, 3, 3, 3)),
        ("delta_block", 4, 4, (1, 1, 1, 1)),
        ("delta_block", 1, 1, (1,)),
        ("delta_block_released", 7, 3, (3, 3, 1)),
        ("delta_block_released", 12, 8, (2, 2, 2, 2, 2, 2)),
        ("delta_block_released", 9, 8, (2, 2, 2, 2, 1)),
        ("delta_attnres", 12, 5, (12,)),
    ],
)
def test_block_lengths(name, num_layers, num_blocks, lengths):
    assert variants.block_lengths(name, num_layers, num_blocks) == lengths
