"""A plan in words."""

import math
from typing import Any

from deltares_jax.parallel.mesh import BATCH_AXES
from deltares_jax.printing import human_count

Report = dict[str, Any]


def _bytes(number: float | None) -> str:
    if number is None:
        return "unknown"
    return f"{number / 2**30:.2f} GiB" if abs(number) >= 2**30 else f"{number / 2**20:.1f} MiB"


def lines(report: Report) -> list[str]:
    """A plan of `planning.make`, at most 26 short lines."""
    batch, memory = report["batch"], report["hbm_bytes_per_chip"]
    limit = report["hbm_bytes_limit"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    sequences = "sequence" if batch["per_chip"] == 1 else "sequences"
    options = [f"{key}={value}" for key, value in report["compiler_options"].items()]
    text = [
        f"{report['variant']} on {report['topology']}, {report['hardware']}; by {versions}",
        *(f"  {option}" for option in options),
        "mesh: " + ", ".join(f"{axis} {size}" for axis, size in report["mesh"].items()),
        f"batch: {batch['global']} × {batch['seq_len']} tokens, {batch['per_chip']:g} {sequences} "
        f"a chip; accumulation {batch['accumulation']}",
        "step: " + ", ".join(f"{key} {value}" for key, value in report["form"].items()),
        f"parameters: {human_count(report['parameters'])}",
        "HBM per chip:" if report["versions"].get("libtpu") else "memory per device:",
        f"  arguments    {_bytes(memory['arguments'])}",
        f"  temporaries  {_bytes(memory['temporaries'])}",
        f"  total        {_bytes(memory['total'])} at the peak",
        f"  limit        {_bytes(limit)}, headroom {_bytes(limit - memory['total'])}",
    ]
    if report["compiled_flops"] is None:
        return text + report["notes"]
    counts = report["collective_counts"]
    text += [
        "collectives of a step, and what a device receives:",
        *(
            f"  {kind:<18} {counts[kind]:6.0f} × {moved / counts[kind] / 2**20:10.2f} MiB = "
            f"{_bytes(moved)}"
            for kind, moved in report["collective_bytes"].items()
        ),
        f"FLOPs of a step: {report['model_flops_per_step']:.3e} of the model in all, "
        f"{report['compiled_flops']:.3e} a device in compiled matmuls",
    ]
    if report["unpriced_kernels"]:
        text.append("kernels without a price: " + ", ".join(report["unpriced_kernels"]))
    if report["estimated_step_seconds"] is not None:
        text += [
            f"time: {report['estimated_step_seconds']:.4g} s a step by the compiler's cycles, "
            "without latency, contention, input, host",
            f"throughput: {report['tokens_per_second_per_chip']:,.0f} tokens/s a chip, MFU "
            f"{100 * report['mfu']:.1f} %",
        ]
    return text + report["notes"]


def table(
    report: Report,
    other: Report,
    ratios: dict[str, float | None],
    differs: dict[str, list[Any]],
) -> list[str]:
    """Two plans side by side, with what `plan_compare` says of them."""
    rows = (
        ("HBM total, GiB", "hbm_total", ("hbm_bytes_per_chip", "total"), 2**30),
        ("HBM temporaries, GiB", "hbm_temporaries", ("hbm_bytes_per_chip", "temporaries"), 2**30),
        ("compute less copies, Mcycles", "work_cycles", ("work_cycles",), 1e6),
        ("step, s", "estimated_step_seconds", ("estimated_step_seconds",), 1),
        ("tokens/s a chip", "tokens_per_second_per_chip", ("tokens_per_second_per_chip",), 1),
    )
    text = []
    if differs:
        keys = "; ".join(f"{key}={mine} and {theirs}" for key, (mine, theirs) in differs.items())
        text.append(f"these recipes differ outside model.residual, too: {keys}")
    text += [f"{'':<30}{report['variant']:>16}{other['variant']:>16}{'ratio':>10}"]
    for label, name, path, scale in rows:
        values: list[Any] = [report, other]
        for key in path:
            values = [value[key] for value in values]
        cells = "".join(f"{'-' if v is None else f'{v / scale:.4g}':>16}" for v in values)
        ratio = ratios[name]
        text.append(f"{label:<30}{cells}{'-' if ratio is None else f'{ratio:.4f}':>10}")
    return text


def _helps(report: Report) -> str:
    """What makes a plan smaller, what helps most first."""
    mesh, batch = report["mesh"], report["batch"]
    parts = math.prod(mesh[axis] for axis in BATCH_AXES)
    advice = []
    if math.prod(mesh.values()) > 1 and mesh["fsdp"] * mesh["tensor"] == 1:
        ones = [f"mesh.{axis}=1" for axis in ("replica", "data") if mesh[axis] > 1]
        advice.append(" ".join(["mesh.fsdp=-1", *ones]) + ", which cuts weights and moments")
    if batch["global"] // batch["accumulation"] > parts:
        advice += ["a smaller batch (--find_batch)", "more train.accumulation"]
    if report["form"]["remat"] not in ("full", "offload"):
        advice.append("model.remat=full")
    if report["form"]["scan"] == "blocks" and report["form"]["kernel"] != "none":
        advice.append("model.scan=unrolled")
    if "libtpu" in report["versions"]:
        advice.append("more chips")
    return " or ".join(advice) or "a smaller model or data.seq_len"


def too_big(report: Report) -> str:
    """The line that says by how much a plan does not fit."""
    total, limit = report["hbm_bytes_per_chip"]["total"], report["hbm_bytes_limit"]
    return (
        f"does not fit: {report['variant']} with train.batch_size={report['batch']['global']} "
        f"needs {_bytes(total)} a chip of {report['topology']}, {_bytes(total - limit)} more than "
        f"its {_bytes(limit)}; {_helps(report)} would help"
    )
