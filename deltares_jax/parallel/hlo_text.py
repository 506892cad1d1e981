"""Reads optimised HLO text: computations and their operations in schedule order. Free of jax."""

import dataclasses
import math
import re

Array = tuple[str, tuple[int, ...]]  # dtype, dimensions

ITEM_BYTES: dict[str, float] = {
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 0.5),
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("f8e4m3fn", "f8e5m2", "f8e4m3b11fnuz", "f8e4m3"), 1),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
}
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([^\s(]+)\s*\(.*->.*\{\s*$")
_OP_START = re.compile(r"^\s+(ROOT\s+)?%?[\w.\-]+ = ")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


@dataclasses.dataclass
class Op:
    """One operation.

    name, opcode, shape: as written. operands: their names. arguments: the text between the
    parentheses. attributes: the text after them. root: whether it is its computation's result.
    """

    name: str
    opcode: str
    shape: str
    operands: list[str]
    arguments: str
    attributes: str
    root: bool

    @property
    def cycles(self) -> int | None:
        """The compiler's own estimate; None where it made none."""
        return int(text) if (text := self.find(_CYCLES)) else None

    def attribute(self, key: str) -> str:
        """The name that an attribute such as `calls=%f` refers to; empty when it is absent."""
        return self.find(rf"\b{key}=%?([\w.\-]+)")

    def find(self, pattern: str | re.Pattern[str]) -> str:
        """The first group of a pattern in the attributes; empty when it does not occur."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""


def arrays(shape: str) -> list[Array]:
    """The arrays of a shape, tuples flattened."""
    return [
        (dtype, tuple(int(d.strip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(shape)
        if dtype in ITEM_BYTES
    ]


def array_bytes(array: Array) -> float:
    """Bytes of one array, without padding."""
    dtype, dims = array
    return ITEM_BYTES[dtype] * math.prod(dims)


def shape_bytes(shape: str) -> float:
    """Bytes of all arrays of a shape."""
    return sum(map(array_bytes, arrays(shape)))


def _closing(text: str, start: int) -> int:
    """Index just past the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _parse_op(line: str) -> Op | None:
    text = line.strip()
    root = text.startswith("ROOT ")
    name, equals, rest = text.removeprefix("ROOT ").partition(" = ")
    if not equals or " " in name:
        return None
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end) if end >= 0 else None
    if not opcode:
        return None
    close = _closing(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : close - 1]
    return Op(
        name.lstrip("%"),
        opcode[1],
        rest[:end],
        _NAME.findall(arguments),
        arguments,
        rest[close:],
        root,
    )


def names(text: str) -> list[str]:
    """All names %x in a text."""
    return _NAME.findall(text)


class Module:
    """A program: `computations` by name, each a list of operations in schedule order.

    entry: the name of the one that runs first; empty if there is none.
    """

    def __init__(self, text: str):
        self.computations: dict[str, list[Op]] = {}
        self.entry = ""
        current: list[Op] | None = None
        for line in _logical_lines(text):
            if line == "}":
                current = None
            elif line[:1] not in (" ", "\t"):
                header = _HEADER.match(line)
                if header:
                    current = self.computations.setdefault(header[2], [])
                    self.entry = header[2] if header[1] else self.entry
            elif current is not None and (op := _parse_op(line)):
                current.append(op)
        self._index = {name: {op.name: op for op in ops} for name, ops in self.computations.items()}

    def ops(self, computation: str) -> list[Op]:
        """The operations of a computation; none if there is no such one."""
        return self.computations.get(computation, [])

    def op(self, computation: str, name: str) -> Op | None:
        """An operation by name."""
        return self._index.get(computation, {}).get(name)

    def root(self, computation: str) -> Op | None:
        """The operation whose result is the computation's."""
        ops = self.ops(computation)
        return next((op for op in ops if op.root), ops[-1] if ops else None)

    def inputs(self, computation: str, op: Op) -> list[Op]:
        """The operations that an operation's operands come from."""
        found = (self.op(computation, name) for name in op.operands)
        return [source for source in found if source is not None]


def _logical_lines(text: str) -> list[str]:
    """One line an operation: the metadata of a kernel may run over several."""
    lines: list[str] = []
    for line in text.splitlines():
        if _OP_START.match(line) or line == "}" or _HEADER.match(line):
            lines.append(line)
        elif lines and lines[-1] != "}":
            lines[-1] += " " + line
    return lines
