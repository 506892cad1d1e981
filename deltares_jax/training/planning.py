"""Plans: the real train step compiled for devices that are not there, and what it tells."""

import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
from ml_collections.config_dict.config_dict import ConfigDict, FrozenConfigDict

from deltares_jax import config_checks
from deltares_jax.models import depth, sizes, variants
from deltares_jax.parallel import fit, hlo_cost
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import topology as topology_lib
from deltares_jax.parallel.topology import Topology
from deltares_jax.training import programs

Report = dict[str, Any]
Say = Callable[[str], None]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REQUIRED = re.compile(r"(?:required for HLO temporaries \(|Used )([\d.]+)([KMGT]?)")


# Keys of a plan that only a compiled program tells, and only one for chips with a price.
_WORK = ("compiled_flops", "collective_bytes", "collective_counts", "unpriced_kernels")
_TIMES = (
    *("compute_cycles", "copy_cycles", "kernel_cycles", "work_cycles"),
    *("estimated_step_seconds", "tokens_per_second_per_chip", "mfu"),
)


class DoesNotFitError(Exception):
    """The compiler refused the program; `needed` is what it would take, in bytes a device."""

    def __init__(self, needed: float):
        super().__init__(needed)
        self.needed = needed


def with_values(config: FrozenConfigDict, values: dict[str, Any]) -> FrozenConfigDict:
    """The config with other values of dotted keys."""
    changed = ConfigDict(config.to_dict())
    changed.update_from_flattened_dict(values)
    return FrozenConfigDict(changed)


