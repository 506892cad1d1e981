"""Reads the reference files under tests/golden into our parameter trees."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict, FrozenConfigDict

from deltares_jax.models import transformer

FOLDER = pathlib.Path(__file__).parent / "golden"

# Our leaf → the reference's name; those below a layer without its prefix.
_LAYER = {
    "attn/query": "self_attn.q_proj.weight",
    "attn/key": "self_attn.k_proj.weight",
    "attn/value": "self_attn.v_proj.weight",
    "attn/out": "self_attn.o_proj.weight",
    "attn/query_norm/gain": "self_attn.q_norm.weight",
    "attn/key_norm/gain": "self_attn.k_norm.weight",
    "mlp/gate": "mlp.gate_proj.weight",
    "mlp/up": "mlp.up_proj.weight",
    "mlp/down": "mlp.down_proj.weight",
    "attn_norm/gain": "input_layernorm.weight",
    "mlp_norm/gain": "post_attention_layernorm.weight",
    "attn_reader/routing/query": "attn_res_proj.weight",
    "attn_reader/routing/gain": "attn_res_norm.weight",
    "attn_reader/routing/null_source": "attn_null_source",
    "mlp_reader/routing/query": "mlp_res_proj.weight",
    "mlp_reader/routing/gain": "mlp_res_norm.weight",
    "mlp_reader/routing/null_source": "mlp_null_source",
}
_GATE = {"scalar": "res_gate_logit", "alpha": "res_alpha"}
_TOP = {
    "embedding": "model.embed_tokens.weight",
    "final_norm/gain": "model.norm.weight",
    "final_reader/routing/query": "model.final_res_proj.weight",
    "final_reader/routing/gain": "model.final_res_norm.weight",
}


class Case:
    """One reference file: its inputs, results and configuration."""

    def __init__(self, name: str):
        self.name = name
        self.arrays = np.load(FOLDER / f"{name}.npz")
        self.meta = json.loads(str(self.arrays["meta"]))
        self.ids = self.arrays["ids"]

    def config(self, dtype: str = "float32", **changes) -> FrozenConfigDict:
        """The model config of the case."""
        cfg, meta = self.meta["cfg"], self.meta
        return FrozenConfigDict(
            ConfigDict(
                {
                    "vocab_size": cfg["vocab"],
                    "width": cfg["hidden"],
                    "num_layers": cfg["layers"],
                    "num_heads": cfg["heads"],
                    "num_kv_heads": cfg["kv_heads"],
                    "head_dim": cfg["head_dim"],
                    "mlp_width": cfg["mlp"],
                    "tied": cfg["tied"],
                    "rope_theta": cfg["rope_theta"],
                    "norm_eps": cfg["rms_eps"],
                    "dtype": dtype,
                    "remat": "none",
                    "scan": "blocks",
                    "attention": "auto",
                    "residual": {
                        "variant": meta["variant"],
                        "num_blocks": cfg["num_blocks"],
                        "gate": meta["gate"],
                        "null_source": meta["null_source"],
                        "centered": meta["centered"],
                        "kernel": "auto",
                    },
                    **changes,
                }
            )
        )

    def params(self, config: FrozenConfigDict):
        """The parameters of the case as our tree."""
        return self._tree(config, np.load(FOLDER / f"{self.meta['config']}_params.npz"))

    def grads(self, config: FrozenConfigDict):
        """The reference gradients as our tree; zero where the reference has none."""
        values = dict(np.load(FOLDER / f"{self.meta['config']}_params.npz"))
        values = {name: np.zeros_like(array) for name, array in values.items()}
        for key in self.arrays.files:
            kind, _, name = key.partition("/")
            if kind == "grad":
                values[name] = self.arrays[key]
            if kind == "gradq":
                values[name] = self.arrays[key] * self.meta["grad_scale"][name]
        return self._tree(config, values)

    def quantised(self) -> set[str]:
        """Our names of the leaves whose reference gradients were stored as int16."""
        names = {key.partition("/")[2] for key in self.arrays.files if key.startswith("gradq/")}
        return {ours for ours, name in _LAYER.items() if any(n.endswith(name) for n in names)} | {
            ours for ours, name in _TOP.items() if name in names
        }

    def _tree(self, config: FrozenConfigDict, values):
        shapes = jax.eval_shape(lambda key: transformer.init(config, key), jax.random.key(0))

        def convert(name: str, shape: tuple[int, ...], dtype):
            array = np.asarray(values[name], np.float64)
            if name.endswith("_proj.weight") and "res_proj" not in name:
                array = array.T  # linear weights are stored as (out, in)
            return array.reshape(shape).astype(dtype)

        def leaf(path, like):
            ours = jax.tree_util.keystr(path, simple=True, separator="/")
            if ours in _TOP:
                return jnp.asarray(convert(_TOP[ours], like.shape, like.dtype))
            ours = ours.removeprefix("layers/")
            if ours.endswith("_reader/gate"):
                name = f"{ours.split('_')[0]}_{_GATE[self.meta['gate']]}"
            else:
                name = _LAYER[ours]
            names = [f"model.layers.{layer}.{name}" for layer in range(like.shape[0])]
            return jnp.stack([convert(n, like.shape[1:], like.dtype) for n in names])

        return jax.tree_util.tree_map_with_path(leaf, shapes)


def case_names() -> list[str]:
    """All cases, `A_…` without gradients and `B1_…` with them."""
    return sorted(p.stem for p in FOLDER.glob("*.npz") if not p.stem.endswith("_params"))
