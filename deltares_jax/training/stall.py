"""Says where the threads of a host are when a step, or what is between two, takes far too long."""

import faulthandler
import os
import pathlib
import statistics
import threading
import time
from collections import deque

from deltares_jax import printing

LEAST_SECONDS = 30.0  # shorter pauses are a machine's, not a stall
_WINDOW = 101  # steps whose median counts


class Watchdog:
    """Writes the stacks of all threads once when nothing comes on for long.

    Args:
      folder: of the run; the stacks are appended to a file there.
      factor: how many times the median time of a step is too long; 0 is never.
      process: of this run, for the name of the file.
    """

    def __init__(self, folder: pathlib.Path, factor: float, process: int = 0):
        self.path = folder / f"stacks.{process}.log"
        self._factor = factor
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._last: float | None = None
        self._stepping = False
        self._told = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="stall")
        if factor:
            self._thread.start()

    def step(self) -> None:
        """A step has ended."""
        now = time.monotonic()
        if self._stepping and self._last is not None:
            self._times.append(now - self._last)
        self._last, self._stepping, self._told = now, True, False

    def moved(self) -> None:
        """Something other than a step has come on, such as a batch of an evaluation."""
        self._last, self._stepping, self._told = time.monotonic(), False, False

    def pause(self) -> None:
        """Something begins that may take any time."""
        self._last = None

    def close(self) -> None:
        """Ends the watch."""
        self._end.set()

    def _watch(self) -> None:
        while not self._end.wait(min(1.0, LEAST_SECONDS / 4)):
            last = self._last
            if last is None or self._told or not self._times:
                continue
            waited = time.monotonic() - last
            usual = statistics.median(list(self._times))
            if waited > max(self._factor * usual, LEAST_SECONDS):
                self._told = True
                self._tell(waited, usual)

    def _tell(self, waited: float, usual: float) -> None:
        text = f"no step for {waited:.0f} s, where one takes {usual:.3g} s"
        with self.path.open("a") as file:
            file.write(f"{time.ctime()}, process {os.getpid()}: {text}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        printing.say(f"warning: {text}; the stacks of all threads are in {self.path}")
