"""How single tokens are shown in a figure."""

import functools
from collections.abc import Iterable
from typing import Any

from matplotlib import font_manager

_MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


@functools.cache
def _glyphs() -> frozenset[int]:
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))  # comes with matplotlib
    return frozenset(font.get_charmap())


def _shown(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    if character == "$":  # two of them would be a formula
        return r"\$"
    there = character.isprintable() and ord(character) in _glyphs()
    return character if there else f"U+{ord(character):04X}"


def labels(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """One line for each token: white space as marks, what the font lacks by its code point.

    A token of part of a character is shown by its number.
    """
    found = []
    for token in ids:
        text = tokenizer.decode([token])
        found.append(
            f"[{token}]" if "\ufffd" in text else "".join(map(_shown, text)) or f"[{token}]"
        )
    return found
