"""The processes of a run know each other: who is there, what they agree on, who is lost.

JAX's own start-up aborts when it waits too long, and names nobody. So the processes call the roll
before it: all connect to process 0 by TCP and stay connected. What one sends is a line of JSON.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from deltares_jax.parallel.connection import Connection, split_address

BAD_INPUT = 2
MISSING = 7


class PeerError(Exception):
    """Another process is missing, lost or has ended; with the exit code that this one takes."""

    def __init__(self, message: str, code: int = MISSING):
        super().__init__(message)
        self.code = code


class Peers:
    """The connections of a process to the others, through process 0.

    Args:
      coordinator: `host:port` of process 0.
      index: of this process.
      count: of all.
      timeout: seconds that are waited for the others.
      heartbeat: seconds after which one that is not heard of is lost.
      common: exit codes of ends that all processes reach by themselves.

    Attributes:
      when_lost: called with a text and an exit code once another process is lost; while it is
        None, the next `gather` raises.

    Raises:
      PeerError: some are missing; names them.
      ValueError: an index is taken twice, or the address cannot be used.
    """

    def __init__(
        self,
        coordinator: str,
        index: int,
        count: int,
        timeout: float,
        heartbeat: float,
        common: tuple[int, ...] = (0,),
    ):
        self.index, self.count, self._common = index, count, common
        self._address, self._timeout, self._heartbeat = coordinator, timeout, heartbeat
        self._inbox: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._others: dict[int, Connection] = {}
        self._listener: socket.socket | None = None
        self._left = threading.Event()
        self.when_lost: Callable[[str, int], None] | None = None
        self._me = {"id": index, "count": count, "who": f"{socket.gethostname()} pid {os.getpid()}"}
        if index == 0:
            self._call()
        else:
            self._answer()
        for number, connection in self._others.items():
            threading.Thread(target=self._read, args=(number, connection), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    # The roll-call.

    def _call(self) -> None:
        host, port = split_address(self._address)
        try:
            for number in (port, port + 1):  # JAX takes the second
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listener = socket.create_server(("", number), family=family, backlog=self.count)
                if number == port:
                    self._listener = listener
                else:
                    listener.close()
        except OSError as error:
            raise ValueError(
                f"distributed.coordinator={self._address}: process 0 cannot listen on port "
                f"{number} ({error.strerror}); is there another process 0?"
            ) from None
        assert self._listener is not None
        end, twice = time.monotonic() + self._timeout, ""
        while len(self._others) < self.count - 1 and not twice:
            self._listener.settimeout(max(end - time.monotonic(), 0.01))
            try:
                place, _ = self._listener.accept()
            except TimeoutError:
                break
            finally:
                self._forget_gone()
            twice = self._admit(Connection(place))
        missing = sorted(set(range(1, self.count)) - set(self._others))
        names = {0: self._me["who"]} | {n: c.who for n, c in sorted(self._others.items())}
        joined = ", ".join(f"{number} ({who})" for number, who in names.items())
        text = (
            f"{len(self._others) + 1} of {self.count} processes joined within "
            f"{self._timeout:g} s (distributed.timeout): {joined}; missing: "
            f"{', '.join(map(str, missing))}. Start the same command on every host"
        )
        code = MISSING
        if twice:
            text, code = twice, BAD_INPUT
        if twice or missing:
            for connection in self._others.values():
                connection.send({"refused": text, "code": code})
            self._refuse(text, code)
        for connection in self._others.values():
            connection.send({"joined": self.count})
        threading.Thread(target=self._turn_away, daemon=True).start()

    def _forget_gone(self) -> None:
        """One that ended while it waited is missing, and may be started again."""
        self._others = {n: c for n, c in self._others.items() if not c.gone()}

    def _admit(self, connection: Connection) -> str:
        """Takes up one that has connected; a text if its index or count is impossible."""
        try:
            hello = connection.receive(10)
        except TimeoutError:
            hello = None
        if not hello or not {"id", "count", "who"} <= set(hello):  # somebody else's port scan
            connection.close()
            return ""
        number, connection.who = hello["id"], hello["who"]
        text = ""
        if hello["count"] != self.count:
            text = (
                f"process {number} ({connection.who}) was started with distributed.num_processes="
                f"{hello['count']}, process 0 with {self.count}"
            )
        elif number in self._others or number == 0:
            other = self._others[number].who if number else self._me["who"]
            text = f"distributed.process_id={number} is taken twice: {other} and {connection.who}"
        elif not 0 < number < self.count:
            text = (
                f"distributed.process_id={number} ({connection.who}) must be below "
                f"distributed.num_processes={self.count}"
            )
        if text:
            connection.send({"refused": text, "code": BAD_INPUT})
        else:
            self._others[number] = connection
        return text

    def _turn_away(self) -> None:
        """Tells whoever comes after the roll-call that its place is taken."""
        assert self._listener is not None
        self._listener.settimeout(None)
        while not self._left.is_set():
            try:
                place, _ = self._listener.accept()
            except OSError:
                return
            self._admit(Connection(place))

    def _answer(self) -> None:
        host, port = split_address(self._address)
        end = time.monotonic() + self._timeout
        why = "no answer"
        while time.monotonic() < end:
            try:
                place = socket.create_connection((host, port), timeout=5)
            except OSError as error:
                why = error.strerror or str(error)
                time.sleep(0.2)
                continue
            connection = Connection(place)
            connection.who = f"process 0 at {self._address}"
            connection.send(self._me)
            try:
                # Process 0 answers in its own time; it may have been started long before.
                answer = connection.receive(self._timeout + 10)
            except TimeoutError:
                break
            if answer and "refused" in answer:
                self._refuse(answer["refused"], answer["code"])
            if answer and "joined" in answer:
                self._others[0] = connection
                return
            why = "it ended the connection"
            connection.close()
            time.sleep(0.2)
        self._refuse(
            f"process {self.index}: process 0 was not reached at distributed.coordinator="
            f"{self._address} within {self._timeout:g} s (distributed.timeout): {why}",
            MISSING,
        )

    def _refuse(self, text: str, code: int) -> None:
        if code == BAD_INPUT:
            raise ValueError(text)
        raise PeerError(text, code)

    # Afterwards.

    def gather(self, value: Any) -> list[Any]:
        """The values that all processes give here, in their order.

        Raises:
          PeerError: one of them has ended, or is late.
        """
        if self.index:
            self._others[0].send({"value": value})
            return self._next()[1]["values"]
        values = {0: value}
        while len(values) < self.count:
            number, message = self._next()
            values[number] = message["value"]
        everything = [values[number] for number in range(self.count)]
        for connection in self._others.values():
            connection.send({"values": everything})
        return everything

    def _next(self) -> tuple[int, dict[str, Any]]:
        # As long as a process is heard of, it may take its time.
        number, message = self._inbox.get()
        if "lost" in message:
            raise PeerError(message["lost"], message["code"])
        return number, message

    def _read(self, number: int, connection: Connection) -> None:
        while True:
            try:
                message = connection.receive(self._heartbeat)
            except TimeoutError:
                self._lost(
                    number,
                    f"process {number} ({connection.who}) was not heard of for "
                    f"{self._heartbeat:g} s (distributed.heartbeat)",
                    MISSING,
                )
                return
            if message is None:
                text = f"process {number} ({connection.who}) is lost: its connection ended"
                self._lost(number, text, MISSING)
                return
            if "bye" in message:
                if "about" in message:  # a third one; process 0 passes it on
                    self._lost(message["about"], message["bye"], message["code"])
                elif message["code"] not in self._common:
                    text = f"process {number} ({connection.who}) ended: {message['bye']}"
                    self._lost(number, text, message["code"])
                return
            if "value" in message or "values" in message:
                self._inbox.put((number, message))

    def _lost(self, number: int, text: str, code: int) -> None:
        if self._left.is_set():
            return
        for other, connection in self._others.items():
            if other != number:
                connection.send({"bye": text, "code": code, "about": number})
        if self.when_lost is not None:
            self.when_lost(text, code)
        else:
            self._inbox.put((number, {"lost": text, "code": code}))

    def _beat(self) -> None:
        while not self._left.wait(self._heartbeat / 4):
            for connection in self._others.values():
                connection.send({"beat": 1})

    def leave(self, code: int, text: str = "") -> None:
        """Ends the connections; the others are told why."""
        self._left.set()
        for connection in self._others.values():
            connection.send({"bye": text, "code": code})
        if self._listener is not None:
            self._listener.close()
