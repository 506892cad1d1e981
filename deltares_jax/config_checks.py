"""The rules that a config must follow, one place for all of them. Free of jax.

Each check raises one `ValueError` that names the key, the value and the rule.
"""

import difflib
import math
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from deltares_jax import config_residual
from deltares_jax.data import names
from deltares_jax.models import variants

Flat = dict[str, Any]

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("bfloat16", "float32", "float64"),
    "model.remat": ("none", "full", "save_attention", "save_projections", "offload"),
    "model.scan": ("auto", "blocks", "unrolled", "boundaries"),
    "model.attention": ("auto", "reference", "splash", "cudnn"),
    "model.residual.variant": tuple(variants.VARIANTS),
    "model.residual.gate": ("none", "scalar", "alpha"),
    "model.residual.kernel": ("auto", "direct", "batched", "pallas"),
    "train.platform": ("", "cpu", "gpu", "tpu"),
    "train.nonfinite": ("stop", "skip"),
    "optim.schedule": ("cosine", "linear", "constant", "wsd"),
    "optim.decay": ("matrices", "all"),
}

# Smallest allowed value; numbers that are not listed may be anything finite.
AT_LEAST: dict[str, float] = {
    "model.vocab_size": 2,
    "model.width": 1,
    "model.num_layers": 1,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.head_dim": 2,
    "model.mlp_width": 1,
    "model.norm_eps": 0,
    "model.residual.num_blocks": 1,
    "data.seq_len": 1,
    "data.workers": 0,
    "train.steps": 1,
    "train.batch_size": 1,
    "train.accumulation": 1,
    "train.log_every": 1,
    "train.seed": 0,
    "train.nonfinite_limit": 0,
    "train.spike_factor": 0,
    "train.stall_factor": 0,
    "optim.learning_rate": 0,
    "optim.final_learning_rate": 0,
    "optim.warmup_steps": 0,
    "optim.cooldown_steps": 0,
    "optim.weight_decay": 0,
    "optim.b1": 0,
    "optim.b2": 0,
    "optim.clip_norm": 0,
    "optim.z_loss": 0,
    "optim.routing_learning_rate": 0,
    "eval.every": 0,
    "eval.rows": 1,
    "eval.batch_size": 1,
    "distributed.process_id": -1,
    "distributed.num_processes": 0,
    "distributed.timeout": 1,
    "distributed.heartbeat": 1,
    "metrics.routing_every": 0,
    "checkpoint.every": 0,
    "checkpoint.every_minutes": 0,
    "checkpoint.keep": 1,
    "checkpoint.keep_period": 0,
    "checkpoint.keep_best": 0,
}

# Largest allowed value: beyond these a typing error is likelier than a wish. Other whole numbers
# must fit 32 bits.
AT_MOST: dict[str, float] = {
    "model.vocab_size": 2**24,
    "model.width": 2**20,
    "model.num_layers": 2**12,
    "model.num_heads": 2**12,
    "model.head_dim": 2**12,
    "model.mlp_width": 2**22,
    "model.norm_eps": 1,
    "data.seq_len": 2**17,
    "train.batch_size": 2**20,
    "eval.batch_size": 2**16,
    "train.seed": 2**32 - 1,
    "data.workers": 2**10,
    "distributed.num_processes": 2**16,
    "distributed.timeout": 7 * 86400,
    "distributed.heartbeat": 7 * 86400,
}
_INT_LIMIT = 2**31 - 1
_FLOAT_LIMIT = 3e38  # of float32

MESH_AXES = ("mesh.replica", "mesh.data", "mesh.fsdp", "mesh.tensor")
_BELOW_ONE = ("optim.b1", "optim.b2")
_ABOVE_ZERO = ("model.rope_theta", "optim.eps")


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing where no known word is near."""
    known = list(known)
    close = difflib.get_close_matches(word, known, 1, 0.6)
    if not close:  # a key in the wrong section
        last = {key.rsplit(".", 1)[-1]: key for key in known}
        close = [last[n] for n in difflib.get_close_matches(word.rsplit(".", 1)[-1], last, 1, 0.8)]
    return f" (did you mean {close[0]}?)" if close else ""


def known_keys(flat: Flat, reference: Flat) -> None:
    """Refuses unknown and missing keys."""
    for key in flat:
        if key not in reference:
            raise ValueError(f"unknown config key {key}{nearest(key, reference)}")
    for key in reference:
        if key not in flat:
            raise ValueError(f"config key {key} is missing")


def has_type(key: str, value: Any, reference: Any) -> None:
    """Refuses a value of another type than the default's; an int serves as a float."""
    kind = type(reference)
    if type(value) is kind or (kind is float and type(value) is int):
        return
    raise ValueError(f"{key}={value!r} must be of type {kind.__name__}, as {reference!r} is")


