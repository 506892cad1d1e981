"""Names, shapes and places of the tensors of a checkpoint, without loading a model."""

import json

import convert_helpers as helpers
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from deltares_jax import config as config_lib
from deltares_jax.interop import files, hf_config, names, placing
from deltares_jax.models import sizes
from deltares_jax.parallel import mesh as mesh_lib

SHAPES = {
    # published config.json of Qwen3: parameters of the files, without the head where it is tied
    "0.6B": (1024, 28, 16, 8, 3072, True, 596_049_920),
    "4B": (2560, 36, 32, 8, 9728, True, 4_022_468_096),
    "8B": (4096, 36, 32, 8, 12288, False, 8_190_735_360),
}


@pytest.mark.parametrize("size", SHAPES)
def test_shapes_of_published_models(size):
    width, layers, heads, kv_heads, mlp, tied, parameters = SHAPES[size]
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": mlp,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    model, notes = hf_config.read(values, "config.json")
    assert notes == []
    config = config_lib.default()
    config.model.update(model)
    config.model.residual.variant = "baseline"
    shapes = {n: t.shape for n, t in names.tensors(config_lib.resolve(config).model).items()}
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == parameters
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (heads * 128, width)
    assert shapes[f"model.layers.{layers - 1}.self_attn.o_proj.weight"] == (width, heads * 128)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (128,)
    assert shapes["model.layers.3.mlp.down_proj.weight"] == (width, mlp)
    assert ("lm_head.weight" in shapes) is not tied


@pytest.mark.parametrize("size", ["600m", "7b"])
def test_recipes_export_every_parameter_once(size):
    for variant in ("baseline", "delta_block"):
        model = config_lib.resolve(config_lib.paper(size, variant)).model
        found = names.tensors(model)
        count = sum(int(np.prod(tensor.shape)) for tensor in found.values())
        assert count == sum(sizes.parameter_counts(model).values())
        routed = [name for name in found if "_res_" in name]
        assert len(routed) == (4 * model.num_layers if variant == "delta_block" else 0)


@pytest.mark.parametrize("size", ["600m", "7b"])
def test_any_vocabulary_goes_to_256_devices(size, monkeypatch):
    """151936 rows cannot be cut in 256: the embedding is cut along the width, and not filled up."""
    monkeypatch.setattr(mesh_lib, "find_devices", lambda config: range(256))
    monkeypatch.setattr(
        mesh_lib,
        "make_mesh",
        lambda shape, devices: AbstractMesh(tuple(shape.values()), tuple(shape)),
    )
    model = config_lib.resolve(config_lib.paper(size, "delta_block")).model
    embedding = placing.abstract(model)["embedding"]
    assert embedding.shape == (151936, model.width)
    assert embedding.sharding.shard_shape(embedding.shape) == (151936, model.width // 256)


def test_weights_are_cut_over_the_devices_while_they_are_read(tmp_path):
    """Of 97 rows eight devices hold 4 columns of 32 each; nothing is filled up."""
    folder = helpers.GOLDEN / "qwen3_v5_untied"
    config = config_lib.default()
    values = json.loads((folder / "config.json").read_text())
    config.model.update(hf_config.read(values, "config.json")[0])
    config.model.residual.variant = "baseline"
    model = config_lib.resolve(config).model
    params = placing.load(model, files.stored_tensors(folder), names.tensors(model))
    for leaf in (params["embedding"], params["head"]):
        assert [shard.data.shape for shard in leaf.addressable_shards] == [(97, 4)] * 8
    theirs = helpers.read_tensors(folder)
    np.testing.assert_array_equal(params["embedding"], theirs["model.embed_tokens.weight"])
    up_LDF = params["layers"]["mlp"]["up"]
    assert up_LDF.addressable_shards[0].data.shape == (2, 4, 64)
    np.testing.assert_array_equal(up_LDF[1].T, theirs["model.layers.1.mlp.up_proj.weight"])
