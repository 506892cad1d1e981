"""Devices that are not there, to compile for: TPU slices by name, and simulated CPU devices."""

import contextlib
import dataclasses
import difflib
import importlib.util
import math
import os
import re
from typing import Any

from deltares_jax.parallel.chips import CHIPS, Chip

_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x"}
_MAX_CPUS = 1024  # simulated devices: jax takes minutes to make many more
_KNOWN = f"{', '.join(CHIPS)} as v5p:4x4x4 or v5p-128, and cpu:8"

# libtpu looks for chips and for the cloud's metadata; a plan wants neither, and must not wait for
# a training process that holds the chips.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """What to compile for.

    name: as libtpu writes it, or `cpu:8`. kind: `cpu`, or the chip's name. chip: None for CPUs.
    shape: chips along the axes of their network.
    """

    name: str
    kind: str
    chip: Chip | None
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """Chips; for CPUs the simulated devices."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        if self.chip is None:
            return f"{self.num_chips} simulated CPU devices"
        several = f" of {self.chip.devices} devices" if self.chip.devices > 1 else ""
        return f"{self.num_chips} {self.kind} chips{several}"

    @property
    def platform(self) -> str:
        """What jax calls the platform of its devices."""
        return "tpu" if self.chip else "cpu"

    @property
    def devices_per_chip(self) -> int:
        """Devices of a chip, as jax counts them."""
        return self.chip.devices if self.chip else 1

    @property
    def notes(self) -> list[str]:
        """What to say of a shape that libtpu compiles for, but that may not be for hire."""
        if self.chip is None or self.shape in self.chip.slices:
            return []
        return [
            f"{self.name} is not one of the slices listed for {self.kind} ({_slices(self.chip)})"
        ]

    @property
    def links(self) -> int:
        """Links of a chip that lead to others.

        An axis wraps around at 16 chips on two-dimensional networks, at multiples of 4 on others.
        """
        wraps = [n == 16 if len(self.shape) == 2 else n % 4 == 0 for n in self.shape]
        return sum((1 + wrap) * (n > 1) for n, wrap in zip(self.shape, wraps, strict=True))

    @property
    def memory_limit(self) -> int:
        """Bytes that a program may use on a chip; a simulated device has its share of the host."""
        return int(self.chip.hbm_bytes) if self.chip else host_memory() // self.num_chips


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def parse(name: str) -> Topology:
    """A topology by libtpu's name (`v5p:4x4x4`), by accelerator type (`v5p-128`), or `cpu:8`.

    Raises:
      ValueError: the name is unknown; says what is known and what is nearest.
    """
    text = name.strip().lower()
    match = re.fullmatch(r"(\w+?)(?::(\d+(?:x\d+)*)|-(\d+))", text)
    kind = _ALIASES.get(match[1], match[1]) if match else ""
    if match and kind == "cpu" and match[2] and match[2].isdigit() and int(match[2]) > 0:
        if int(match[2]) > _MAX_CPUS:
            raise ValueError(f"--topology={name}: at most {_MAX_CPUS} CPU devices are simulated")
        return Topology(text, kind, None, (int(match[2]),))
    if not match or kind not in CHIPS:
        near = _meant(text) or difflib.get_close_matches(text, _names(), 1, 0.6)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"--topology={name}: known are {_KNOWN}{hint}")
    chip = CHIPS[kind]
    if match[2]:
        shape = tuple(int(n) for n in match[2].split("x"))
        largest = sorted(chip.slices[-1])
        fits = len(shape) == len(largest) and all(
            0 < n <= most for n, most in zip(sorted(shape), largest, strict=True)
        )
        # Hosts hold 2 × 2 chips.
        if not fits or (shape not in chip.slices and (shape[0] % 2 or shape[1] % 2)):
            raise ValueError(_refusal(name, chip, math.prod(shape)))
    else:
        size = int(match[3])
        found = [s for s in chip.slices if math.prod(s) * chip.name_unit == size]
        if not found:
            raise ValueError(_refusal(name, chip, size // chip.name_unit))
        shape = found[0]
    return Topology(f"{kind}:{'x'.join(map(str, shape))}", kind, chip, shape)


def _meant(text: str) -> list[str]:
    """Corrections that no likeness of letters finds."""
    if match := re.fullmatch(r"cpus?[-_=x]?(\d+)", text):
        return [f"cpu:{match[1]}"]
    if match := re.fullmatch(r"(?:tpu)?[-_]?v?7x?(:\d+(?:x\d+)*|-\d+)", text):
        return [f"tpu7x{match[1]}"]
    return []


def _slices(chip: Chip) -> str:
    return ", ".join("x".join(map(str, shape)) for shape in chip.slices)


def _spellings(chip: Chip, shape: tuple[int, ...]) -> tuple[str, str]:
    """A slice by shape and by accelerator type."""
    return (
        f"{chip.name}:{'x'.join(map(str, shape))}",
        f"{chip.name}-{math.prod(shape) * chip.name_unit}",
    )


def _names() -> list[str]:
    return [name for c in CHIPS.values() for shape in c.slices for name in _spellings(c, shape)]


def _refusal(name: str, chip: Chip, num_chips: int) -> str:
    nearest = min(chip.slices, key=lambda shape: abs(math.prod(shape) - num_chips))
    by_shape, by_type = _spellings(chip, nearest)
    nearest_text = f"nearest: {by_shape}, which is {by_type}"
    return f"--topology={name}: {chip.name} slices are {_slices(chip)}; {nearest_text}"


def devices(topology: Topology) -> list[Any]:
    """The jax devices of a topology; TPUs can be compiled for, not run on.

    Call it before jax has started: it keeps jax from looking for accelerators.

    Raises:
      ValueError: libtpu is missing or does not offer the topology, or jax has started with fewer
        CPU devices.
    """
    import jax  # names are checked without it

    jax.config.update("jax_platforms", "cpu")
    if topology.chip is None:
        with contextlib.suppress(RuntimeError):  # jax has started
            if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
                jax.config.update("jax_num_cpu_devices", topology.num_chips)
        found = jax.devices("cpu")
        if len(found) < topology.num_chips:
            raise ValueError(
                f"--topology={topology.name}: jax has started with {len(found)} CPU devices; unset "
                "XLA_FLAGS, or ask for fewer"
            )
        return found[: topology.num_chips]
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"--topology={topology.name} needs libtpu: pip install -e '.[tpu]'")
    for key, value in _LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    options: dict[str, Any] = dict(topology.chip.topology_options)
    if topology.num_chips == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        described = topologies.get_topology_desc(topology.name, "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--topology={topology.name}: libtpu refuses it: {reason}") from None
    return list(described.devices)
