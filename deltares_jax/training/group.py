"""The processes of a run as its loop sees them; one alone is a group, too."""

import contextlib
import hashlib
import pathlib
import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax import printing
from deltares_jax.parallel import peers as peers_lib
from deltares_jax.parallel import startup
from deltares_jax.training import remote, signals
from deltares_jax.training import workdir as workdir_lib

_COMMON = (0, signals.NON_FINITE, signals.DATA_ENDED, signals.SAVED)
Result = TypeVar("Result")
_PATIENCE = 10.0  # seconds in which the watch says who is lost, after JAX has failed


class Group:
    """What the processes of a run agree on.

    Attributes:
      index: of this process.
      peers: the others; None for one process.
    """

    def __init__(self, peers: peers_lib.Peers | None):
        self.peers = peers
        self.index = peers.index if peers else 0

    def share(self, value: Any) -> Any:
        """What process 0 gives; plain values of JSON. Waits for all."""
        return self.peers.gather(value)[0] if self.peers else value

    def all(self, answer: bool) -> bool:
        """Whether all processes say yes."""
        return all(self.peers.gather(answer)) if self.peers else answer

    def agree(self, values: dict[str, Any], fix: str) -> None:
        """Checks that all processes give the same plain values.

        Raises:
          ValueError: names the process, the keys and both values, the same on all processes.
        """
        if not self.peers:
            return
        first, *others = self.peers.gather(values)
        for number, other in enumerate(others, 1):
            pairs = [f"{k}: {first[k]} → {other[k]}" for k in first if first[k] != other[k]]
            if pairs:
                raise ValueError(
                    f"process {number} differs from process 0 in {'; '.join(pairs)}; {fix}"
                )

    def one_by_one(self, function: Callable[[], Result]) -> Result:
        """The result of a function that process 0 runs first, and the others when it is done."""
        if self.index == 0:
            result = function()
            self.share(None)
            return result
        self.share(None)
        return function()

    def check_start(self, config: FrozenConfigDict, folder: pathlib.Path) -> None:
        """Checks that config, code, libraries and folder are the same everywhere.

        Raises:
          ValueError: they are not.
        """
        if not self.peers:
            return
        flat = config_lib.flatten(config.to_dict())
        flat = {key: value for key, value in flat.items() if key != "distributed.process_id"}
        self.agree(flat, "start the same command on every host")
        versions = {**workdir_lib.versions(), "code": _code()}
        self.agree(versions, "install the same on every host")
        mark = remote.home(folder) / ".roll-call"
        token = secrets.token_hex(8)
        if self.index == 0:
            mark.write_text(token)
        token = self.share(token)
        try:
            seen = mark.read_text() == token
        except OSError:
            seen = False
        views = self.peers.gather([seen, remote.shown(folder) or str(folder)])
        blind = [n for n, (seen, _) in enumerate(views) if not seen]
        if self.index == 0:
            mark.unlink(missing_ok=True)
        if blind:
            raise ValueError(
                f"process {blind[0]} does not see in {views[blind[0]][1]} what process 0 writes to "
                f"--workdir={views[0][1]}; all processes need the same shared folder"
            )

    def watch(self, folder: pathlib.Path) -> None:
        """From now on a lost process ends this one, wherever it is."""

        def lost(text: str, code: int) -> None:
            kept = workdir_lib.newest_text(folder)
            printing.exit_now(f"{text}; {kept}; start the same command on every host again", code)

        if self.peers:
            self.peers.when_lost = lost


def _code() -> str:
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def together(config: FrozenConfigDict) -> Iterator[Group]:
    """Joins the processes of a run; at the end tells the others how this one ended.

    Raises:
      signals.Stop: another process is missing, lost or has ended.
      ValueError: what the processes were told does not go together.
    """
    try:
        group = Group(startup.join(config.distributed, _COMMON))
    except peers_lib.PeerError as error:
        raise signals.Stop(str(error), error.code) from None
    if group.peers is None:
        yield group
        return
    printing.silence(group.index > 0)
    code, text = 1, ""
    try:
        yield group
        code = 0
    except peers_lib.PeerError as error:
        code, text = error.code, str(error)
        raise signals.Stop(text, code) from None
    except signals.Stop as stop:
        code, text = stop.code, str(stop)
        raise
    except ValueError as error:
        code, text = peers_lib.BAD_INPUT, str(error)
        # JAX would wait for the others at the exit.
        raise signals.Stop(text, code, at_once=True) from error
    except jax.errors.JaxRuntimeError as error:
        # A collective fails where a process is lost; the watch ends this one and says which.
        time.sleep(_PATIENCE)
        code, text = signals.PEER_LOST, str(error).splitlines()[0][:200]
        raise signals.Stop(f"the processes lost each other: {text}", code) from error
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        traceback.print_exc()
        raise signals.Stop(text, code, at_once=True) from error
    finally:
        group.peers.leave(code, text)
