"""Which tensor of a Qwen3 checkpoint is which parameter of ours, and in what layout.

Linear weights are stored there as (out, in), here as inputs × outputs with heads apart; layers are
stacked here. Tensors for routing have the names of the code released with the paper.

D width, H heads, d head_dim, L layers.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import transformer
from deltares_jax.parallel.sharding import path_name

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
NULL_SOURCES = ("attn_null_source", "mlp_null_source")

# Our leaf → their name, and how many leading axes of ours are inputs of a linear weight; 0: the
# tensor is stored as ours is.
_TOP = {
    "embedding": (EMBEDDING, 0),
    "head": (HEAD, 0),
    "final_norm/gain": ("model.norm.weight", 0),
    "final_reader/routing/query": ("model.final_res_proj.weight", 1),
    "final_reader/routing/gain": ("model.final_res_norm.weight", 0),
}
_LAYER = {
    "attn_norm/gain": ("input_layernorm.weight", 0),
    "attn/query": ("self_attn.q_proj.weight", 1),
    "attn/key": ("self_attn.k_proj.weight", 1),
    "attn/value": ("self_attn.v_proj.weight", 1),
    "attn/out": ("self_attn.o_proj.weight", 2),
    "attn/query_norm/gain": ("self_attn.q_norm.weight", 0),
    "attn/key_norm/gain": ("self_attn.k_norm.weight", 0),
    "mlp_norm/gain": ("post_attention_layernorm.weight", 0),
    "mlp/gate": ("mlp.gate_proj.weight", 1),
    "mlp/up": ("mlp.up_proj.weight", 1),
    "mlp/down": ("mlp.down_proj.weight", 1),
    "attn_reader/routing/query": ("attn_res_proj.weight", 1),
    "attn_reader/routing/gain": ("attn_res_norm.weight", 0),
    "attn_reader/routing/null_source": (NULL_SOURCES[0], 0),
    "mlp_reader/routing/query": ("mlp_res_proj.weight", 1),
    "mlp_reader/routing/gain": ("mlp_res_norm.weight", 0),
    "mlp_reader/routing/null_source": (NULL_SOURCES[1], 0),
}
_GATES = {"scalar": "{}_res_gate_logit", "alpha": "{}_res_alpha"}


class Tensor(NamedTuple):
    """A tensor of theirs.

    leaf: path of our parameter. layer: its place there, None where it is the whole of it. shape:
    theirs. part: ours, of that layer. linear: whether it is stored as (out, in).
    """

    leaf: str
    layer: int | None
    shape: tuple[int, ...]
    part: tuple[int, ...]
    linear: bool

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        """Their array in our layout."""
        return (array.T if self.linear else array).reshape(self.part)

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Our array, of the layer, in their layout."""
        out_of_in = self.shape[::-1] if self.linear else self.shape
        array = array.reshape(out_of_in)
        return np.ascontiguousarray(array.T) if self.linear else array


def abstract_params(model: FrozenConfigDict) -> Any:
    """Shapes and dtypes of our parameters."""
    return jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))


def tensors(model: FrozenConfigDict) -> dict[str, Tensor]:
    """All tensors of a model's checkpoint, by their names."""
    found: dict[str, Tensor] = {}
    for path, like in jax.tree_util.tree_leaves_with_path(abstract_params(model)):
        leaf = path_name(path)
        if leaf in _TOP:
            name, inputs = _TOP[leaf]
            found[name] = _tensor(leaf, None, like.shape, inputs)
            continue
        below = leaf.removeprefix("layers/")
        if below.endswith("_reader/gate"):
            name, inputs = _GATES[model.residual.gate].format(below.partition("_")[0]), 0
        else:
            name, inputs = _LAYER[below]
        for layer in range(model.num_layers):
            found[f"model.layers.{layer}.{name}"] = _tensor(leaf, layer, like.shape[1:], inputs)
    return found


def _tensor(leaf: str, layer: int | None, part: tuple[int, ...], inputs: int) -> Tensor:
    shape = part
    if inputs:
        shape = (int(np.prod(part[inputs:])), int(np.prod(part[:inputs])))
    return Tensor(leaf, layer, shape, part, bool(inputs))
