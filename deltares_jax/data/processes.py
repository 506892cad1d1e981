"""What processes that work for another one do at the end of their parent, and at Ctrl-C."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading


def end_with_parent(*_place: int) -> None:
    """Ends this process when its parent does, however that was killed; leaves Ctrl-C to it.

    Args:
      _place: number of this process and how many there are, as grain tells it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, too, and ends us
    parent = multiprocessing.parent_process()

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
