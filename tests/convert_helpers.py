"""Checkpoints in the format of Qwen3 to convert, written without the package's own writer."""

import json
import pathlib
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from deltares_jax import config as config_lib
from deltares_jax.interop import importing, names
from deltares_jax.training import checkpoint

GOLDEN = pathlib.Path(__file__).parent / "golden"
TIED = "qwen3_v4_tied"
TYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}


def convert(source, out, **asked) -> None:
    importing.convert(str(source), str(out), asked)


def refuses(*words: str):
    """Expects a ValueError of one line that holds the words in this order."""
    return pytest.raises(ValueError, match="^.*" + ".*".join(map(re.escape, words)) + ".*$")


def read_tensors(folder) -> dict[str, np.ndarray]:
    """All tensors of a folder, whichever file they are in."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        found |= safetensors.numpy.load_file(path)
    return found


def write_tensors(folder, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    """Replaces the files of weights: one file, or several and an index."""
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        old.unlink()
    tensors = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for number in range(shards):
        part = {name: tensors[name] for name in sorted(tensors)[number::shards]}
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        safetensors.numpy.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def write_json(path, values) -> None:
    pathlib.Path(path).write_text(json.dumps(values))


def edit_json(path, **changes) -> None:
    """Changes keys of a JSON file; `...` removes one."""
    values = json.loads(pathlib.Path(path).read_text()) | changes
    write_json(path, {k: v for k, v in values.items() if v is not ...})


def copy_case(name: str, target) -> pathlib.Path:
    """A reference checkpoint that a test may change."""
    shutil.copytree(GOLDEN / name, target)
    return pathlib.Path(target)


def random_run(folder, config, seed: int = 0, scale: float = 1.0):
    """A run whose parameters are all random, routing included; returns them."""
    config = config_lib.resolve(config)
    shapes = names.abstract_params(config.model)
    random = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: random.normal(0, scale, x.shape).astype(x.dtype), shapes)
    writer = checkpoint.Checkpointer(folder, keep=1)
    writer.save(3, {"params": params}, {"config": config.to_dict()})
    writer.wait()
    writer.close()
    return params


def write_released(case, folder) -> None:
    """A golden case as the released code saves a checkpoint of it."""
    folder.mkdir()
    values = np.load(GOLDEN / f"{case.meta['config']}_params.npz")
    write_tensors(folder, {name: values[name] for name in case.meta["param_names"]})
    cfg = case.meta["cfg"]
    modes = {
        "attnres_block": "block",
        "attnres_full": "full",
        "delta_attnres": "delta",
        "delta_block_released": "delta_block",
        "delta_replace": "delta_replace",
        "full_additive": "full_additive",
    }
    gates = {"none": "bias", "scalar": "sigmoid_scalar", "alpha": "learnable_alpha"}
    config = {
        "architectures": ["Qwen3AttnResForCausalLM"],
        "attention_bias": False,
        "attnres_gate_type": gates[case.meta["gate"]],
        "attnres_mode": modes[case.meta["variant"]],
        "attnres_num_blocks": cfg["num_blocks"],
        "attnres_use_null_source": case.meta["null_source"],
        "head_dim": cfg["head_dim"],
        "hidden_act": "silu",
        "hidden_size": cfg["hidden"],
        "intermediate_size": cfg["mlp"],
        "layer_types": ["full_attention"] * cfg["layers"],
        "model_type": "qwen3_attnres",
        "num_attention_heads": cfg["heads"],
        "num_hidden_layers": cfg["layers"],
        "num_key_value_heads": cfg["kv_heads"],
        "rms_norm_eps": cfg["rms_eps"],
        "rope_parameters": {"rope_theta": cfg["rope_theta"], "rope_type": "default"},
        "tie_word_embeddings": cfg["tied"],
        "vocab_size": cfg["vocab"],
    }
    write_json(folder / "config.json", config)
