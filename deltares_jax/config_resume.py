"""What a run may change that goes on from a checkpoint, by the table of config.py. Free of jax."""

from typing import Any

from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.models import variants


def resume_rule(key: str) -> str:
    """The rule of `config.RESUME` for a dotted key; `fixed` for one of another version."""
    parts, rules = key.split("."), config_lib.RESUME
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((rules[prefix] for prefix in prefixes if prefix in rules), "fixed")


def completed(saved: dict[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint, with the defaults of the keys that are newer than it."""
    return _merged(config_lib.default().to_dict(), saved)


def _merged(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(defaults[key], value)
        for key, value in values.items()
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
    }
    return {**defaults, **values, **both}


def changed_on_resume(saved: dict[str, Any], config: FrozenConfigDict) -> list[str]:
    """Lines `key: old → new` of what a resumed run changes.

    Raises:
      ValueError: a change is not allowed; lists every such key with both values.
    """
    allowed, refused = _changes(saved, config)
    if refused:
        raise ValueError(
            f"this run cannot be resumed with {'; '.join(refused)} (saved → asked); "
            "use another --workdir, or the saved values"
        )
    return allowed


def changed_on_init(saved: dict[str, Any], config: FrozenConfigDict) -> list[str]:
    """Lines `key: old → new` of what a run changes that starts from another's checkpoint.

    The model must be the same and, when its position goes on, the data; all else is free.

    Raises:
      ValueError: lists every key that is refused, with both values.
    """
    allowed, refused = _changes(saved, config)
    kept = ("model.", "data.", "train.seed") if config.init_optimizer else ("model.",)
    bad = [line for line in refused if line.startswith(kept)]
    if variants.VARIANTS[config.model.residual.variant].grows != "block":
        bad = [line for line in bad if not line.startswith("model.residual.num_blocks:")]
    if bad:
        raise ValueError(
            f"init_from={config.init_from} cannot start this run: {'; '.join(bad)} (saved → asked)"
        )
    return sorted(allowed + refused)


def _changes(saved: dict[str, Any], config: FrozenConfigDict) -> tuple[list[str], list[str]]:
    """Lines of the changes that a resumed run may make, and of those that it may not."""
    old, new = config_lib.flatten(saved), config_lib.flatten(config)
    allowed: list[str] = []
    refused: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, "absent"), new.get(key, "absent")
        if before == after:
            continue
        rule = resume_rule(key)
        wide = key == "model.dtype" and "float64" in (before, after)  # another dtype on disk
        other_data = rule == "data" and not config.data.allow_change
        bad = rule == "fixed" or (rule == "upwards" and after < before) or wide or other_data
        why = " (float64 is kept as float64 in checkpoints)" if wide else ""
        why += " (data.allow_change=True allows it)" if other_data else ""
        (refused if bad else allowed).append(f"{key}: {before} → {after}{why}")
    return allowed, refused
