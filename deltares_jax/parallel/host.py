"""How this process runs programs on the CPU, and holds memory for them."""

import ctypes

import jax

# Of mallopt(3) in glibc: the size from which memory is mapped on its own, and given back at once;
# and how much may lie free at the end of the heap.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1


def run_in_caller() -> None:
    """Lets programs on the CPU run in the thread that starts them; before JAX starts its devices.

    Their temporary arrays then come from the heap of the main thread, which `keep_freed_memory`
    can make last; those of other threads are mapped anew in every step.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def keep_freed_memory() -> None:
    """Keeps what a step has freed for the next one.

    Else every page of a step's temporary arrays is mapped, cleared and unmapped again: of a step
    of the debug recipe a third. Without glibc nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
