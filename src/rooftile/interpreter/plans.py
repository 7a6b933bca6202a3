"""Plans: what an operation of a kernel asks of the interpreter's builder, worked out once for each set of types.

From the types of the operands, and from constants, Triton decides which casts, broadcasts and functions it asks the
builder for. That takes longer than to compute them. A plan makes those calls alone. What stock refuses has no plan, and
is refused each time. There are plans within a launch alone: without what that patches, Triton takes unsigned scalars
for signed ones. As the interpreter's own state, plans are for one launch at a time.
"""

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from rooftile.interpreter.memo import KEPT, constants
from rooftile.interpreter.memory import launches
from rooftile.interpreter.patching import original, replace

# Operations that ask nothing of their operands but the types.
_OPERATIONS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "minimum", "maximum", "minus", "and_", "or_", "xor_", "invert",
    "logical_and", "logical_or", "not_", "less_than", "less_equal", "greater_than", "greater_equal", "equal",
    "not_equal", "where", "expand_dims", "cast",
)  # fmt: skip
# Of a scalar mask and fill these ask whether they are 0: masked accesses have plans for blocks alone. The mask's place.
_MEMORY = {"load": 1, "store": 2}
_CONSTANTS = frozenset((int, float, bool, str, type(None), ir.PROPAGATE_NAN, ir.ROUNDING_MODE))
_TYPES = frozenset((tl.dtype, tl.pointer_type, tl.block_type))


class _Recorder:
    """A builder that notes its calls: the method, the arguments, the result."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []
        self.is_complete = True

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._builder, name)
        if not callable(value):
            return value

        def noted(*args: Any, **named: Any) -> Any:
            result = value(*args, **named)
            self.calls.append((name, args, result))
            self.is_complete &= not named
            return result

        return noted


@functools.cache
def _code(lines: str) -> Any:
    return compile(lines, "<plan>", "exec")


def _plan(own: tuple[Any, ...], recorder: _Recorder, result: Any) -> Callable | None:
    """The function of a builder and the operands that makes these calls; None if there is none."""
    handle = interpreter.TensorHandle
    if not recorder.is_complete or type(result) is not tl.tensor:
        return None
    operands = [f"a{k}" for k in range(len(own))]
    names = {id(o.handle): f"{a}.handle" for a, o in zip(operands, own, strict=True) if type(o) is tl.tensor}
    values: dict[str, Any] = {"tensor": tl.tensor}
    lines = [f"def plan(builder, {', '.join(operands)}):"]

    def name(value: Any) -> str:
        if id(value) not in names:
            names[id(value)] = f"c{len(values)}"
            values[names[id(value)]] = value
        return names[id(value)]

    for method, args, made in recorder.calls:
        given = any(type(arg) is handle for arg in args)
        if given and made is not None and type(made) is not handle:
            return None
        if given or (type(made) is handle and made.dtype not in KEPT):
            call = f"builder.{method}({', '.join(map(name, args))})"
            if made is not None:
                names[id(made)] = f"h{len(lines)}"
                call = f"h{len(lines)} = {call}"
            lines.append(f"    {call}")
    same = [a for a, o in zip(operands, own, strict=True) if o is result]
    lines.append(f"    return {same[0] if same else f'tensor({name(result.handle)}, {name(result.type)})'}")
    # The plan's other handles are constants, made by these calls or before. No handle of other data may stay in it.
    known = {id(made) for *_, made in recorder.calls} | {id(constant.handle) for constant in constants.values()}
    if any(type(value) is handle and id(value) not in known for value in values.values()):
        return None
    exec(_code("\n".join(lines)), values)
    return values["plan"]


def _observed(self: Any, stock: Callable, operands: tuple[Any, ...]) -> tuple[Any, Callable | None]:
    """The result of an operation, and its plan."""
    # Each operand has a handle of its own here, so that a call tells which one it takes, also in `x * x`.
    own = tuple(
        tl.tensor(interpreter.TensorHandle(o.handle.data, o.handle.dtype), o.type) if type(o) is tl.tensor else o
        for o in operands
    )
    builder, recorder = self.builder, _Recorder(self.builder)
    self.builder = recorder
    try:
        result = stock(self, *own)
    finally:
        self.builder = builder
    plan = _plan(own, recorder, result)
    return next((o for o, copy in zip(operands, own, strict=True) if copy is result), result), plan


def _key(operand: Any) -> Any:
    """What a plan depends on, besides the types of tensors. Raises TypeError for an operand that has no plans."""
    kind = type(operand)
    if kind in _CONSTANTS or (kind is tuple and not operand):
        return kind, operand
    if kind in _TYPES:
        return kind, operand.name
    raise TypeError(operand)


def _install(name: str, mask: int | None) -> None:
    stock = original(TritonSemantic, name)
    plans: dict[Any, Callable | None] = {}
    seen: set[Any] = set()

    @replace(TritonSemantic, name)
    @functools.wraps(stock)
    def operation(self, *operands, **named):
        if not launches:
            return stock(self, *operands, **named)
        try:
            key = tuple([o.type.name if type(o) is tl.tensor else _key(o) for o in operands])
        except TypeError:
            key = None
        plan = plans.get(key)
        if plan is not None and not named:
            return plan(self.builder, *operands)
        if named or key is None:
            return stock(self, *operands, **named)
        asks = mask is not None and operands[mask] is not None and not _is_block(operands[0])
        is_part = type(self.builder) is _Recorder  # of an operation that is observed
        is_plain = all(type(o) is not tl.tensor or type(o.handle) is interpreter.TensorHandle for o in operands)
        if key in plans or asks or is_part or not is_plain:
            return stock(self, *operands)
        if key not in seen:  # most constants come once
            seen.add(key)
            return stock(self, *operands)
        result, plans[key] = _observed(self, stock, operands)
        return result


def _is_block(pointer: Any) -> bool:
    kind = pointer.type
    return type(kind) is tl.block_type and kind.numel > 1


def install() -> None:
    for name in _OPERATIONS:
        _install(name, None)
    for name, mask in _MEMORY.items():
        _install(name, mask)
