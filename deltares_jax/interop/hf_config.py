"""The config.json of a checkpoint: Qwen3's keys, and those of the code released with Delta AttnRes.

Free of jax, so that what we do not compute is refused before a device starts.
"""

import re
from typing import Any

from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config_checks

FILE = "config.json"
PLAIN = "qwen3"
ROUTED = "qwen3_attnres"
_ARCHITECTURES = {PLAIN: "Qwen3ForCausalLM", ROUTED: "Qwen3AttnResForCausalLM"}

_INTEGERS = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "mlp_width",
}
_DEFAULT_THETA = 10000.0  # of transformers, 4 and 5
_LARGEST = 3e38  # of float32

# Variants by the released code's mode; that code has no counterpart of the last two.
MODES = {
    "block": "attnres_block",
    "full": "attnres_full",
    "delta": "delta_attnres",
    "delta_block": "delta_block_released",
    "delta_replace": "delta_replace",
    "full_additive": "full_additive",
    "delta_block_paper": "delta_block",
    "attnres_cumulative": "attnres_cumulative",
}
OURS_ALONE = ("delta_block_paper", "attnres_cumulative")
_GATES = {"bias": "none", "sigmoid_scalar": "scalar", "learnable_alpha": "alpha"}
_DEFAULT_BLOCKS = 8  # of the released code
_WITHOUT_NULL_SOURCE = ("block", "full", "delta_replace")  # the released code ignores it there