def lay_out(config: FrozenConfigDict, topology: Topology) -> tuple[Any, FrozenConfigDict]:
    """The mesh, and the config with an evaluation batch that it divides: only training is planned.

    Raises:
      ValueError: the topology is not on offer here, or the config does not work on it.
    """
    asked = config.train.platform
    if asked not in ("", topology.platform):
        raise ValueError(
            f"train.platform={asked} does not go with --topology={topology.name}, which is of "
            f"{topology.platform}; train would refuse to start there"
        )
    devices = topology_lib.devices(topology)
    shape = mesh_lib.mesh_shape(config.mesh, len(devices), "of the topology")
    parts = fit.data_parallel_size(shape)
    size = -(-config.eval.batch_size // parts) * parts
    config = with_values(config, {"eval.batch_size": size})
    fit.check_fits(config, shape, str(topology))
    # Refuses what cannot run there.
    programs.for_platform(config, devices[0].platform, shape["tensor"])
    mesh = mesh_lib.make_mesh(shape, devices)
    # Refuses large arrays that the mesh leaves whole, as train does.
    programs.report(config, mesh, *programs.abstract_state(config, mesh))
    return mesh, config


def compile_step(config: FrozenConfigDict, mesh: Any, quick: bool = False) -> Any:
    """The compiled train step; `quick` is for its memory alone.

    Raises:
      DoesNotFitError: the compiler finds no way to run it in the memory of the devices.
    """
    lowered = programs.lower_train(config, mesh)
    effort = {"exec_time_optimization_effort": -1.0} if quick else {}
    try:
        return programs.compile_for(lowered, mesh, effort)
    except jax.errors.JaxRuntimeError as error:
        required = _REQUIRED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or not required:
            raise
        raise DoesNotFitError(float(required[1]) * _UNITS[required[2]]) from None


def make(config: FrozenConfigDict, topology: Topology, say: Say) -> Report:
    """The plan of a run, as a dict for JSON; what cannot be told is None.

    Bytes in `hbm_bytes_per_chip` and `hbm_bytes_limit` are those of all devices of a chip; cycles,
    FLOPs and bytes of collectives are those of one device and one step.

    Args:
      config: from `config.resolve`.
      topology: the devices.
      say: told what takes long, in a line.

    Raises:
      ValueError: the config does not work on the topology.
    """
    programs.set_up_jax(with_values(config, {"train.compile_cache": "off"}))
    evaluation = config.eval.batch_size
    mesh, config = lay_out(config, topology)
    report = _outline(config, topology, dict(mesh.shape))
    if config.eval.batch_size != evaluation:
        report["notes"].append(
            f"train refuses eval.batch_size={evaluation} here; add "
            f"--config.eval.batch_size={config.eval.batch_size}"
        )
    batch, seq_len = config.train.batch_size, config.data.seq_len
    duration = "; a 7b takes about two minutes, more near the limit" if topology.chip else ""
    say(f"compiling {report['variant']} for {topology}, {batch} × {seq_len} tokens{duration}")
    try:
        compiled = compile_step(config, mesh)
    except DoesNotFitError as error:
        return report | _memory(error.needed, None, topology) | _cost(None, report, topology)
    kind = mesh.devices.flat[0].platform
    arguments = compiled.memory_analysis().argument_size_in_bytes
    memory = _memory(programs.peak_bytes(compiled, kind), arguments, topology)
    cost = hlo_cost.program_cost(compiled.as_text(), topology.chip, topology.links)
    return report | memory | _cost(cost, report, topology)


def form(config: FrozenConfigDict, topology: Topology, tensor: int = 1) -> dict[str, str]:
    """What is compiled, with `auto` resolved."""
    model = programs.for_platform(config, topology.platform, tensor).model
    routes = variants.VARIANTS[model.residual.variant].grows != "never"
    return {
        "dtype": model.dtype,
        "remat": model.remat,
        "scan": depth.resolved_form(model),
        "attention": model.attention,
        "kernel": model.residual.kernel if routes else "none",
    }


def _outline(config: FrozenConfigDict, topology: Topology, shape: dict[str, int]) -> Report:
    chips, batch = topology.num_chips, config.train.batch_size
    tokens = batch * config.data.seq_len
    flops = sizes.flops_per_token(config.model, config.data.seq_len)["model"]
    versions = {"jax": jax.__version__}
    if topology.chip:
        versions["libtpu"] = metadata.version("libtpu")
    return {
        "variant": config.model.residual.variant,
        "topology": topology.name,
        "hardware": str(topology),
        "chips": chips,
        "devices_per_chip": topology.devices_per_chip,
        "mesh": shape,
        "batch": {
            "global": batch,
            "per_chip": batch / chips,
            "accumulation": config.train.accumulation,
            "seq_len": config.data.seq_len,
            "tokens": tokens,
        },
        "form": form(config, topology, shape["tensor"]),
        "parameters": sum(sizes.parameter_counts(config.model).values()),
        "model_flops_per_step": flops * tokens,
        "versions": versions,
        "compiler_options": programs.compiler_options(topology.chip),
        "notes": topology.notes,
    }


def _memory(total: float, arguments: int | None, topology: Topology) -> Report:
    """Bytes of a chip, from those of a device; the rest of the peak is called temporaries."""
    devices, whole = topology.devices_per_chip, round(total)
    return {
        "hbm_bytes_per_chip": {
            "arguments": None if arguments is None else arguments * devices,
            "temporaries": None if arguments is None else (whole - arguments) * devices,
            "total": whole * devices,
        },
        "hbm_bytes_limit": topology.memory_limit,
        "fits": whole * devices <= topology.memory_limit,
    }


def _cost(cost: hlo_cost.Cost | None, outline: Report, topology: Topology) -> Report:
    report: Report = dict.fromkeys(_TIMES + _WORK)
    if cost is None:
        return report
    report |= {
        "compiled_flops": round(cost.flops),
        "collective_bytes": {kind: round(t.bytes) for kind, t in cost.collectives.items()},
        "collective_counts": {kind: round(t.count) for kind, t in cost.collectives.items()},
        "unpriced_kernels": sorted(cost.unpriced_kernels),
    }
    if cost.unknown_loops:
        loops = ", ".join(cost.unknown_loops)
        outline["notes"].append(f"counted once, since their length is not known: loops {loops}")
    if topology.chip is None:
        outline["notes"].append("no cycles, time or MFU: the CPU compiler estimates none")
        return report
    seconds = (cost.cycles.overlapped + cost.unpriced_cycles) / topology.chip.clock
    chips = topology.num_chips
    copies = cost.by_kind.get("copy", 0.0)
    return report | {
        "compute_cycles": cost.cycles.compute,
        "copy_cycles": copies,
        "kernel_cycles": cost.cycles.kernels,
        "work_cycles": cost.cycles.compute - copies + cost.unpriced_cycles,
        "estimated_step_seconds": seconds,
        "tokens_per_second_per_chip": outline["batch"]["tokens"] / seconds / chips,
        "mfu": outline["model_flops_per_step"] / (seconds * topology.chip.peak_flops * chips),
    }


def largest(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest count from 1 to `most` that fits, searched outwards from a guess; 0 if none does.

    Steps double until the answer is passed, then the rest is halved.
    """
    low, high, stride = guess, guess + 1, 1
    if fits(guess):
        while high <= most and fits(high):
            stride *= 2
            low, high = high, high + stride
        high = min(high, most + 1)
    else:
        low, high = guess - 1, guess
        while low > 0 and not fits(low):
            stride *= 2
            low, high = max(low - stride, 0), low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def find_batch(config: FrozenConfigDict, topology: Topology, say: Say) -> Report:
    """The plan with the largest batch that fits; that of the smallest one if none does.

    Quick compiles of doubled batches give a line to guess from. They do not give the answer: close
    to the limit the compiler recomputes more to make a program fit, and what it needs depends on
    its effort.

    Args:
      config: its batch is not used.
      topology: the devices.
      say: told each try, in a line.
    """
    count = topology.num_chips * topology.devices_per_chip
    shape = mesh_lib.mesh_shape(config.mesh, count, "of the topology")
    unit = fit.data_parallel_size(shape) * config.train.accumulation
    most = int(config_checks.AT_MOST["train.batch_size"]) // unit
    limit = topology.memory_limit / topology.devices_per_chip
    programs.set_up_jax(with_values(config, {"train.compile_cache": "off"}))
    plans: dict[int, Report] = {}

    def resized(count: int) -> FrozenConfigDict:
        return with_values(config, {"train.batch_size": count * unit})

    def tell(count: int, total: float, how: str) -> bool:
        verdict = "fits" if total <= limit else "does not fit"
        say(f"batch {count * unit}: {total / 2**30:.2f} GiB a device {how}, {verdict}")
        return total <= limit

    def fits(count: int) -> bool:
        plans[count] = make(resized(count), topology, say)
        total = plans[count]["hbm_bytes_per_chip"]["total"] / topology.devices_per_chip
        return tell(count, total, "compiled in full")

    count, points = 1, [(0, 0.0)]
    while count <= most:
        mesh, sized = lay_out(resized(count), topology)
        say(f"batch {count * unit}: compiling quickly for {topology}, {config.data.seq_len} tokens")
        try:
            compiled = compile_step(sized, mesh, quick=True)
            total: float = programs.peak_bytes(compiled, mesh.devices.flat[0].platform)
        except DoesNotFitError as error:
            total = error.needed
        if not tell(count, total, "compiled quickly"):
            break
        points.append((count, total))
        count *= 2
    guess = points[-1][0]
    if len(points) > 2 and points[-1][1] > points[-2][1]:
        (before, less), (guess, more) = points[-2:]
        guess += int((limit - more) / (more - less) * (guess - before))
    found = largest(fits, max(1, min(guess, count - 1, most)), most)
    return plans[max(1, found)]
