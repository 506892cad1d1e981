"""How processes find each other: the roll, their place, the watch over each other."""

import contextlib
import functools
import http.server
import queue
import socket
import threading
import time
from typing import ClassVar

import pytest
from process_helpers import free_port

from deltares_jax import config as config_lib
from deltares_jax.parallel import peers, startup

# The roll-call.


def call(port, *indices, count=3, timeout=3.0, heartbeat=20.0):
    """What each of some processes gets, here threads: its peers, or the error."""
    results = [None] * len(indices)

    def join(place, index):
        try:
            results[place] = peers.Peers(f"localhost:{port}", index, count, timeout, heartbeat)
        except (peers.PeerError, ValueError) as error:
            results[place] = error

    threads = [threading.Thread(target=join, args=pair) for pair in enumerate(indices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_roll_call_names_who_is_there_and_who_is_missing():
    first, second = call(free_port(), 0, 2, timeout=1.5)
    for error in (first, second):
        assert isinstance(error, peers.PeerError)
        assert error.code == 7
        assert "2 of 3 processes joined within 1.5 s" in str(error)
        assert "missing: 1." in str(error)
        assert "2 (" in str(error)


def test_roll_call_names_an_index_that_is_taken_twice():
    errors = call(free_port(), 0, 1, 1)
    for error in errors[:1]:
        assert isinstance(error, ValueError)
        assert "distributed.process_id=1 is taken twice: " in str(error)
    assert all(isinstance(error, ValueError | peers.PeerError) for error in errors)


def test_process_that_waits_for_nobody_names_the_address():
    port = free_port()
    (error,) = call(port, 1, timeout=1.0)
    assert error.code == 7
    assert f"process 0 was not reached at distributed.coordinator=localhost:{port}" in str(error)
    assert "refused" in str(error)


def test_late_process_joins_and_one_too_many_is_turned_away():
    port = free_port()
    found = {}
    late = threading.Timer(1.0, lambda: found.update(late=call(port, 1, count=2, timeout=20)))
    late.start()
    (first,) = call(port, 0, count=2, timeout=20)
    late.join()
    (second,) = found["late"]
    assert first.count == second.count == 2
    (third,) = call(port, 1, count=2)
    assert "distributed.process_id=1 is taken twice" in str(third)
    answers = {}
    other = threading.Thread(target=lambda: answers.update(second=second.gather("b")))
    other.start()
    assert first.gather("a") == ["a", "b"]  # the two go on undisturbed
    other.join()
    assert answers["second"] == ["a", "b"]
    second.leave(0)
    first.leave(0)


def test_process_that_is_started_again_while_others_are_waited_for():
    port = free_port()
    found = {}
    first = threading.Thread(target=lambda: found.update(first=call(port, 0, timeout=20)))
    first.start()
    place = None
    while place is None:
        with contextlib.suppress(OSError):
            place = socket.create_connection(("localhost", port))
    connection = peers.Connection(place)
    connection.send({"id": 1, "count": 3, "who": "one that dies"})
    time.sleep(0.3)
    connection.close()
    others = call(port, 1, 2, timeout=20)
    first.join()
    for peer in (*others, *found["first"]):
        assert isinstance(peer, peers.Peers), peer
        peer.leave(0)


def test_different_numbers_of_processes_are_refused():
    port = free_port()
    found = {}
    other = threading.Thread(target=lambda: found.update(other=call(port, 1, count=4)))
    other.start()
    (first,) = call(port, 0, count=2)
    other.join()
    for error in (first, *found["other"]):
        assert "num_processes=4, process 0 with 2" in str(error)


def go(peer):
    """As the system does for a process that is killed."""
    peer._others[0].close()


def fall_silent(peer):
    """As a host that is cut off."""
    peer._left.set()


def fail(peer):
    peer.leave(6, "disk full")


@pytest.mark.parametrize(
    ("how", "words", "code"),
    [(go, "is lost", 7), (fall_silent, "was not heard of for 1 s", 7), (fail, "disk full", 6)],
)
def test_others_are_told_which_process_is_lost(how, words, code):
    first, second, third = call(free_port(), 0, 1, 2, heartbeat=1.0, timeout=20)
    told = {}
    done = {0: threading.Event(), 2: threading.Event()}

    def when_lost(index, *what):
        told.setdefault(index, what)
        done[index].set()

    for peer in (first, third):
        peer.when_lost = functools.partial(when_lost, peer.index)
    how(second)
    for index in (0, 2):
        assert done[index].wait(20)
        assert told[index][0].startswith("process 1 (")
        assert words in told[index][0]
        assert told[index][1] == code
    first.leave(0)
    third.leave(0)


def test_end_that_all_reach_is_no_loss():
    first, second = call(free_port(), 0, 1, count=2)
    told = []
    first.when_lost = lambda *what: told.append(what)
    second.leave(0)
    go(second)
    with pytest.raises(queue.Empty):
        first._inbox.get(timeout=0.5)
    assert not told


# Where a process finds its place.


def settings(**values):
    config = config_lib.default().distributed
    config.update(values)
    return config


SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[012-014,20],other",
    "SLURM_PROCID": "2",
    "SLURM_JOB_ID": "77",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "run-0.run:1234", "JAX_NUM_PROCESSES": "8"}
TPU = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("given", "env", "place"),
    [
        ({}, {}, None),
        ({"num_processes": 1}, {}, None),
        ({}, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({}, {**TPU, "TPU_WORKER_HOSTNAMES": "a"}, None),
        ({}, SLURM, ("node012:20154", 2, 4)),
        ({}, {**SLURM, "SLURM_STEP_NODELIST": "single,b"}, ("single:20154", 2, 4)),
        ({}, {**SLURM, "SLURM_STEP_NODELIST": "n[7-9]-ib"}, ("n7-ib:20154", 2, 4)),
        ({}, {**SLURM, "SLURM_STEP_NODELIST": "r[1-2]n[03-4],a"}, ("r1n03:20154", 2, 4)),
        ({}, {**JAX, "JAX_PROCESS_ID": "3"}, ("run-0.run:1234", 3, 8)),
        ({}, {**JAX, "JOB_COMPLETION_INDEX": "5"}, ("run-0.run:1234", 5, 8)),
        ({}, {"JOB_COMPLETION_INDEX": "5"}, None),  # a Job of pods that do not know each other
        ({}, TPU, ("a:8476", 1, 2)),
        (
            {},
            {
                **TPU,
                "MEGASCALE_NUM_SLICES": "2",
                "MEGASCALE_SLICE_ID": "1",
                "MEGASCALE_COORDINATOR_ADDRESS": "job-0.svc:8080",
            },
            ("job-0.svc:8476", 3, 4),
        ),
        # Flags come first, key by key.
        ({"coordinator": "h:9", "process_id": 0, "num_processes": 2}, SLURM, ("h:9", 0, 2)),
        ({"coordinator": "h:9"}, SLURM, ("h:9", 2, 4)),
        ({"coordinator": "h:9"}, {"JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "3"}, ("h:9", 3, 8)),
        # All of them are all that is looked at.
        (
            {"coordinator": "h:9", "process_id": 0, "num_processes": 2},
            {"SLURM_STEP_NUM_TASKS": "4"},
            ("h:9", 0, 2),
        ),
        ({"num_processes": 1}, {"SLURM_STEP_NUM_TASKS": "4"}, None),
    ],
)
def test_place_is_found(given, env, place):
    found = startup.find_place(settings(**given), env)
    assert (found and (found.coordinator, found.process_id, found.num_processes)) == place


def at(address):
    return {"coordinator": address, "process_id": 0, "num_processes": 2}


@pytest.mark.parametrize(
    ("given", "env", "words"),
    [
        ({"coordinator": "h:9"}, {}, "needs distributed.process_id"),
        ({"num_processes": 2, "process_id": 1}, {}, "needs distributed.coordinator"),
        ({"coordinator": "h:9", "process_id": 1}, {}, "needs distributed.num_processes"),
        # Else it would train for itself.
        ({"process_id": 1}, {}, "process_id=1 needs distributed.coordinator"),
        ({"process_id": 1, "num_processes": 1}, {}, "process_id=1 must be .* below .*=1"),
        ({}, {"JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "3"}, "JAX_COORDINATOR_ADDRESS"),
        ({}, {"JAX_COORDINATOR_ADDRESS": "h:9"}, "JAX_PROCESS_ID"),
        ({}, {**JAX, "JAX_PROCESS_ID": "8"}, "process_id=8 must be .* below .*=8"),
        ({}, {**JAX, "JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID='-1' must be a whole number"),
        ({}, {**JAX, "JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' must be a whole"),
        ({}, {**SLURM, "SLURM_PROCID": ""}, "has no SLURM_PROCID"),
        ({}, {**TPU, "TPU_WORKER_ID": ""}, "has no TPU_WORKER_ID"),
        (at("h"), {}, "must be HOST:PORT"),
        (at("http://h:9"), {}, "must be HOST:PORT"),
        (at("h:70000"), {}, "a port from 1 to"),
        ({"coordinator": "h:9", "process_id": 2, "num_processes": 2}, {}, "must be .* below"),
    ],
)
def test_place_that_is_incomplete_is_refused(given, env, words):
    with pytest.raises(ValueError, match=words):
        startup.find_place(settings(**given), env)


class Metadata(http.server.BaseHTTPRequestHandler):
    """What a Cloud TPU VM can ask."""

    values: ClassVar = {
        "worker-network-endpoints": "x:y:10.0.0.5,x:y:10.0.0.6",
        "agent-worker-number": "1",
    }

    def do_GET(self):
        assert self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.values[self.path.rsplit("/", 1)[1]].encode())

    def log_message(self, *_):
        pass


def test_place_on_a_cloud_tpu_is_found_by_its_metadata(monkeypatch):
    monkeypatch.setattr(startup.os.path, "exists", lambda path: path == "/dev/vfio/0")
    with http.server.HTTPServer(("localhost", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {"GCE_METADATA_HOST": f"localhost:{server.server_port}"}
        place = startup.find_place(settings(), env)
        server.shutdown()
    assert place == startup.Place("10.0.0.5:8476", 1, 2)