# Of no effect on what is computed here, or checked below.
_KNOWN = {
    *_INTEGERS,
    *("model_type", "architectures", "head_dim", "rms_norm_eps", "tie_word_embeddings"),
    *("rope_theta", "rope_parameters", "rope_scaling", "hidden_act", "attention_bias"),
    *("attention_dropout", "use_sliding_window", "sliding_window", "max_window_layers"),
    *("layer_types", "quantization_config", "partial_rotary_factor"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
    *("initializer_range", "use_cache", "torch_dtype", "dtype", "transformers_version"),
    *("attnres_mode", "attnres_num_blocks", "attnres_gate_type", "attnres_use_null_source"),
    "attnres_centered",
}
_PASSED_ON = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")


def read(values: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The `model` section that a config.json means, and what to say about it.

    `head_dim` is missing where the file has none; `residual` where it is that of a plain model.

    Args:
      values: of the file.
      where: the file's path, for errors.

    Raises:
      ValueError: a field is missing, or asks for what is not computed here.
    """
    kind = values.get("model_type")
    if kind not in (PLAIN, ROUTED):
        raise ValueError(f"{where}: model_type={kind!r} must be {PLAIN} or {ROUTED}")
    routed = [key for key in values if key.startswith("attnres_")]
    if kind == PLAIN and routed:
        raise ValueError(
            f"{where}: model_type={PLAIN} and {routed[0]}={values[routed[0]]!r} disagree; a model "
            f"with routing is of the model_type {ROUTED}"
        )
    named = values.get("architectures")
    if named and named != [_ARCHITECTURES[kind]]:
        raise ValueError(
            f"{where}: architectures={named} must be {[_ARCHITECTURES[kind]]} for {kind}"
        )
    model: dict[str, Any] = {
        ours: _integer(values, theirs, where) for theirs, ours in _INTEGERS.items()
    }
    _refuse_other_computation(values, where)
    if values.get("head_dim") is not None:
        model["head_dim"] = _integer(values, "head_dim", where)
    model["norm_eps"] = _number(values, "rms_norm_eps", where)
    model["tied"] = values.get("tie_word_embeddings", False)  # as transformers has it
    if not isinstance(model["tied"], bool):
        raise ValueError(f"{where}: tie_word_embeddings={model['tied']!r} must be true or false")
    model["rope_theta"], notes = _theta(values, where)
    if kind == ROUTED:
        model["residual"], more = _residual(values, where)
        notes += more
    unread = sorted(k for k, v in values.items() if k not in _KNOWN and v is not None)
    if unread:
        notes.append(f"{FILE}: keys that are not read: {', '.join(unread)}")
    return model, notes


def _number(values: dict[str, Any], key: str, where: str) -> float:
    value = values.get(key)
    if value is None:
        raise ValueError(f"{where}: {key} is missing")
    kind_fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not (kind_fits and abs(value) < _LARGEST):  # nor nan
        raise ValueError(f"{where}: {key}={value!r} must be a number that float32 holds")
    return float(value)


def _integer(values: dict[str, Any], key: str, where: str) -> int:
    value = _number(values, key, where)
    if value != int(value):
        raise ValueError(f"{where}: {key}={value} must be a whole number")
    return int(value)


def _refuse_other_computation(values: dict[str, Any], where: str) -> None:
    """Refuses what would change the model's outputs and is not computed here."""
    wanted = {
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "attention_dropout": (0, 0),
        "partial_rotary_factor": (None, 1),
        "quantization_config": (None, None),
    }
    for key, (default, only) in wanted.items():
        value = values.get(key, default)
        if value not in (default, only):
            raise ValueError(f"{where}: {key}={value!r} is not supported; it must be {only!r}")
    layers, kinds = values["num_hidden_layers"], values.get("layer_types")
    if kinds is not None:
        allowed = ("full_attention", _layer_type(values))
        odd = [k for k in kinds if k not in allowed] if isinstance(kinds, list) else [kinds]
        if odd or len(kinds) != layers:
            raise ValueError(
                f"{where}: layer_types={kinds if not odd else odd[0]!r} is not supported; "
                f"it must be full_attention, {layers} times"
            )
    elif values.get("use_sliding_window") and values.get("sliding_window", 4096) is not None:
        first = _integer({"max_window_layers": 28} | values, "max_window_layers", where)
        if first < layers:
            raise ValueError(
                f"{where}: use_sliding_window=true with max_window_layers={first} below "
                f"num_hidden_layers={layers} is not supported: attention here sees all tokens"
            )


def _theta(values: dict[str, Any], where: str) -> tuple[float, list[str]]:
    """The base of the rotary angles: at the top in transformers 4, in rope_parameters in 5."""
    found: dict[str, float] = {}
    if values.get("rope_theta") is not None:
        found["rope_theta"] = _number(values, "rope_theta", where)
    for key in ("rope_parameters", "rope_scaling"):
        nested = values.get(key)
        if not nested:
            continue
        plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
        if not isinstance(nested, dict) or {
            k: v for k, v in nested.items() if k != "rope_theta" and v != plain.get(k)
        }:
            raise ValueError(
                f"{where}: {key}={nested} is not supported; only the unscaled rope_type 'default' "
                "with a rope_theta is"
            )
        if nested.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = _number(nested, "rope_theta", f"{where}: {key}")
    if len(set(found.values())) > 1:
        text = ", ".join(f"{key}={value!r}" for key, value in found.items())
        raise ValueError(f"{where}: {text} disagree; keep the one that the model was trained with")
    if not found:
        return _DEFAULT_THETA, [
            f"{FILE} has no rope_theta: {_DEFAULT_THETA:g}, the default of transformers"
        ]
    return next(iter(found.values())), []


def _residual(values: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The `model.residual` section that the released code's keys mean."""
    mode = str(values.get("attnres_mode"))
    gate = str(values.get("attnres_gate_type", "bias"))
    for key, value, known in (
        ("attnres_mode", mode, MODES),
        ("attnres_gate_type", gate, _GATES),
    ):
        if value not in known:
            raise ValueError(
                f"{where}: {key}={value!r} is not supported; it must be one of {', '.join(known)}"
                + config_checks.nearest(value, known)
            )
    residual = {"variant": MODES[mode], "gate": _GATES[gate], "num_blocks": _DEFAULT_BLOCKS}
    if "attnres_num_blocks" in values:
        residual["num_blocks"] = _integer(values, "attnres_num_blocks", where)
    notes = []
    for ours, theirs in (
        ("null_source", "attnres_use_null_source"),
        ("centered", "attnres_centered"),
    ):
        residual[ours] = values.get(theirs, False)
        if not isinstance(residual[ours], bool):
            raise ValueError(f"{where}: {theirs}={residual[ours]!r} must be true or false")
    if residual["null_source"] and mode in _WITHOUT_NULL_SOURCE:
        residual["null_source"] = False
        notes.append(f"attnres_use_null_source has no effect with attnres_mode={mode}: left out")
    return residual, notes


def in_its_words(error: str, where: str, plain: bool) -> str:
    """What is wrong with the config of a converted model, by the fields and flags it came from.

    Args:
      error: of the checks of the config, which name keys of ours.
      where: the path of the config.json.
      plain: whether the model is, so that its routing comes from flags.
    """
    theirs = {ours: theirs for theirs, ours in _INTEGERS.items()} | {"norm_eps": "rms_norm_eps"}
    text = error.replace("model.residual.", "--" if plain else "attnres_")
    text = re.sub(r"model\.(\w+)", lambda key: theirs.get(key[1], key[1]), text)
    return text if text.startswith("--") else f"{where}: {text}"


def ignores_null_source(values: dict[str, Any]) -> bool:
    """Whether the checkpoint holds null sources that its mode does not read."""
    mode = values.get("attnres_mode")
    return mode in _WITHOUT_NULL_SOURCE and bool(values.get("attnres_use_null_source"))


def _layer_type(values: dict[str, Any]) -> str:
    """What stands in `layer_types` where the released code would compute something else.

    That code takes any `attnres_mode` and does not know `attnres_centered`; `layer_types` is
    checked by transformers below it, so that the model is refused there.
    """
    if values.get("attnres_centered"):
        return "attnres_centered"
    mode = values.get("attnres_mode")
    return mode if mode in OURS_ALONE else "full_attention"


def is_ours_alone(values: dict[str, Any]) -> bool:
    """Whether the released code has no counterpart of a routed model, by its config.json."""
    return _layer_type(values) != "full_attention"


def write(
    model: FrozenConfigDict, dtype: str, seq_len: int, source: dict[str, Any]
) -> dict[str, Any]:
    """The config.json of a model.

    Args:
      model: the `model` section of its config.
      dtype: of the tensors.
      seq_len: tokens that it was trained on, for max_position_embeddings.
      source: of the config.json that it was imported with; empty for a model of our own.
    """
    row = model.residual
    kind = PLAIN if row.variant == "baseline" else ROUTED
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        **{theirs: model[ours] for theirs, ours in _INTEGERS.items()},
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": model.num_layers,
        "max_position_embeddings": seq_len,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
        **{key: source[key] for key in _PASSED_ON if source.get(key) is not None},
    }
    if kind == ROUTED:
        modes = {ours: theirs for theirs, ours in MODES.items()}
        gates = {ours: theirs for theirs, ours in _GATES.items()}
        values |= {
            "attnres_mode": modes[row.variant],
            "attnres_num_blocks": row.num_blocks,
            "attnres_gate_type": gates[row.gate],
            "attnres_use_null_source": row.null_source,
        }
        if row.centered:
            values["attnres_centered"] = True
    values["layer_types"] = [_layer_type(values)] * model.num_layers
    return values
