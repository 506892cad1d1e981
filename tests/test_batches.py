"""Batches: pure functions of a seed and a position, for any number of processes."""

import itertools
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from data_helpers import flat, take

from deltares_jax.data import pipeline
from deltares_jax.data.rows import Rows
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import sharding


def batches_of(rows, seed: int, batch_size: int, rows_seen: int, **kwargs):
    """Training batches of one source."""
    order = pipeline.Order([len(rows)], [1], seed)
    return pipeline.train_batches([rows], order, batch_size, rows_seen, **kwargs)


# --- training batches


def numbered(count: int) -> list[dict[str, np.ndarray]]:
    return [{"row": np.int32(i)} for i in range(count)]


@pytest.mark.parametrize("seen", [8, 16, 3, 19, 20, 21, 43, 80])
def test_batches_depend_on_the_position_alone(seen):
    """20 rows and batches of 8: also within a batch and across the ends of epochs."""
    rows = numbered(20)
    order = flat(take(batches_of(rows, 7, 8, 0), 15))
    resumed = take(batches_of(rows, 7, 8, seen), 4)
    assert [batch["row"].shape for batch in resumed] == [(8,)] * 4
    assert flat(resumed) == order[seen : seen + 32]


def test_other_batch_size_goes_on_with_the_same_rows():
    rows = numbered(20)
    order = flat(take(batches_of(rows, 7, 1, 0), 66))
    first = flat(take(batches_of(rows, 7, 8, 0), 3))
    second = flat(take(batches_of(rows, 7, 3, 24), 4))
    third = flat(take(batches_of(rows, 7, 30, 36), 1))  # more than an epoch
    assert first + second + third == order


