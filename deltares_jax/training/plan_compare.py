"""Two plans side by side: the ratios of their numbers, and what their recipes do not share."""

from typing import Any

from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax import config_checks

Report = dict[str, Any]

_STEP_KEYS = (
    *("data.seq_len", "train.batch_size", "train.accumulation"),
    *config_checks.MESH_AXES,
)


def differs(config: FrozenConfigDict, other: FrozenConfigDict) -> dict[str, list[Any]]:
    """Keys outside `model.residual` that change the compiled step, with both values."""
    mine, theirs = config_lib.flatten(config), config_lib.flatten(other)
    return {
        key: [mine[key], theirs[key]]
        for key in mine
        if mine[key] != theirs[key]
        and (key in _STEP_KEYS or key.startswith("model."))
        and not key.startswith("model.residual.")
    }


def ratios(report: Report, other: Report) -> dict[str, float | None]:
    """`report` over `other`, number by number; None where one of them is not known."""

    def numbers(r: Report) -> dict[str, float | None]:
        memory = r["hbm_bytes_per_chip"]
        keys = ("work_cycles", "estimated_step_seconds", "tokens_per_second_per_chip")
        return {
            "hbm_total": memory["total"],
            "hbm_temporaries": memory["temporaries"],
            **{key: r[key] for key in keys},
        }

    mine, theirs = numbers(report), numbers(other)
    return {key: a / b if a and (b := theirs[key]) else None for key, a in mine.items()}
