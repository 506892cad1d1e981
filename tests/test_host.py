"""Memory that programs on the CPU use again in every step."""

import os
import platform
import subprocess
import sys

import pytest

# 16 arrays of 16 MiB live at once, and none is left at the end.
SCRIPT = """
import resource

import jax
import jax.numpy as jnp

from deltares_jax import config as config_lib
from deltares_jax.parallel import mesh as mesh_lib


def work(x):
    parts = jax.lax.optimization_barrier([jnp.sin(x + i) for i in range(16)])
    return sum(part.sum() for part in parts)


[device] = mesh_lib.find_devices(config_lib.resolve(config_lib.default()))
x = jax.device_put(jnp.ones((2048, 2048)), device)
compiled = jax.jit(work)
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    compiled(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_a_step_finds_its_memory_where_the_last_one_left_it():
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # one device
    line = [sys.executable, "-c", SCRIPT]
    out = subprocess.run(line, capture_output=True, text=True, check=True, env=env).stdout
    pages_of_one_array = 2**24 // 4096
    assert int(out) < pages_of_one_array