def test_epochs_are_permutations_by_seed():
    rows = numbered(103)
    order = flat(take(batches_of(rows, 7, 8, 0), 39))
    epochs = [order[i : i + 103] for i in (0, 103, 206)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(103))] * 3
    other = flat(take(batches_of(rows, 8, 8, 0), 13))[:103]
    orders = {tuple(order) for order in [*epochs, other, range(103)]}
    assert len(orders) == 5


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_data_shards_train_on_every_token_once(tiny, shards):
    """One epoch of consecutive numbers, as the devices get it."""
    rows = Rows(np.arange(32 * 16 + 1), 16, end_of_text=10**6)
    devices = jax.devices()[:shards]
    mesh = mesh_lib.make_mesh(mesh_lib.mesh_shape(tiny.mesh, shards), devices)
    seen = {device: [] for device in devices}
    for batch in take(batches_of(rows, 0, 8, 0), 4):
        placed = jax.device_put(batch["targets"], sharding.batch_sharding(mesh))
        for shard in placed.addressable_shards:
            assert shard.data.shape == (8 // shards, 16)
            seen[shard.device] += np.asarray(shard.data).ravel().tolist()
    assert sorted(itertools.chain.from_iterable(seen.values())) == list(range(1, 32 * 16 + 1))


# --- evaluation batches


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_evaluation_rows_are_the_first_in_order_whatever_the_batch(count, batch_size):
    rows = Rows(np.arange(200), 16, end_of_text=10**6)
    batches = list(pipeline.eval_batches(rows, count, batch_size))
    assert len(batches) == math.ceil(count / batch_size)
    for batch in batches:
        assert {value.shape for value in batch.values()} == {(batch_size, 16)}
    for key in ("inputs", "targets", "weights", "segments", "positions"):
        merged = np.concatenate([batch[key] for batch in batches])
        np.testing.assert_array_equal(merged[:count], [rows[i][key] for i in range(count)])
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert weights[:count].all()
    assert not weights[count:].any()
    for batch, again in zip(batches, pipeline.eval_batches(rows, count, batch_size), strict=True):
        for key, value in batch.items():
            np.testing.assert_array_equal(value, again[key])


# --- shares of processes


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("seen", [0, 3, 37])
def test_processes_read_the_parts_of_the_batch_that_one_would(processes, seen):
    rows = numbered(20)
    whole = take(batches_of(rows, 7, 8, seen), 6)
    shares = [
        take(batches_of(rows, 7, 8, seen, process=i, processes=processes), 6)
        for i in range(processes)
    ]
    for step, batch in enumerate(whole):
        parts = [share[step]["row"] for share in shares]
        assert {part.shape for part in parts} == {(8 // processes,)}
        np.testing.assert_array_equal(np.concatenate(parts), batch["row"])


@pytest.mark.parametrize("processes", [1, 4])
def test_other_number_of_processes_goes_on_with_the_rows_that_are_left(processes):
    """Two processes to step 5, then one or four."""
    rows = numbered(96)
    before = [flat(take(batches_of(rows, 7, 8, 0, process=i, processes=2), 5)) for i in (0, 1)]
    after = [
        flat(take(batches_of(rows, 7, 8, 40, process=i, processes=processes), 7))
        for i in range(processes)
    ]
    assert sorted(itertools.chain(*before, *after)) == list(range(96))


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_an_epoch_is_all_rows_once_over_the_processes(shards):
    rows = numbered(24 * 5)
    seen = [
        flat(take(batches_of(rows, 7, 24, 0, process=i, processes=shards), 5))
        for i in range(shards)
    ]
    assert sorted(itertools.chain.from_iterable(seen)) == list(range(120))


def test_processes_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="batch of 8 sequences must be a multiple of the 3 proc"):
        batches_of(numbered(20), 7, 8, 0, processes=3)


@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_evaluate_the_rows_that_one_would(count, processes):
    rows = Rows(np.arange(200), 16, end_of_text=10**6)
    whole = list(pipeline.eval_batches(rows, count, 4))
    shares = [list(pipeline.eval_batches(rows, count, 4, i, processes)) for i in range(processes)]
    assert {len(share) for share in shares} == {len(whole)}  # nobody waits for another
    for batch, *parts in zip(whole, *shares, strict=True):
        weights = np.concatenate([part["weights"] for part in parts])
        np.testing.assert_array_equal(weights, batch["weights"])
        targets = np.concatenate([part["targets"] for part in parts])
        real = weights > 0
        np.testing.assert_array_equal(targets[real], batch["targets"][real])


READER = """
import hashlib, sys
import numpy as np
from deltares_jax.data import pipeline
from deltares_jax.data.rows import Rows
process, processes, seen = map(int, sys.argv[1:])
rows = Rows(np.arange(103 * 16 + 1), 16, end_of_text=10**6)
order = pipeline.Order([len(rows)], [1], 5)
batches = pipeline.train_batches([rows], order, 8, seen, process, processes)
for _ in range(20):  # over the end of the epoch
    print(*(int(i) for i in next(batches)["targets"][:, 0]))
"""


def test_two_real_processes_feed_what_one_would():
    def lines(*arguments: int) -> list[list[str]]:
        command = [sys.executable, "-c", READER, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return [line.split() for line in result.stdout.splitlines()]

    one, first, second = lines(0, 1, 16), lines(0, 2, 16), lines(1, 2, 16)
    assert [a + b for a, b in zip(first, second, strict=True)] == one
    assert len({cell for line in one[:10] for cell in line}) == 80


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_worker_processes_neither_lose_nor_reorder_rows(workers):
    rows = Rows(np.arange(103 * 16 + 1), 16, end_of_text=10**6)
    alone = take(batches_of(rows, 7, 8, 40), 13)
    together = take(batches_of(rows, 7, 8, 40, workers=workers), 13)
    assert flat(together, "targets") == flat(alone, "targets")


# --- mixtures and the end of the data


def test_mixture_gives_each_source_its_share_and_loses_no_row():
    sources = [[{"row": np.int32(1000 * s + i)} for i in range(20)] for s in range(3)]
    order = pipeline.Order([20, 20, 20], [0.5, 0.3, 0.2], 7)
    drawn = flat(take(pipeline.train_batches(sources, order, 10, 0), 20))
    for k in range(10, 201, 10):  # everywhere, not only in the end
        counts = np.bincount(np.array(drawn[:k]) // 1000, minlength=3)
        np.testing.assert_allclose(counts, np.array([0.5, 0.3, 0.2]) * k, atol=1.01)
    for source, share in enumerate([100, 60, 40]):
        own = [row - 1000 * source for row in drawn if row // 1000 == source]
        assert len(own) == share
        epochs = [own[i : i + 20] for i in range(0, share, 20)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * (share // 20)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    resumed = flat(take(pipeline.train_batches(sources, order, 7, 33), 10))
    assert resumed == drawn[33:103]
    halves = [flat(take(pipeline.train_batches(sources, order, 4, 8, i, 2), 3)) for i in range(2)]
    joined = [row for i in range(3) for half in halves for row in half[2 * i : 2 * i + 2]]
    assert joined == drawn[8:20]


@pytest.mark.parametrize(
    ("weights", "whole"), [([1.0], [1]), ([0.7, 0.3], [7, 3]), ([2, 6, 4], [1, 3, 2])]
)
def test_weights_are_proportions(weights, whole):
    assert pipeline.whole_weights(weights) == whole


def test_rows_end_where_the_data_does_without_repeat():
    order = pipeline.Order([20], [1], 7, repeat=False)
    assert len(order) == 20
    batches = list(pipeline.train_batches([numbered(20)], order, 8, 0))
    assert len(batches) == 2
    endless = flat(take(batches_of(numbered(20), 7, 8, 0), 2))
    assert flat(batches) == endless
    shares = [list(pipeline.train_batches([numbered(20)], order, 8, 0, i, 2)) for i in (0, 1)]
    assert [len(share) for share in shares] == [2, 2]  # no process waits for another
    assert not list(pipeline.train_batches([numbered(20)], order, 8, 16))


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [([20, 12], [1, 1]), ([20, 12], [5, 3]), ([7, 100, 3], [1, 9, 0.3]), ([5, 1], [1, 1e-5])],
)
def test_mixture_without_repeat_ends_where_a_source_does(sizes, weights):
    order = pipeline.Order(sizes, weights, 7, repeat=False)
    drawn = [order[k] for k in range(len(order))]
    assert len(set(drawn)) == len(drawn)  # no row twice
    endless = pipeline.Order(sizes, weights, 7)
    assert [endless[k] for k in range(len(order))] == drawn
    source, _ = endless[len(order)]  # it would begin a second epoch
    assert sum(1 for s, _ in drawn if s == source) == sizes[source]
    counts = [sum(1 for s, _ in drawn if s == i) for i in range(len(sizes))]
    assert order.seen(len(order)) == counts


HOLDER = """
import numpy as np
from deltares_jax.data import pipeline
from deltares_jax.data.rows import Rows
def read():
    rows = Rows(np.arange(103 * 16 + 1), 16, end_of_text=10**6)
    batches = pipeline.train_batches([rows], pipeline.Order([len(rows)], [1], 5), 8, 0, workers=1)
    yield from (next(batches) for _ in range(3))
    batches.close()
held = list(read())  # to the end, as a device array may
print(len(held))
"""


def test_worker_processes_leave_nothing_behind():
    command = [sys.executable, "-c", HOLDER]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (result.stdout, result.stderr) == ("3\n", "")


def test_worker_processes_end_with_their_parent_however_it_is_killed(tmp_path):
    code = (
        HOLDER.replace("    batches.close()\n", "")
        .replace(
            "print(len(held))",
            "import multiprocessing, os\n"
            "print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
            "os.kill(os.getpid(), 9)",
        )
        .replace("held = list(read())", "held = next(read_on := read())")
    )
    with (tmp_path / "printed").open("w+") as printed:  # a pipe would wait for the worker
        subprocess.run([sys.executable, "-c", code], stdout=printed, timeout=120)
        (child,) = map(int, (tmp_path / "printed").read_text().split())
    for _ in range(300):
        if not pathlib.Path(f"/proc/{child}").exists():
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        raise AssertionError("the worker went on alone")
