"""The restart loop: which ends are the end, how often, and who hears of a signal."""

import signal
import subprocess
import time

import pytest
from launch_helpers import Launch

# Ends as the lines of the file CODES say, one a start.
TRAINER = """#!/bin/bash
echo "start $*" >>"$STARTS"
code=$(head -n 1 "$CODES")
sed -i 1d "$CODES"
case $code in
  137) kill -KILL $$ ;;
  139) kill -SEGV $$ ;;
esac
exit "$code"
"""
# Ends by SIGTERM alone, as after a save.
PATIENT = """#!/bin/bash
trap 'exit 143' TERM
echo "start" >>"$STARTS"
while true; do /bin/sleep 0.05; done
"""


class Loop(Launch):
    def __init__(self, root):
        super().__init__(root)
        self.codes, self.starts_file = root / "codes", root / "starts"
        self.env |= {"CODES": str(self.codes), "STARTS": str(self.starts_file)}
        self.tool(self.bin / "trainer", TRAINER)
        self.tool(self.bin / "python", PATIENT)
        self.tool(self.bin / "sleep", '#!/bin/bash\necho "$@" >>"$STARTS.pauses"\n')

    def starts(self) -> int:
        return self.starts_file.read_text().count("start")

    def wait_for_start(self) -> None:
        end = time.monotonic() + 30
        while not self.starts_file.exists() and time.monotonic() < end:
            time.sleep(0.02)

    def ends(self, *codes: int, **env: str) -> tuple[int, int]:
        """(starts, exit code) of a loop over a trainer that ends with the codes, one by one."""
        self.codes.write_text("".join(f"{code}\n" for code in codes))
        self.starts_file.unlink(missing_ok=True)
        done = self.bash("restart.sh", "trainer", "x", **env)
        return self.starts(), done.returncode

    def pauses(self) -> list[int]:
        file = self.starts_file.with_name("starts.pauses")
        return [int(line) for line in file.read_text().split()]


@pytest.fixture
def loop(tmp_path) -> Loop:
    return Loop(tmp_path)


def test_what_may_pass_is_started_again(loop):
    codes = (1, 7, 134, 137, 139, 143, 144, 0)
    assert loop.ends(*codes) == (len(codes), 0)


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 6, 8, 127, 130])
def test_what_would_come_again_is_the_end(loop, code):
    assert loop.ends(code, 0) == (1, code)


def test_the_limit_and_the_pauses(loop):
    assert loop.ends(*[7] * 20) == (11, 7)
    assert loop.pauses() == [5, 10, 20, 40, 60, 60, 60, 60, 60, 60]
    assert loop.ends(*[143] * 20, RESTART_LIMIT="2") == (3, 143)
    assert loop.ends(*[1] * 20, RESTART_LIMIT="0") == (1, 1)


def test_a_start_that_lasted_begins_the_count_anew(loop):
    # Every start counts as one that lasted.
    codes = [1] * 5 + [0]
    assert loop.ends(*codes, RESTART_LIMIT="1", RESTART_RESET="0") == (6, 0)
    assert loop.pauses() == [5] * 5


def test_the_result_is_kept(loop, tmp_path):
    result = tmp_path / "result"
    loop.ends(1, 4, RESTART_RESULT=str(result))
    assert result.read_text() == "4\n"


def test_a_dry_run_starts_nothing(loop):
    loop.codes.write_text("0\n")
    done = loop.bash("restart.sh", "--dry_run", "trainer", "a b")
    assert done.stdout == "trainer a\\ b\n"
    assert not loop.starts_file.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_trainer_and_ends_the_loop(loop, number):
    trainer = loop.bin / "python"
    loop.tool(trainer, PATIENT.replace("TERM", number.name.removeprefix("SIG")))
    process = subprocess.Popen(
        ["bash", "launch/restart.sh", str(trainer)],
        cwd=loop.root,
        env=loop.env,
        # What is ignored when a shell starts stays so, as SIGHUP under nohup.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    loop.wait_for_start()
    process.send_signal(number)
    assert process.wait(timeout=30) == 143
    assert loop.starts_file.read_text() == "start\n"


def test_a_signal_during_the_pause_ends_the_loop(loop):
    loop.tool(loop.bin / "sleep", '#!/bin/bash\necho >"$STARTS.pauses"\nexec /bin/sleep 60\n')
    loop.codes.write_text("7\n0\n")
    process = subprocess.Popen(
        ["bash", "launch/restart.sh", "trainer"],
        cwd=loop.root,
        env=loop.env,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    while not loop.starts_file.with_name("starts.pauses").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 143
    assert "asked to stop" in errors
    assert loop.starts() == 1


@pytest.mark.parametrize(("code", "again"), [(143, True), (7, True), (0, False), (2, False)])
def test_a_slurm_job_goes_back_to_the_queue(loop, code, again):
    loop.tool(loop.bin / "srun", f'#!/bin/bash\necho "$@" >>"$STARTS"\nexit {code}\n')
    done = loop.bash("slurm.sbatch", "python", "-m", "x", SLURM_JOB_ID="17")
    assert done.returncode == code
    ran = "--kill-on-bad-exit=0 launch/restart.sh python -m x\n"
    assert loop.starts_file.read_text() == ran
    assert loop.calls() == ([["scontrol", "requeue", "17"]] if again else [])
    done = loop.bash("slurm.sbatch", "x", SLURM_JOB_ID="17", SLURM_RESTART_COUNT="100")
    assert loop.calls() == []
