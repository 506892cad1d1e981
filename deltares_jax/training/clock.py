"""What the time of a run is spent on, summed over restarts."""

import contextlib
import time
from collections.abc import Iterator, Mapping

# start: reading data and checkpoints; lost: steps that a restart had to make again.
KINDS = ("steps", "input", "compile", "save", "evaluate", "start", "lost")


class Clock:
    """Attributes every second since it was made to one kind.

    Args:
      kind: what the time goes to until told otherwise.
    """

    def __init__(self, kind: str = "start"):
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._kind, self._since = kind, time.monotonic()
        self._earlier = dict.fromkeys(KINDS, 0.0)

    def add(self, earlier: Mapping[str, float], lost: float = 0.0) -> None:
        """Adds what was spent before a restart, and what is lost by it."""
        self._earlier = {kind: earlier.get(kind, 0.0) for kind in KINDS}
        self._earlier["lost"] += lost

    def turn_to(self, kind: str) -> str:
        """Attributes the time from now on to another kind; returns the one until now."""
        now, before = time.monotonic(), self._kind
        self._seconds[before] += now - self._since
        self._kind, self._since = kind, now
        return before

    @contextlib.contextmanager
    def spent_on(self, kind: str) -> Iterator[None]:
        """Attributes the time inside to a kind."""
        before = self.turn_to(kind)
        try:
            yield
        finally:
            self.turn_to(before)

    def seconds(self) -> dict[str, float]:
        """Seconds by kind, of the whole run."""
        self.turn_to(self._kind)
        return {kind: self._earlier[kind] + self._seconds[kind] for kind in KINDS}

    def stepping(self) -> float:
        """Seconds in steps, the wait for their input included, since this process began."""
        self.turn_to(self._kind)
        return self._seconds["steps"] + self._seconds["input"]


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """The share of each kind that took any time."""
    total = sum(seconds.values())
    return {kind: value / total for kind, value in seconds.items() if value > 0}
