"""The lists of data sets in a config: mixtures and evaluation sets. Free of jax."""

import math

_SPLITS = ("train", "validation")


def _pairs(key: str, text: str, form: str) -> list[tuple[str, str]]:
    pairs: dict[str, str] = {}
    for item in text.split(",") if text else []:
        name, equals, value = (word.strip() for word in item.rpartition("="))
        if not equals or not name or not value:
            raise ValueError(f"{key}={text!r}: {item!r} must have the form {form}")
        if name in pairs:
            raise ValueError(f"{key}={text!r} names {name} twice")
        pairs[name] = value
    return list(pairs.items())


def parse_mixture(text: str) -> dict[str, float]:
    """`"a=0.7,b=0.3"` as weights by source or folder; empty for an empty text.

    Raises:
      ValueError: the form is another, or a weight is not above 0.
    """
    weights = {}
    for name, value in _pairs("data.mixture", text, "SOURCE_OR_FOLDER=WEIGHT"):
        try:
            weights[name] = float(value)
        except ValueError:
            weights[name] = math.nan
        if not 1e-6 <= weights[name] <= 1e6:
            raise ValueError(
                f"data.mixture={text!r}: the weight {value!r} of {name} must be a number from 1e-6 "
                "to 1e6"
            )
    return weights


def parse_sets(text: str, key: str = "eval.sets") -> dict[str, tuple[str, str]]:
    """`"web=fineweb_edu/sample-10BT,own=/data/own:train"` as {name: (source or folder, split)}.

    The split is `validation` where none is named; `key` gave the text, for errors.

    Raises:
      ValueError: the form is another.
    """
    sets = {}
    for name, value in _pairs(key, text, "NAME=SOURCE_OR_FOLDER[:SPLIT]"):
        where, colon, split = value.rpartition(":")
        known = bool(colon) and split in _SPLITS
        sets[name] = (where, split) if known else (value, _SPLITS[1])
    return sets
