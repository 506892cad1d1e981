"""Trip counts of the loops in HLO text. Free of jax."""

import re

from deltares_jax.parallel.hlo_text import Module, Op

_TRIPS = re.compile(r"known_trip_count[^0-9]{1,8}n[^0-9]{1,4}(\d+)")
_MIRRORED = {"GT": "LT", "LT": "GT", "GE": "LE", "LE": "GE"}
_COPIES = ("copy", "bitcast")


def trips(module: Module, computation: str, loop: Op) -> int | None:
    """How often the body of a `while` in `computation` runs; None if it cannot be read.

    From the compiler's note where there is one, else from the condition's comparison of a counter
    with a bound, the counter's start and its step in the body.
    """
    noted = loop.find(_TRIPS)
    if noted:
        return int(noted)
    condition, body = loop.attribute("condition"), loop.attribute("body")
    compared = _comparison(module, condition)
    if compared is None:
        return None
    left, right, kind = compared
    if _element(module, condition, left) is None:
        left, right, kind = right, left, _MIRRORED.get(kind, kind)
    counter = _element(module, condition, left)
    if counter is None:
        return None
    bound = _constant(module, condition, right)
    if bound is None and (element := _element(module, condition, right)) is not None:
        bound = _initial(module, computation, loop, element)
    step = _step(module, computation, loop, body, counter)
    if bound is None or not step:
        return None
    start = _initial(module, computation, loop, counter) or 0
    if kind == "NE":
        return abs(bound - start) // abs(step)
    if kind not in (("LT", "LE") if step > 0 else ("GT", "GE")):
        return None
    distance = bound - start if step > 0 else start - bound
    whole = distance // abs(step) + 1 if kind in ("LE", "GE") else -(-distance // abs(step))
    return max(0, whole)


def _comparison(module: Module, condition: str) -> tuple[str, str, str] | None:
    """Operands and direction of the comparison that a condition ends with, fused or not."""
    root = module.root(condition)
    if root is None:
        return None
    operands, compare = root.operands, root
    if root.opcode == "fusion":
        called = root.attribute("calls")
        inner = module.root(called)
        if inner is None:
            return None
        outside = {
            op.name: root.operands[int(op.arguments)]
            for op in module.ops(called)
            if op.opcode == "parameter"
        }
        operands, compare = [outside.get(name, name) for name in inner.operands], inner
    direction = compare.find(r"direction=(\w+)")
    if compare.opcode != "compare" or not direction or len(operands) != 2:
        return None
    return operands[0], operands[1], direction


def _constant(module: Module, computation: str, name: str, hops: int = 8) -> int | None:
    """The whole number that a name stands for, through copies."""
    op = module.op(computation, name)
    while op is not None and hops and op.opcode in (*_COPIES, "convert", "reshape"):
        op, hops = module.op(computation, op.operands[0]), hops - 1
    if op is not None and op.opcode == "constant" and re.fullmatch(r"[+-]?\d+", op.arguments):
        return int(op.arguments)
    return None


def _element(module: Module, computation: str, name: str) -> int | None:
    """Its index when a name is an element of the loop's parameter."""
    op = module.op(computation, name)
    while op is not None and op.opcode in _COPIES:
        op = module.op(computation, op.operands[0])
    if op is None or op.opcode != "get-tuple-element":
        return None
    source, index = module.op(computation, op.operands[0]), op.find(r"index=(\d+)")
    return int(index) if index and source is not None and source.opcode == "parameter" else None


def _initial(module: Module, computation: str, loop: Op, index: int) -> int | None:
    """An element of the loop's parameter before the first trip."""
    start = module.op(computation, loop.operands[0])
    if start is None or start.opcode != "tuple" or index >= len(start.operands):
        return None
    return _constant(module, computation, start.operands[index])


def _step(module: Module, computation: str, loop: Op, body: str, index: int) -> int | None:
    """What a trip adds to an element of the loop's parameter."""
    root = module.root(body)
    if root is None or root.opcode != "tuple" or index >= len(root.operands):
        return None

    def value(name: str) -> int | None:
        constant = _constant(module, body, name)
        if constant is None and (element := _element(module, body, name)) is not None:
            return _initial(module, computation, loop, element)
        return constant

    def offset(name: str, depth: int = 0) -> int | None:
        if _element(module, body, name) == index:
            return 0
        op = module.op(body, name)
        if op is None or depth > 32:
            return None
        if op.opcode in _COPIES:
            return offset(op.operands[0], depth + 1)
        if op.opcode not in ("add", "subtract"):
            return None
        first, second = op.operands
        pairs = [(first, second)] if op.opcode == "subtract" else [(first, second), (second, first)]
        for counter, added in pairs:
            base = offset(counter, depth + 1)
            if base is not None and (step := value(added)) is not None:
                return base + (step if op.opcode == "add" else -step)
        return None

    return offset(root.operands[index])
