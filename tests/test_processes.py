"""Runs of several real processes: what they agree on, stops, losses."""

import os
import signal

import pytest
from process_helpers import Process, free_port, group, member
from run_helpers import log, newest


def arguments(tmp_path, steps, *more):
    return (
        f"--workdir={tmp_path}/run",
        f"--config.train.steps={steps}",
        "--config.checkpoint.every=4",
        "--config.eval.every=5",
        *more,
    )


def test_signal_to_one_process_stops_all_at_the_same_step(tmp_path):
    """The second gets SIGTERM: both save the same step."""
    both = group(2, *arguments(tmp_path, 100_000))
    both[0].wait_for("step")
    both[1].send(signal.SIGTERM)
    assert [process.end() for process in both] == [143, 143], [p.errors for p in both]
    assert "stopped by a signal to another process after step" in both[0].error
    assert "stopped by SIGTERM after step" in both[1].error
    assert both[0].error.split("step")[-1] == both[1].error.split("step")[-1]
    assert not [line for line in both[1].lines if "Gloo" not in line]  # one tells
    at, meta = newest(tmp_path / "run")
    assert meta["rows_seen"] == 8 * at
    assert sorted(log(tmp_path / "run")[0]) == list(range(1, at + 1))


def test_workdirs_configs_and_ids_that_differ_are_noticed_before_the_first_step(tmp_path):
    port = free_port()
    pair = [
        member(0, 2, port, *arguments(tmp_path, 5)),
        member(1, 2, port, *arguments(tmp_path, 5, "--config.optim.learning_rate=2e-3")),
    ]
    assert [process.end() for process in pair] == [2, 2], [p.errors for p in pair]
    for process in pair:
        assert "process 1 differs from process 0 in optim.learning_rate: 0.001 → 0.002" in (
            process.error
        )
    port = free_port()
    pair = [member(i, 2, port, *arguments(tmp_path / str(i), 5)) for i in (0, 1)]
    assert [process.end() for process in pair] == [2, 2], [p.errors for p in pair]
    for process in pair:
        assert f"process 1 does not see in {tmp_path}/1/run" in process.error
        assert "all processes need the same shared folder" in process.error


@pytest.mark.slow
def test_process_that_is_killed_ends_the_other_and_the_run_goes_on(tmp_path):
    straight = group(2, *arguments(tmp_path / "straight", 60))
    assert [process.end() for process in straight] == [0, 0], [p.errors for p in straight]

    limit = "--config.distributed.heartbeat=10"
    both = group(2, *arguments(tmp_path, 60, limit))
    both[0].wait_for("step")
    both[1].send(signal.SIGKILL)
    assert both[0].end(timeout=20) == 7, both[0].errors
    assert "error: process 1 (" in both[0].error
    assert "is lost" in both[0].error
    both[1].end()

    assert max(log(tmp_path / "run")[0]) < 60
    again = group(2, *arguments(tmp_path, 60))
    for process in again:
        assert process.end() == 0, process.errors
    assert log(tmp_path / "run") == log(tmp_path / "straight" / "run")


@pytest.mark.slow
def test_run_goes_on_with_another_number_of_processes(tmp_path):
    """Two, one, two, four: the same rows, the next losses to 1e-6."""
    whole = group(2, *arguments(tmp_path / "whole", 24))
    assert [process.end() for process in whole] == [0, 0], [p.errors for p in whole]
    for count, steps in ((2, 6), (1, 12), (2, 18), (4, 24)):
        if count == 1:
            processes = [Process(*arguments(tmp_path, steps), devices=2)]
        else:
            processes = group(count, *arguments(tmp_path, steps))
        assert {process.end() for process in processes} == {0}, [p.errors for p in processes]
        assert newest(tmp_path / "run")[1]["rows_seen"] == 8 * steps
    parts, straight = log(tmp_path / "run")[0], log(tmp_path / "whole" / "run")[0]
    assert sorted(parts) == sorted(straight)
    for step, row in straight.items():
        assert parts[step]["loss"] == pytest.approx(row["loss"], rel=1e-6)
        for name in ("learning_rate", "tokens_seen"):
            assert parts[step][name] == row[name]


@pytest.mark.slow
def test_step_of_which_one_process_cannot_read_its_part_is_skipped_by_both(tmp_path):
    both = group(2, *arguments(tmp_path, 8))
    assert [process.end() for process in both] == [0, 0], [p.errors for p in both]
    arrays = (tmp_path / "run" / "checkpoints" / "8" / "state").rglob("*")
    largest = max((p for p in arrays if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, 100)
    both = group(2, *arguments(tmp_path, 10))
    assert [process.end() for process in both] == [0, 0], [p.errors for p in both]
    assert f"{tmp_path}/run: resumed at step 4" in both[0].lines
    assert sorted(log(tmp_path / "run")[0]) == list(range(1, 11))
    assert (tmp_path / "run" / "damaged" / "8").is_dir()
