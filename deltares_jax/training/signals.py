"""A request to stop: noted when it comes, obeyed between two steps."""

import signal
import sys
from types import FrameType, TracebackType
from typing import Any

SAVED = 143
NOT_SAVED = 144
NON_FINITE = 4
CANNOT_SAVE = 6


class Stop(Exception):  # noqa: N818 - it is no error: a run that ends early, with an exit code
    """Ends a run early with a message and an exit code of its own."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class StopRequest:
    """Notes SIGTERM and SIGINT while it is entered; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.name = ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
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

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        print(f"\n{self.name}: stopping after this step", file=sys.stderr)
