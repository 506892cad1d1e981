"""A request to stop: noted when it comes, obeyed between two steps."""

import contextlib
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

SAVED = 143
NOT_SAVED = 144
NON_FINITE = 4
DATA_ENDED = 5
CANNOT_SAVE = 6


class Stop(Exception):  # noqa: N818 - it is no error: a run that ends early, with an exit code
    """Ends a run early with a message and an exit code of its own."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class StopRequest:
    """Notes SIGTERM, SIGINT and SIGHUP while it is entered; a second SIGINT interrupts at once.

    SIGHUP stays ignored where it is (nohup).
    """

    def __init__(self) -> None:
        self.name = ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                self._previous[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: whoever runs us handles signals
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Ends a run that has not made a step yet if a stop was asked for."""
        if self.name:
            raise Stop(
                f"stopped by {self.name} before a step was made; nothing new to save", NOT_SAVED
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
            print(f"\n{self.name}: stopping after this step", file=sys.stderr)
