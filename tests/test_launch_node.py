"""One machine: what starts, stops and goes on there, and which errors are seen at once."""

import os
import signal
import subprocess
import time

import pytest
from launch_helpers import NODE, Launch

# Ends by SIGTERM alone, as after a save.
PATIENT = """#!/bin/bash
trap 'exit 143' TERM
echo "start" >>"$STARTS"
while true; do sleep 0.05; done
"""


class Node(Launch):
    def __init__(self, root):
        super().__init__(root)
        self.starts = root / "starts"
        self.env |= {**NODE, "STARTS": str(self.starts)}
        self.tool(self.bin / "python", PATIENT)

    def says(self, verb: str, code: int = 0, **env: str) -> str:
        """What a verb prints, that ends with the code."""
        done = self.bash("node.sh", verb, **env)
        assert done.returncode == code, done.stderr
        return done.stderr

    def started(self, count: int) -> None:
        """Waits for so many starts of the trainer."""
        end = time.monotonic() + 30
        while not self.starts.exists() or self.starts.read_text().count("start") < count:
            assert time.monotonic() < end
            time.sleep(0.02)

    def kill(self, number: int) -> None:
        """Ends the loop by a signal."""
        pid = int((self.root / "run.pid").read_text())
        os.kill(pid, number)
        end = time.monotonic() + 30
        while subprocess.run(["ps", "-p", str(pid)], stdout=subprocess.DEVNULL).returncode == 0:
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    yield node
    node.bash("node.sh", "stop")


def test_a_node_starts_once_and_stops(node):
    assert "started" in node.says("start")
    node.started(1)
    for verb in ("start", "resume"):
        assert "runs already" in node.says(verb)
    assert "ended with exit code 143" in node.says("stop")
    assert "was stopped; run starts it again" in node.says("resume")
    assert "nothing runs" in node.says("stop")
    assert node.starts.read_text() == "start\n"


def test_two_starts_at_once_start_one(node):
    done = node.bash("-c", "for i in 1 2 3; do bash launch/node.sh start & done; wait")
    assert done.stderr.count("started") == 1
    assert done.stderr.count("runs already") == 2


def test_resume_goes_on_after_a_restart_of_the_machine(node):
    """One in order: everything gets SIGTERM, and the loop notes how it ended."""
    node.says("start")
    node.started(1)
    node.kill(signal.SIGTERM)
    assert (node.root / "run.exit").read_text() == "143\n"
    assert "started" in node.says("resume")
    node.started(2)


@pytest.mark.parametrize(
    ("code", "again"), [("137", True), ("7", True), ("0", False), ("3", False)]
)
def test_resume_leaves_an_end_alone(node, code, again):
    (node.root / "run.exit").write_text(f"{code}\n")
    shown = "started" if again else f"ended with exit code {code}; run starts it again"
    assert shown in node.says("resume")


@pytest.mark.parametrize("pid", ["own", "", "garbage"])
def test_what_is_no_number_of_a_run_is_none(node, pid):
    """As that of another process, after a restart of the machine."""
    (node.root / "run.pid").write_text(pid.replace("own", str(os.getpid())) + "\n")
    assert node.says("stop").endswith("nothing runs\n")
    assert "started" in node.says("start")


def test_a_trainer_without_its_loop_is_seen(node):
    node.says("start")
    node.started(1)
    node.kill(signal.SIGKILL)
    for verb in ("start", "resume"):
        assert "restart.sh was killed, but its trainer runs (process " in node.says(verb, 1)
    assert "ended with exit code unknown" in node.says("stop")
    assert "nothing runs" in node.says("stop")
    assert node.starts.read_text() == "start\n"


def test_stop_does_not_wait_for_ever(node):
    node.tool(node.bin / "python", PATIENT.replace("'exit 143'", "''"))
    node.says("start")
    node.started(1)
    said = node.says("stop", 1, STOP_SECONDS="1")
    assert said.startswith("error: ")
    assert "has not ended in 1 s" in said
    node.bash("-c", said.rsplit(": ", 1)[1])
    assert "nothing runs" in node.says("stop")


def test_what_cannot_start_is_not_said_to_have(node):
    (node.root / "launch" / "restart.sh").chmod(0o644)  # is of no matter
    node.tool(node.bin / "python", "#!/bin/bash\necho no such thing; exit 2\n")
    said = node.says("start", 1)
    assert "no such thing\n" in said
    assert "ended at once, with exit code 2" in said
    (node.root / ".venv" / "installed").unlink()
    assert "give install first" in node.says("start", 2)
