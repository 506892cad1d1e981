"""How numbers and lines are printed."""

import os
import sys


def human_time(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60:02d} min"
    return f"{s // 86400} d {s % 86400 // 3600:02d} h"


def human_count(number: float) -> str:
    """Four significant digits with k, M, G or T."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{number / scale:.4g} {unit}"
    return f"{number:.4g}"


def say(*lines: str, end: str = "\n") -> None:
    """Prints lines; a reader who has gone away (`| head`, a closed pager) does not end the run."""
    try:
        print(*lines, sep="\n", end=end, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open to the end
