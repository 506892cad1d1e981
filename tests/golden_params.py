"""Reads the reference files under tests/golden into our parameter trees."""

import pathlib

FOLDER = pathlib.Path(__file__).parent / "golden"

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
_TOP = {
    "embedding": "model.embed_tokens.weight",
    "final_norm/gain": "model.norm.weight",
    "final_reader/routing/query": "model.final_res_proj.weight",
    "final_reader/routing/gain": "model.final_res_norm.weight",
}
