"""The search for the largest batch that fits."""

import pytest

from deltares_jax import config as config_lib
from deltares_jax.parallel import topology
from deltares_jax.training import planning, programs

CPU8 = topology.parse("cpu:8")


@pytest.mark.parametrize("answer", [0, 1, 2, 7, 8, 30])
@pytest.mark.parametrize("guess", [1, 3, 8, 30])
def test_search_finds_the_largest_from_any_guess(guess, answer):
    tried = []

    def fits(count):
        tried.append(count)
        return count <= answer

    assert planning.largest(fits, guess, 30) == answer
    assert len(tried) == len(set(tried)) <= 10
    assert set(tried) >= {n for n in (answer, answer + 1) if 1 <= n <= 30}


@pytest.mark.parametrize(
    ("limit", "extra", "largest"),
    [(399, 0, 8), (1000, 0, 56), (1000, 1, 48), (1199, 1, 64), (1199, -300, 88), (599, 300, 8)],
)
def test_the_batch_that_is_found_is_the_largest(tiny, monkeypatch, limit, extra, largest):
    """A device needs 300 bytes, and 100 for every 8 rows; compiled in full, `extra` more."""
    tries = []

    def needed(config, quick):
        return 300 + 100 * config.train.batch_size // 8 + (0 if quick else extra)

    def make(config, topology, say):
        total = needed(config, quick=False)
        memory = {"total": total}
        return {
            "fits": total <= limit,
            "batch": config.train.batch_size,
            "hbm_bytes_per_chip": memory,
        }

    monkeypatch.setattr(planning, "compile_step", lambda config, mesh, quick: needed(config, quick))
    monkeypatch.setattr(planning, "make", make)
    monkeypatch.setattr(programs, "peak_bytes", lambda compiled, platform: compiled)
    monkeypatch.setattr(topology, "host_memory", lambda: limit * 8)
    report = planning.find_batch(config_lib.resolve(tiny), CPU8, tries.append)
    assert report["batch"] == largest
    assert report["fits"] == (limit >= 400 + extra)
    assert tries[0].startswith("batch 8: ")
    assert any(line.startswith(f"batch {largest}: ") and "in full" in line for line in tries)
