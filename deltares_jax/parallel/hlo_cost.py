"""Cycles, FLOPs and traffic of a compiled program, from its optimised HLO text. Free of jax.

How cycles are counted:

- The TPU compiler notes `estimated_cycles` on operations that it has priced (fusions, matmuls,
  copies, …). `compute` is their sum: a loop's body counts once per trip, a conditional as its
  dearest branch, what is inside a fusion not again.
- Pallas kernels carry no estimate. Those of attention are priced by a table, see
  `hlo_work.attention_cycles`; the others cost nothing in these sums, and `unpriced_cycles` is what
  they need at least: bytes over the bandwidth of the memory. The bytes are those that the kernel
  states; where it states none, it is named in `unpriced_kernels`, and all its operands count.
- Collectives and asynchronous copies carry none either. `overlapped` replays the schedule with a
  clock: priced operations advance it, the start of a transfer books its bytes on a link, the
  matching end waits for it; a transfer that is not split in two blocks. `serial` is everything
  laid end to end. The truth should lie between `compute` + `kernels` and `serial`: the replay knows
  nothing of latencies, of contention between unlike collectives, or of that for the memory.

Everything is per device.
"""

import collections
import dataclasses
import re

from deltares_jax.parallel import hlo_loops, hlo_work
from deltares_jax.parallel.chips import Chip
from deltares_jax.parallel.hlo_text import Module, Op, array_bytes, arrays, names

_COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Cycles of one run of a computation; see the top of the file."""

    compute: float = 0.0
    kernels: float = 0.0
    overlapped: float = 0.0
    serial: float = 0.0

    def __add__(self, other: "Cycles") -> "Cycles":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cycles(*(a + b for a, b in pairs))

    def __mul__(self, times: float) -> "Cycles":
        return Cycles(*(value * times for value in dataclasses.astuple(self)))


@dataclasses.dataclass
class Traffic:
    """count: how often. bytes: taken in by a device, over all times."""

    count: float = 0.0
    bytes: float = 0.0


@dataclasses.dataclass
class Cost:
    """What one run of a program costs a device.

    cycles, unpriced_cycles: see the top of the file. by_kind: cycles of `compute` by operation,
      those with matmuls as `matmul`. flops: of matmuls outside kernels. collectives: by kind, over
      the network. copies: by kind, between memories. kernels: how often each runs.
    unknown_loops: loops whose trips cannot be read; they count once.
    """

    cycles: Cycles = dataclasses.field(default_factory=Cycles)
    by_kind: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    flops: float = 0.0
    collectives: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    copies: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    kernels: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    unpriced_kernels: set[str] = dataclasses.field(default_factory=set)
    unpriced_cycles: float = 0.0
    unknown_loops: list[str] = dataclasses.field(default_factory=list)


class _Clock:
    """Replays one computation: what has run, what is under way on which link."""

    def __init__(self) -> None:
        self.compute = self.kernels = self.serial = self.now = 0.0
        self._free: dict[str, float] = collections.defaultdict(float)
        self._pending: dict[str, float] = {}

    def run(self, cycles: Cycles) -> None:
        """Runs something to its end."""
        self.compute += cycles.compute
        self.kernels += cycles.kernels
        self.serial += cycles.serial
        self.now += cycles.overlapped

    def block(self, cycles: float) -> None:
        """Waits for a transfer of so many cycles."""
        self.run(Cycles(overlapped=cycles, serial=cycles))

    def book(self, link: str, key: str, cycles: float) -> None:
        """Starts a transfer as soon as its link is free."""
        self._free[link] = max(self.now, self._free[link]) + cycles
        self._pending[key] = self._free[link]
        self.serial += cycles

    def wait(self, key: str) -> None:
        """Waits for the end of what was booked under the key."""
        self.now = max(self.now, self._pending.pop(key, 0.0))

    def end(self) -> Cycles:
        """The sums, once all transfers have ended."""
        for key in list(self._pending):
            self.wait(key)
        return Cycles(self.compute, self.kernels, self.now, self.serial)


class _Walk:
    """Adds up the operations of a program in `cost`."""

    def __init__(self, module: Module, chip: Chip | None, links: int):
        self.module, self.chip, self.links = module, chip, links
        self.cost = Cost()

    def run(self, computation: str, times: float) -> Cycles:
        """Cycles of one run of a computation; notes the rest of it `times` over."""
        clock = _Clock()
        for op in self.module.ops(computation):
            code = op.opcode
            if code == "while":
                clock.run(self._loop(computation, op, times))
            elif code in ("call", "conditional"):
                clock.run(self._branch(op, times))
            elif code.endswith("-start"):
                self._start(clock, computation, op, times)
            elif code == "custom-call-update":
                self._sparse_core(clock, computation, op, times)
            elif code.endswith("-done"):
                clock.wait(op.operands[0] if op.operands else "")
            elif code in hlo_work.COLLECTIVES:
                clock.block(self._collective(computation, op, code, times))
            elif code == "custom-call" and '"tpu_custom_call"' in op.attributes:
                clock.run(self._kernel(computation, op, times))
            else:
                if code == "fusion":
                    self._fused_collective(clock, op, times)
                clock.run(self._priced(computation, op, times))
        return clock.end()

    def _loop(self, computation: str, op: Op, times: float) -> Cycles:
        trips = hlo_loops.trips(self.module, computation, op)
        if trips is None:
            self.cost.unknown_loops.append(op.name)
            trips = 1
        return self.run(op.attribute("body"), times * trips) * trips

    def _branch(self, op: Op, times: float) -> Cycles:
        branches = names(op.find(r"branch_computations=\{([^}]*)\}"))
        keys = ("to_apply", "true_computation", "false_computation")
        branches += filter(None, map(op.attribute, keys))
        each = times / max(1, len(branches))
        runs = [self.run(branch, each) for branch in branches]
        return max(runs, key=lambda cycles: cycles.serial, default=Cycles())

    def _priced(self, computation: str, op: Op, times: float) -> Cycles:
        flops = 0.0
        if op.opcode in ("fusion", "dot", "convolution"):
            flops = hlo_work.flops(self.module, computation, op)
        self.cost.flops += times * flops
        cycles = op.cycles or 0
        if cycles:
            self.cost.by_kind["matmul" if flops else op.opcode] += times * cycles
        return Cycles(compute=cycles, overlapped=cycles, serial=cycles)

    def _kernel(self, computation: str, op: Op, times: float) -> Cycles:
        name = re.sub(r"\.\d+$", "", op.name)
        sources = self.module.inputs(computation, op)
        operands = [array for source in sources for array in arrays(source.shape)]
        self.cost.kernels[name] += times
        cycles = hlo_work.attention_cycles(name, operands, self.chip) if self.chip else None
        if cycles is None:
            moved = hlo_work.stated_bytes(op)
            if moved is None:
                self.cost.unpriced_kernels.add(name)
                moved = sum(map(array_bytes, [*operands, *arrays(op.shape)]))
            if not hlo_work.is_attention(name):
                self.cost.unpriced_cycles += times * self._memory_cycles(moved)
            cycles = 0.0
        return Cycles(kernels=cycles, overlapped=cycles, serial=cycles)

    # Transfers.

    def _memory_cycles(self, moved: float) -> float:
        if not self.chip:
            return 0.0
        return moved / (self.chip.hbm_bandwidth / self.chip.devices) * self.chip.clock

    def _note(self, group: dict[str, Traffic], kind: str, moved: float, times: float) -> None:
        traffic = group.setdefault(kind, Traffic())
        traffic.count += times
        traffic.bytes += times * moved

    def _collective(
        self, computation: str, op: Op, kind: str, times: float, share: float = 1.0
    ) -> float:
        """Notes a collective; its cycles on the links."""
        moved = hlo_work.wire_bytes(self.module, computation, op, kind) * share
        if share != 1:  # an all-reduce whose result is sliced at once
            kind = "reduce-scatter"
        self._note(self.cost.collectives, kind, moved, times)
        if not self.chip:
            return 0.0
        # A permute goes to one neighbour over one link; the others can use every link.
        links = 1 if kind == "collective-permute" else self.links
        bandwidth = self.chip.link_bandwidth * links / self.chip.devices
        return moved / bandwidth * self.chip.clock

    def _inside(self, computation: str, depth: int = 0) -> tuple[str, Op] | None:
        """A collective wrapped in an asynchronous or fused computation, and where it is."""
        if depth > 4:
            return None
        for op in self.module.ops(computation):
            if op.opcode in hlo_work.COLLECTIVES:
                return computation, op
            if op.opcode in ("fusion", "call", "async-start"):
                called = op.attribute("calls") or op.attribute("to_apply")
                if found := self._inside(called, depth + 1):
                    return found
        return None

    def _start(self, clock: _Clock, computation: str, op: Op, times: float) -> None:
        kind, where, inner = op.opcode.removesuffix("-start"), computation, op
        called = op.attribute("calls") or op.attribute("to_apply")
        if kind in ("async", "call") and (found := self._inside(called)):
            where, inner = found
            kind = inner.opcode
        if kind in hlo_work.COLLECTIVES:
            cycles = self._collective(where, inner, kind, times)
            pairs = inner.find(r"source_target_pairs=(\{\{.{0,24})")
            clock.book(kind + pairs, op.name, cycles)
        elif kind in _COPIES:
            moved = hlo_work.dma_bytes(op)
            self._note(self.cost.copies, kind, moved, times)
            clock.book("dma", op.name, self._memory_cycles(moved))
        elif kind != "custom-call" and op.cycles:  # that one is booked at its update
            clock.book("async", op.name, op.cycles)

    def _sparse_core(self, clock: _Clock, computation: str, op: Op, times: float) -> None:
        """A collective handed to the SparseCore, booked where it gets its inputs."""
        sources = self.module.inputs(computation, op)
        start = next((s for s in sources if s.opcode == "custom-call-start"), None)
        called = start.find(r"called_computations=\{%?([\w.\-]+)") if start else ""
        if found := self._inside(called):
            where, inner = found
            clock.book("ici", op.name, self._collective(where, inner, inner.opcode, times))

    def _fused_collective(self, clock: _Clock, op: Op, times: float) -> None:
        """A collective inside a fusion: begun or ended there, or with its neighbours fused in."""
        called = op.attribute("calls")
        found = self._inside(called)
        if not found:
            return
        where, inner = found
        text = " ".join(o.attributes for o in self.module.ops(called) if o.opcode == "custom-call")
        key = "channel" + (inner.find(r"channel_id=(\d+)") or inner.name)
        if '"AsyncCollectiveStart"' in text:
            clock.book("ici", key, self._collective(where, inner, inner.opcode, times))
        elif '"AsyncCollectiveDone"' in text:
            clock.wait(key)
        elif "async" not in called:
            halved = inner.opcode == "all-reduce" and "scatter" in called
            cycles = self._collective(where, inner, inner.opcode, times, 0.5 if halved else 1.0)
            if op.cycles is None:
                clock.block(cycles)


def program_cost(text: str, chip: Chip | None = None, links: int = 0) -> Cost:
    """Reads the cost of a program from `compiled.as_text()`.

    Args:
      text: the optimised HLO.
      chip: what it was compiled for; without one only the compiler's own cycles are summed.
      links: links of a chip that a collective can use at once; all of them when 0.
    """
    walk = _Walk(Module(text), chip, links or (chip.links if chip else 0))
    walk.cost.cycles = walk.run(walk.module.entry, 1.0)
    return walk.cost
