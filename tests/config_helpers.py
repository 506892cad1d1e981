"""Configs of tests: a default with changes, and what is expected of a refusal."""

import pathlib
import re

import pytest
from ml_collections import FrozenConfigDict

from deltares_jax import config as config_lib

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"

ADDITIVE = ("delta_attnres", "delta_block", "full_additive")
WITH_BLOCKS = ("delta_block", "attnres_block", "delta_block_released")
WITHOUT_BLOCKS = (
    "baseline",
    "delta_attnres",
    "attnres_full",
    "attnres_cumulative",
    "full_additive",
    "delta_replace",
)


def nested(values: dict) -> dict:
    """The default as a nested dict, with some dotted keys changed or added."""
    config = config_lib.default().to_dict()
    for key, value in values.items():
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return config


def resolved(values: dict) -> FrozenConfigDict:
    return config_lib.resolve(config_lib.from_dict(nested(values)))


def refuses(*words: str):
    """Expects a ValueError of one line that holds the words in this order."""
    return pytest.raises(ValueError, match="^.*" + ".*".join(map(re.escape, words)) + ".*$")
