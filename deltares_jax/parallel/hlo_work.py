"""What operations of HLO text amount to: FLOPs, bytes, cycles of attention kernels. Free of jax."""

import math

from deltares_jax.parallel.chips import Chip
from deltares_jax.parallel.hlo_text import Array, Module, Op, array_bytes, arrays, shape_bytes

COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
        "collective-broadcast",
        "ragged-all-to-all",
    }
)

_SPLASH_SIDE = 512


def flops(module: Module, computation: str, op: Op) -> float:
    """FLOPs of the matmuls and convolutions of an operation, fused ones included."""
    if op.opcode in ("fusion", "call", "async-start"):
        called = op.attribute("calls") or op.attribute("to_apply")
        return sum(flops(module, called, inner) for inner in module.ops(called))
    if op.opcode == "dot":
        return _dot_flops(module, computation, op)
    if op.opcode == "convolution":
        return _convolution_flops(module, computation, op)
    return 0.0


def _operand(module: Module, computation: str, op: Op, index: int) -> tuple[int, ...] | None:
    source = module.op(computation, op.operands[index])
    found = arrays(source.shape) if source is not None else []
    return found[0][1] if found else None


def _dot_flops(module: Module, computation: str, op: Op) -> float:
    left, result = _operand(module, computation, op, 0), arrays(op.shape)
    contracted = op.find(r"lhs_contracting_dims=\{([\d,]*)\}")
    if left is None or not result:
        return 0.0
    depth = math.prod(left[int(d)] for d in contracted.split(",") if d)
    return 2.0 * math.prod(result[0][1]) * depth


def _convolution_flops(module: Module, computation: str, op: Op) -> float:
    left = _operand(module, computation, op, 0)
    right = _operand(module, computation, op, 1)
    result, labels = arrays(op.shape), op.find(r"dim_labels=(\w+_\w+->\w+)")
    if left is None or right is None or not result or not labels:
        return 0.0
    left_labels, rest = labels.split("_")
    right_labels, out_labels = rest.split("->")
    out = result[0][1]
    window = dict(field.split("=") for field in op.find(r"window=\{([^}]*)\}").split())
    spatial = sorted(
        c for c in right_labels if c.isdigit()
    )  # the window's fields are in this order
    touched = 1
    for axis, label in enumerate(spatial):
        lengths = left[left_labels.index(label)], out[out_labels.index(label)]
        touched *= _touched(window, axis, *lengths)
    channels = out[out_labels.index("b")] * out[out_labels.index("f")]
    return 2.0 * channels * right[right_labels.index("i")] * touched


def _touched(window: dict[str, str], axis: int, length: int, outputs: int) -> int:
    """Pairs of output and kernel positions along an axis that meet a real input."""

    def field(key: str, default: str) -> int:
        text = window[key].split("x")[axis] if key in window else default
        return int(text.split("_")[0])

    stride, dilation, low = field("stride", "1"), field("rhs_dilate", "1"), field("pad", "0_0")
    spread = field("lhs_dilate", "1")
    extent = (length - 1) * spread + 1
    positions = (
        output * stride + kernel * dilation - low
        for kernel in range(field("size", "1"))
        for output in range(outputs)
    )
    return sum(0 <= x < extent and x % spread == 0 for x in positions)


def _group_size(op: Op) -> int:
    """Devices that a collective joins; 0 if it does not say."""
    if size := op.find(r"replica_groups=\[\d+,(\d+)\]"):
        return int(size)
    if group := op.find(r"replica_groups=\{\{([\d,]+)\}"):
        return len(group.split(","))
    mesh = op.find(r"replica_groups=mesh\[([^\]]*)\]")
    if not mesh:
        return 0
    sizes = dict(
        part.strip().split("=") for part in mesh.replace("'", "").split(",") if "=" in part
    )
    axes = op.find(r"replica_groups=mesh\[[^\]]*\]\s*\{([^}]*)\}").replace("'", "").split(",")
    return math.prod(int(sizes.get(axis.strip(), 1)) for axis in axes)


def wire_bytes(module: Module, computation: str, op: Op, kind: str) -> float:
    """Bytes that a device takes in from others for a collective of a kind, in whatever form."""
    result = shape_bytes(op.shape)
    operand = sum(shape_bytes(source.shape) for source in module.inputs(computation, op))
    size = _group_size(op)
    share = (size - 1) / size if size else 1.0
    if kind == "all-gather":
        if op.opcode.endswith("-start"):  # its shape holds the operand and the result
            result = max(map(array_bytes, arrays(op.shape)), default=0)
        return result * share
    if kind == "reduce-scatter":
        return (operand or result * size) * share
    if kind == "all-reduce":
        return 2 * (operand or result) * share
    if kind == "all-to-all":
        return (operand or result) * share
    return operand or result  # to one neighbour each


def dma_bytes(op: Op) -> float:
    """Bytes that an asynchronous copy or slice moves between memories."""
    moved: list[Array] = [array for array in arrays(op.shape) if array[1]]
    return min(map(array_bytes, moved), default=0)


def stated_bytes(kernel: Op) -> float | None:
    """Bytes that a Pallas kernel says it moves (its `cost_estimate`); None if it does not."""
    stated = kernel.find(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
    return float(stated) if stated else None


def is_attention(kernel: str) -> bool:
    """Whether a kernel of this name computes attention."""
    return any(word in kernel.lower() for word in ("splash", "flash", "attention", "mha"))


def attention_cycles(kernel: str, operands: list[Array], chip: Chip) -> float | None:
    """Cycles of a device for an attention kernel; None for other kernels.

    Computed scores times bundles per score (forward, dkv, dq or a fused backward, by the name),
    split over the cores. Causal attention in n tiles a side computes (n + 1) / 2n of the scores.
    Tiles of other sizes are priced as 512 wide, which flatters small ones and wrongs large ones.
    """
    tensors = [d for dtype, d in operands if dtype in ("bf16", "f32", "f16") and len(d) >= 3]
    if not is_attention(kernel) or len(tensors) < 2:
        return None
    query, key = tensors[:2]
    forward, dkv, dq = chip.splash[min(chip.splash, key=lambda dim: abs(dim - query[-1]))]
    bundles: float = forward
    if "dkv" in kernel:
        bundles = dkv
    elif "dq" in kernel:
        bundles = dq
    elif "bwd" in kernel or "backward" in kernel:
        bundles = dkv * 5 / 4  # one more matmul than dkv
    tiles = max(1, key[-2] // _SPLASH_SIDE)
    share = (tiles + 1) / (2 * tiles)
    return math.prod(query[:-1]) * key[-2] * share * bundles / _SPLASH_SIDE**2 / chip.cores
