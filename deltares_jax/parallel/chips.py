"""Accelerators by name: peak, memory, network, compiler options. Free of jax.

Public figures, a chip each, unless said otherwise.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of chip.

    device_kinds: what jax calls its devices. devices: those of a chip, as jax counts them; they
      share its figures evenly. cores: tensor cores of a device.
    peak_flops: bfloat16 FLOP/s. flops_per_cycle: of all matrix units, 2 a multiply-add.
    hbm_bytes: of all devices, what the compiler lets a program use, read from its refusals.
    hbm_bandwidth: bytes/s. link_bandwidth: bytes/s of one link in one direction, 0.9 of the public
      figure; links: to neighbouring chips.
    slices: shapes that can be booked, in chips, smallest first. name_unit: what `v5p-128` counts,
      chips (1) or cores (2 a chip). topology_options: what libtpu needs to know besides the shape.
    splash: head_dim → bundles of the final schedules of the splash attention kernels (forward, dkv,
      dq) for 512 × 512 scores on one core.
    compiler_options: those that programs are compiled with.
    """

    name: str
    device_kinds: tuple[str, ...]
    devices: int
    cores: int
    peak_flops: float
    flops_per_cycle: int
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    links: int
    slices: tuple[tuple[int, ...], ...]
    name_unit: int
    splash: dict[int, tuple[int, int, int]]
    topology_options: dict[str, str] = dataclasses.field(default_factory=dict)
    compiler_options: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def clock(self) -> float:
        """Cycles per second at which the matrix units reach the peak."""
        return self.peak_flops / self.flops_per_cycle


_GIB = 2**30

_GRIDS = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = (
    *((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8)),
    *((8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16), (16, 16, 24)),
)

# Bundles: an estimate from below for stalls, from above for the branches of first and last blocks.
_SPLASH_V5P = {128: (2141, 2385, 1832), 64: (2160, 2462, 1869)}
_SPLASH_V6E = {128: (1474, 1764, 1387), 64: (1350, 1730, 1389)}

# Measured on the 1b baseline (v5e 4x4, 8 × 2048 tokens a chip) and the 7b baseline (v5p 4x4x4, 4 ×
# 2048), remat full, libtpu 0.0.42.1, by the compiler's cycles without kernels. Tried on 1b without
# effect: fusion of asynchronous collectives, layouts for reduce-scatter, overlap of data-parallel
# reductions, experimental schedulers.
#
# No loops of matmuls and permutes in place of gathered weights: 1b 3885 → 1936 Mcycles, peak 4.01 →
# 3.71 GiB; 7b the same with and without. With low effort 1b is faster on every chip.
_WHOLE_MATMULS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# More scratch memory for fusions: 1b on v5e 1936 → 1836 Mcycles, 7b on v5p 2742 → 2319, same peaks.
_SCRATCH = {"xla_tpu_scoped_vmem_limit_kib": "32768"}

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v4",
            device_kinds=("TPU v4",),
            devices=1,
            cores=2,
            peak_flops=275e12,
            flops_per_cycle=8 * 128 * 128 * 2,
            hbm_bytes=30.75 * _GIB,
            hbm_bandwidth=1228e9,
            link_bandwidth=45e9,
            links=6,
            slices=_CUBES,
            name_unit=2,
            splash=_SPLASH_V5P,  # not read for this chip; the nearest has the same matrix units
            topology_options={"chip_config_name": "megacore"},  # one device of two cores
            compiler_options=_WHOLE_MATMULS,
        ),
        Chip(
            "v5e",
            device_kinds=("TPU v5 lite", "TPU v5e"),
            devices=1,
            cores=1,
            peak_flops=197e12,
            flops_per_cycle=4 * 128 * 128 * 2,
            hbm_bytes=15.75 * _GIB,
            hbm_bandwidth=819e9,
            link_bandwidth=45e9,
            links=4,
            slices=_GRIDS,
            name_unit=1,
            splash={128: (1882, 2293, 1751), 64: (1782, 2399, 1740)},
            compiler_options=_WHOLE_MATMULS | _SCRATCH,
        ),
        Chip(
            "v5p",
            device_kinds=("TPU v5", "TPU v5p"),
            devices=1,
            cores=2,
            peak_flops=459e12,
            flops_per_cycle=8 * 128 * 128 * 2,
            hbm_bytes=95.74 * _GIB,
            hbm_bandwidth=2765e9,
            link_bandwidth=90e9,
            links=6,
            slices=_CUBES,
            name_unit=2,
            splash=_SPLASH_V5P,
            compiler_options=_WHOLE_MATMULS | _SCRATCH,
        ),
        Chip(
            "v6e",
            device_kinds=("TPU v6 lite", "TPU v6e"),
            devices=1,
            cores=1,
            peak_flops=918e12,
            flops_per_cycle=4 * 256 * 256 * 2,
            hbm_bytes=31.25 * _GIB,
            hbm_bandwidth=1640e9,
            link_bandwidth=90e9,
            links=4,
            slices=_GRIDS,
            name_unit=1,
            splash=_SPLASH_V6E,
            compiler_options=_WHOLE_MATMULS,
        ),
        Chip(
            "tpu7x",
            device_kinds=("TPU7x", "TPU v7x"),
            devices=2,
            cores=1,
            peak_flops=2307e12,
            flops_per_cycle=8 * 256 * 256 * 2,  # 2 cores × 4 units: 2.2 GHz
            hbm_bytes=2 * 94.75 * _GIB,
            hbm_bandwidth=7370e9,
            link_bandwidth=180e9,
            links=6,
            slices=_CUBES,
            name_unit=2,
            splash=_SPLASH_V6E,  # not read for this chip; the nearest has the same matrix units
            compiler_options=_WHOLE_MATMULS,
        ),
    )
}


def by_device_kind(kind: str) -> Chip | None:
    """The chip whose devices jax calls `kind`; None for CPUs, GPUs and unknown ones."""
    return next((chip for chip in CHIPS.values() if kind in chip.device_kinds), None)
