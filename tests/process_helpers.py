"""Real processes of one run on this machine."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading

from conftest import ROOT

SMALL = [
    "--config=configs/debug.py",
    "--config.model.residual.variant=baseline",
    "--config.model.num_layers=1",
    "--config.model.width=32",
    "--config.model.head_dim=16",
    "--config.model.mlp_width=64",
    "--config.data.seq_len=16",
    "--config.optim.warmup_steps=2",
    "--config.optim.schedule=constant",  # the same program whatever the number of steps
    "--config.eval.rows=8",
    "--config.metrics.tensorboard=False",
]


def free_port() -> int:
    """A port that is free, and the one after it; below those that the system gives to clients."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("", port))
                second.bind(("", port + 1))
            except OSError:
                continue
            return port


class Process:
    """A train command in the background; its lines are collected as they come."""

    def __init__(self, *arguments: str, devices: int = 1, code: str = ""):
        flags = f"--xla_force_host_platform_device_count={devices}" if devices > 1 else ""
        env = {**os.environ, "XLA_FLAGS": flags}
        start = ["-c", code] if code else ["-m", "deltares_jax.train"]
        self.popen = subprocess.Popen(
            [sys.executable, *start, *SMALL, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._collect, args=pair, daemon=True)
            for pair in ((self.popen.stdout, self.lines), (self.popen.stderr, self.errors))
        ]
        for thread in self._threads:
            thread.start()

    def _collect(self, stream, lines: list[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def wait_for(self, start: str, timeout: float = 300) -> None:
        """Returns when a line that begins so was printed."""

        def there() -> bool:
            return any(line.startswith(start) for line in self.lines)

        with self._changed:
            assert self._changed.wait_for(there, timeout), (start, self.lines, self.errors)

    def send(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def end(self, timeout: float = 300) -> int:
        """The exit code; kills what does not end in time."""
        try:
            code = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise
        for thread in self._threads:
            thread.join(10)
        return code

    @property
    def error(self) -> str:
        """The last line on stderr."""
        return self.errors[-1] if self.errors else ""


def group(count: int, *arguments: str, port: int = 0, **kwargs) -> list[Process]:
    """All processes of a run."""
    port = port or free_port()
    return [member(i, count, port, *arguments, **kwargs) for i in range(count)]


def member(index: int, count: int, port: int, *arguments: str, **kwargs) -> Process:
    """One of them."""
    return Process(
        *arguments,
        f"--config.distributed.coordinator=localhost:{port}",
        f"--config.distributed.process_id={index}",
        f"--config.distributed.num_processes={count}",
        **kwargs,
    )
