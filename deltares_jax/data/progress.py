"""How far a preparation is, on stderr."""

import sys
import time

from deltares_jax.printing import human_count, human_time

_SECONDS = 30  # between two lines where the output is no terminal


def note(*lines: str) -> None:
    """Prints lines on stderr."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


class Progress:
    """Tokens, their rate and the time left: a live line on a terminal, else one every 30 s.

    Args:
      total: bytes of the source that are left to do.
      max_tokens: that are left to make; 0: all.
    """

    def __init__(self, total: int, max_tokens: int):
        self._total, self._max_tokens = max(total, 1), max_tokens
        self._bytes = self._tokens = 0
        self._live = sys.stderr.isatty()
        self._began = self._shown = time.monotonic()
        self._drawn = False

    def advance(self, source_bytes: int, made: int) -> None:
        """Counts bytes of the source and tokens."""
        self.set(self._bytes + source_bytes, self._tokens + made)

    def set(self, source_bytes: int, made: int) -> None:
        """Sets both, and shows them if it is time."""
        self._bytes, self._tokens = source_bytes, made
        now = time.monotonic()
        if now - self._shown < (0.5 if self._live else _SECONDS):
            return
        self._shown = now
        seconds = now - self._began
        done = self._bytes / self._total
        if self._max_tokens:
            done = max(done, self._tokens / self._max_tokens)
        done = min(max(done, 1e-6), 0.999)
        text = (
            f"{human_count(self._tokens)} tokens, {human_count(self._tokens / seconds)} tokens/s, "
            f"{done:.1%} done, {human_time(seconds * (1 - done) / done)} left"
        )
        if self._live:
            print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)
            self._drawn = True
        else:
            note(text)

    def close(self) -> None:
        """Ends the live line."""
        if self._drawn:
            note("")
