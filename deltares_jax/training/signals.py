"""A request to stop: noted when it comes, obeyed as soon as nothing is lost by it."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

SAVED = 143
NOT_SAVED = 144
NON_FINITE = 4
DATA_ENDED = 5
CANNOT_SAVE = 6
PEER_LOST = 7

Result = TypeVar("Result")


# What is left of a save or a compilation is not waited for, nor are other processes.
_AT_ONCE = (CANNOT_SAVE, NOT_SAVED, PEER_LOST)


class Stop(Exception):  # noqa: N818 - it is no error: a run that ends early, with an exit code
    """Ends a run early with a message and an exit code of its own.

    Attributes:
      code: the exit code.
      at_once: whether the process has to end without waiting for its threads.
    """

    def __init__(self, message: str, code: int, at_once: bool = False):
        super().__init__(message)
        self.code = code
        self.at_once = at_once or code in _AT_ONCE


def end_on_request() -> None:
    """Takes `end_at_once` for signals whose default would pass for the end after a save."""
    signal.signal(signal.SIGTERM, end_at_once)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, end_at_once)


def interrupt_on_request(grace: float = 10.0) -> None:
    """Takes SIGINT, SIGTERM and SIGHUP as Ctrl-C, for commands that leave nothing behind.

    An interrupt may be lost in a callback of a library, so the process ends after `grace` seconds.
    """

    def end() -> None:
        os.write(2, b"interrupted\n")
        os._exit(NOT_SAVED)

    def interrupt(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(grace, end)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or in the background of a script
            signal.signal(number, interrupt)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """A handler for the time in which nothing could be saved: exit code 144."""
    name = signal.Signals(number).name
    with contextlib.suppress(OSError):
        os.write(2, f"stopped by {name} outside of training; there is nothing to save\n".encode())
    os._exit(NOT_SAVED)


class StopRequest:
    """Notes SIGTERM, SIGINT and SIGHUP while it is entered; a second SIGINT interrupts at once.

    SIGHUP stays ignored where it is (nohup). Maintenance and preemption of cloud machines come as
    SIGTERM, so nothing else needs to be asked.

    Args:
      kept: what a stop that saves nothing leaves, in words.

    Attributes:
      name: of the first signal; empty while there was none.
    """

    def __init__(self, kept: Callable[[], str]) -> None:
        self.name = ""
        self._kept = kept
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
            raise Stop(f"stopped by {self.name} before a step was made; {self._kept()}", NOT_SAVED)

    def while_waiting(self, function: Callable[[], Result]) -> Result:
        """The result of a function that never returns to Python for long, a compilation.

        It runs in a thread, so that a request ends the run without waiting for it.
        """
        result: list[Result] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                result.append(function())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True, name="compile")
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            self.check()
        if failed:
            raise failed[0]
        return result[0]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.name:
            return
        self.name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
            # print() must not be entered while it runs.
            os.write(2, f"\n{self.name}: stopping as soon as the step is saved\n".encode())