def values(flat: Flat) -> None:
    """Checks each key for itself: choices, ranges, finiteness, the mesh's axes."""
    for key, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}={value} must be finite")
        if key in CHOICES and value not in CHOICES[key]:
            hint = nearest(value, CHOICES[key])
            choices = ", ".join(choice or "''" for choice in CHOICES[key])
            raise ValueError(f"{key}={value!r} must be one of {choices}{hint}")
        if key in AT_LEAST and value < AT_LEAST[key]:
            raise ValueError(f"{key}={value} must be at least {AT_LEAST[key]}")
        if not isinstance(value, str):
            limit = _FLOAT_LIMIT if isinstance(value, float) else _INT_LIMIT
            limit = AT_MOST.get(key, limit)
            if value > limit:
                raise ValueError(f"{key}={value} must be at most {limit}")
        if key in _BELOW_ONE and value >= 1:
            raise ValueError(f"{key}={value} must be below 1")
        if key in _ABOVE_ZERO and value <= 0:
            raise ValueError(f"{key}={value} must be above 0")
        if key in MESH_AXES and value < 1 and value != -1:
            raise ValueError(f"{key}={value} must be at least 1, or -1 for all remaining devices")
    for key in ("data.dir", "init_from"):
        if not in_bucket(flat[key]):
            local_folder(key, flat[key])
    local_folder("train.compile_cache", flat["train.compile_cache"])
    if not flat["train.compile_cache"]:
        raise ValueError("train.compile_cache='' must be a folder, 'auto' or 'off'")


def in_bucket(path: str) -> bool:
    """Whether a path is an address in a bucket of a kind that is supported."""
    return path.startswith(("gs://", "s3://"))


def local_folder(key: str, path: str) -> None:
    """Refuses addresses of buckets, which would become local folders, and homes of nobody."""
    if "://" in path:
        raise ValueError(
            f"{key}={path!r} must be a local folder, a mounted one for example; in buckets "
            "(gs://, s3://) are prepared data and runs alone"
        )
    try:
        pathlib.Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{key}={path!r}: there is no such home folder") from None


def combinations(flat: Flat) -> None:
    """Checks what several keys must agree on."""
    _shape(flat)
    config_residual.check(flat)
    _batch(flat)
    _schedule(flat)
    _routing_optimizer(flat)
    if flat["init_optimizer"] and not flat["init_from"]:
        raise ValueError("init_optimizer=True needs init_from, a run whose optimizer goes on")
    factor = flat["train.spike_factor"]
    if 0 < factor <= 1:
        raise ValueError(
            f"train.spike_factor={factor} must be above 1, else half of the updates are skipped; "
            "0 is off"
        )
    if flat["checkpoint.keep_best"] and not flat["eval.every"]:
        raise ValueError(
            f"checkpoint.keep_best={flat['checkpoint.keep_best']} goes by the held-out loss, so it "
            "needs eval.every"
        )
    rest = [key for key in MESH_AXES if flat[key] == -1]
    if len(rest) > 1:
        raise ValueError(f"{' and '.join(rest)} are -1; one axis at most may take the rest")
    parse_profile_steps(flat["train.profile_steps"], flat["train.steps"])
    names.parse_mixture(flat["data.mixture"])
    names.parse_sets(flat["eval.sets"])


def _shape(flat: Flat) -> None:
    heads, kv_heads = flat["model.num_heads"], flat["model.num_kv_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"model.num_heads={heads} must be a multiple of model.num_kv_heads={kv_heads}"
        )
    if flat["model.head_dim"] % 2:
        raise ValueError(f"model.head_dim={flat['model.head_dim']} must be even for RoPE")


def _batch(flat: Flat) -> None:
    batch, parts = flat["train.batch_size"], flat["train.accumulation"]
    if batch % parts:
        raise ValueError(
            f"train.batch_size={batch} (sequences per update) must be a multiple of "
            f"train.accumulation={parts} (micro-batches); {batch} / {parts} is not whole"
        )


def _schedule(flat: Flat) -> None:
    steps, warmup = flat["train.steps"], flat["optim.warmup_steps"]
    cooldown, schedule = flat["optim.cooldown_steps"], flat["optim.schedule"]
    peak, final = flat["optim.learning_rate"], flat["optim.final_learning_rate"]
    if schedule != "constant" and warmup >= steps:
        raise ValueError(
            f"optim.warmup_steps={warmup} must be below train.steps={steps}, "
            f"else {schedule} never decays"
        )
    if schedule == "wsd" and (cooldown < 1 or warmup + cooldown > steps):
        raise ValueError(
            f"optim.cooldown_steps={cooldown} must be from 1 to train.steps - optim.warmup_steps "
            f"= {steps - warmup} for optim.schedule=wsd"
        )
    if schedule != "wsd" and cooldown:
        raise ValueError(f"optim.cooldown_steps={cooldown} goes with optim.schedule=wsd alone")
    if final > peak:
        raise ValueError(
            f"optim.final_learning_rate={final} must not exceed optim.learning_rate={peak}"
        )


def _routing_optimizer(flat: Flat) -> None:
    rate, name = flat["optim.routing_learning_rate"], flat["model.residual.variant"]
    if rate and not flat["optim.learning_rate"]:
        raise ValueError(
            f"optim.routing_learning_rate={rate} follows the schedule of optim.learning_rate, "
            "which must be above 0; optim.freeze_base=True trains routing parameters alone"
        )
    if flat["optim.freeze_base"] and variants.VARIANTS[name].routing == "none":
        raise ValueError(
            f"optim.freeze_base=True trains routing parameters alone, but {name} has none; use "
            "another model.residual.variant"
        )


def parse_profile_steps(text: str, steps: int) -> tuple[int, int] | None:
    """`"10:15"` as (10, 15), the first and last step of the trace; None when empty."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= steps:
        raise ValueError(
            f"train.profile_steps={text!r} must be FIRST:LAST with "
            f"1 <= FIRST <= LAST <= train.steps={steps}"
        )
    return int(match[1]), int(match[2])
