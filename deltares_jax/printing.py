"""How numbers and lines are printed, and what becomes of lines that cannot be."""

import contextlib
import os
import sys

from deltares_jax.training.signals import Stop

UNEXPECTED = 1


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


def one_line(error: BaseException) -> str:
    """The first line of what another library says of an error, 200 characters at most."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def discard_stdout() -> None:
    """Drops what is printed from now on, and what could not be written before."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open to the end


def open_closed() -> None:
    """Gives a process that was started without stdout or stderr (`>&-`) an empty one."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # print(file=None) would write to the other one
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as above


_silent = False


def silence(on: bool) -> None:
    """Whether `say` and `put` print nothing: of the processes of a run one tells how it goes."""
    global _silent
    _silent = on


def exit_now(text: str, code: int) -> None:
    """Ends the process from any thread, whatever the others wait for, after a line on stderr."""
    with contextlib.suppress(OSError):
        os.write(2, f"error: {text}\n".encode())
    os._exit(code)


def say(*lines: str, end: str = "\n") -> None:
    """Prints lines on a run; it goes on where they cannot be read (`| head`, a full disk)."""
    if _silent:
        return
    try:
        print(*lines, sep="\n", end=end, flush=True)
    except OSError as error:
        discard_stdout()
        with contextlib.suppress(OSError):  # the terminal of both may have gone
            print(
                f"stdout cannot be written ({error.strerror}); going on without it",
                file=sys.stderr,
                flush=True,
            )


def need_stdout() -> None:
    """Ends a command whose result nobody could get, before it is computed."""
    if sys.__stdout__ is None:
        raise Stop("stdout is closed, so the result cannot be written", UNEXPECTED)


def note(line: str) -> None:
    """Prints a line beside a result, to stderr."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def put(*lines: str, end: str = "\n") -> None:
    """Prints what a command was started for; by one of its processes.

    Raises:
      BrokenPipeError: the reader has left.
      Stop: it cannot be written.
    """
    if _silent or not lines:
        return
    need_stdout()
    try:
        print(*lines, sep="\n", end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise Stop(
            f"the result cannot be written to stdout: {error.strerror}", UNEXPECTED
        ) from None
