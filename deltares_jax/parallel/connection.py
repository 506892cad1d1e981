"""Lines of JSON between two processes."""

import contextlib
import json
import re
import select
import socket
import threading
from typing import Any


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port`.

    Raises:
      ValueError: it is not of that form.
    """
    host, _, port = address.rpartition(":")
    number = re.fullmatch(r"\d{1,5}", port, re.ASCII)
    if not host or "/" in host or not number or not 0 < int(port) < 65535:
        raise ValueError(
            f"distributed.coordinator={address!r} must be HOST:PORT with a port from 1 to 65534"
        )
    return host.strip("[]"), int(port)


class Connection:
    """Lines of JSON to and from another process."""

    def __init__(self, place: socket.socket):
        self._socket = place
        self._lines = place.makefile("rb")
        self._lock = threading.Lock()
        self.who = ""

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; nothing happens when the other one has gone."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None when the other one has gone.

        Raises:
          TimeoutError: there was none in time.
        """
        self._socket.settimeout(timeout)
        try:
            line = self._lines.readline()
            return json.loads(line) if line.endswith(b"\n") else None
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None

    def gone(self) -> bool:
        """Whether the other one has ended; for a time in which it has nothing to send."""
        try:
            readable, _, _ = select.select([self._socket], [], [], 0)
            return bool(readable) and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
