"""What a GPU would be asked to compute, recorded without one: every launch of a kernel, and every op of PyTorch.

Where kernels run in Triton's interpreter, the host's code is the one that a GPU gets: the same ops in the same order,
the same launches. So what would not be a Triton kernel there shows here, as an op of PyTorch on the model's tensors.

On the CPU the host's own numbers, such as the lengths that the next step sends, lie beside the model's. They are told
apart by where they come from: the host's are tensors made with no device named, or with "cpu" by name, and what is
computed of such tensors alone. All others are the device's.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rooftile import launching, runtime
from rooftile.engine.loop import Loop
from rooftile.inspect.audit.kernels import COMMUNICATION, COPIES, OTHER, Kind, Source, source_of
from rooftile.inspect.audit.trace import Phase, Row

from triton.runtime import interpreter  # isort: skip

Side = Literal["host", "device"]
_OPS = tuple(os.path.join("rooftile", folder) for folder in ("ops", "primitives"))

# What allocates, or looks at a tensor in another way, and starts nothing on a GPU. Views are known by their schema.
_NOTHING = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift", "lift_fresh", "alias", "detach",
    "_unsafe_view", "_reshape_alias", "resize_", "set_", "record_stream", "is_pinned", "_pin_memory",
}  # fmt: skip
# Of dense tensors, in one order and of one dtype, these are copies of memory; of others they are kernels.
_COPIES = {"copy_", "clone", "_to_copy", "lift_fresh_copy"}
# For these the host waits.
_READS = {"_local_scalar_dense", "equal", "is_nonzero"}
_BLOCKS: dict[Kind, str] = {"copy": COPIES, "NCCL": COMMUNICATION}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel, and the op of Rooftile that launched it, "" where none did."""

    op: str
    kernel: str
    source: Source | None


def _order(x: Tensor) -> list[tuple[int, int]]:
    return [(stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]


def _is_dense(x: Tensor) -> bool:
    """Whether the elements are contiguous in memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(_order(x)):
        if stride != expected:
            return False
        expected *= size
    return True


def _is_memcpy(target: Tensor, source: Tensor) -> bool:
    """Whether PyTorch copies without a kernel."""
    alike = target.dtype == source.dtype and target.shape == source.shape and _order(target) == _order(source)
    return not target.numel() or (alike and _is_dense(target))


def _said(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{'' if x.is_contiguous() else ' strided'}"


@functools.cache
def _lines_for_the_cpu(file: str) -> frozenset[int]:
    """The lines of a file that run only where a tensor is on the CPU: what `if x.device.type == "cpu"` guards, and what
    follows `if x.device.type != "cpu": return` in its function."""
    found: set[int] = set()
    for function in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, (ast.If, ast.IfExp, ast.Assign)):
                continue
            asked = ast.unparse(node.value if isinstance(node, ast.Assign) else node.test)
            if ".device.type == 'cpu'" in asked:
                last = node.body[-1].end_lineno if isinstance(node, ast.If) else node.end_lineno
                if isinstance(node, ast.Assign):  # known = ...; the next line is for who knows
                    last = (last or node.lineno) + 1
                found.update(range(node.lineno, (last or node.lineno) + 1))
            elif (
                ".device.type != 'cpu'" in asked and isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return)
            ):
                found.update(range(node.lineno, (function.end_lineno or node.lineno) + 1))
    return frozenset(found)


def _looking() -> bool:
    """Whether an op looks at lengths, pages or ids, because they are on the CPU, as a GPU's are not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(folder in file for folder in _OPS) and frame.f_lineno in _lines_for_the_cpu(file):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Side | None:
    """The side that a call names: `torch.zeros(3, device=d)`, `x.to(d)`, `x.cpu()`."""
    name = getattr(func, "__name__", "")
    if name == "cpu":
        return "host"
    given = kwargs.get("device")
    if given is None and name == "to" and len(args) > 1 and isinstance(args[1], (str, torch.device)):
        given = args[1]
    if given is None:
        return None
    return "host" if given == "cpu" and isinstance(given, str) else "device"


class _Sides(TorchFunctionMode):
    """Which tensors are the host's; sees the devices that calls name, which is lost further down."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._host: dict[int, Any] = {}  # storages, kept so that no other takes their place in memory
        self._names: list[Side | None] = []

    @property
    def named(self) -> Side | None:
        return next((side for side in reversed(self._names) if side is not None), None)

    def of(self, x: Tensor) -> Side:
        return "host" if x.untyped_storage()._cdata in self._host else "device"

    def put(self, x: Tensor, side: Side) -> None:
        storage = x.untyped_storage()
        if side == "host":
            self._host[storage._cdata] = storage
        else:
            self._host.pop(storage._cdata, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, side = getattr(func, "__name__", ""), _named(func, args, kwargs)
        if name in ("tolist", "numpy") and self.of(args[0]) == "device":
            self._recorder.read()
        self._names.append(side)
        try:
            result = func(*args, **kwargs)
        finally:
            self._names.pop()
        if name in ("to", "cpu") and side is not None and self.of(args[0]) != side:
            with _unseen():  # on the CPU there is but one place; the copy is made, so that each side has its own
                result = result.clone() if result is args[0] else result
            self.put(result, side)
        return result


class Recorder(TorchDispatchMode):
    """Records launches of kernels, and ops of PyTorch on the device's tensors.

        recorder = Recorder()
        with recorder.phase("decode"):
            runner.decode()
        recorder.phases()

    Attributes:
        launches: of each phase, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: dict[str, list[Launch]] = {}
        self._found: dict[str, Counter[tuple[Kind, str, str]]] = {}  # kind, op of PyTorch, op of Rooftile
        self._reads: Counter[str] = Counter()
        self._steps: dict[str, int] = {}
        self._phase = ""
        self._under: list[str] = []  # ops of Rooftile that are under way
        self._sides = _Sides(self)

    @contextlib.contextmanager
    def phase(self, name: str, steps: int = 1) -> Iterator[None]:
        """What is done within belongs to that phase.

        Raises:
            RuntimeError: kernels do not run in Triton's interpreter.
        """
        if runtime.MODE is not runtime.Mode.INTERPRETER:
            raise RuntimeError("launches are recorded in Triton's interpreter: set TRITON_INTERPRET=1")
        self._phase, self._steps[name] = name, steps
        self.launches[name], self._found[name] = [], Counter()
        with self._told(), self._sides, self:
            yield

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Be told of launches, and see nothing of what the interpreter does in them; see what steps of the serving
        engine do in its thread."""
        stock, counters, step = interpreter.GridExecutor.__call__, launching.counters, Loop.step
        here = threading.get_ident()

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            name = str(getattr(executor.fn, "__name__", executor.fn))
            under = self._under[0] if self._under else ""
            self.launches[self._phase].append(Launch(under, name, source_of(executor.fn)))
            with _unseen():
                return stock(executor, *args, **kwargs)

        def made(n: int, device: torch.device) -> Tensor:  # on a GPU they are there already
            with _unseen():
                return counters(n, device)

        def seen(loop: Loop) -> Any:
            if threading.get_ident() == here:
                return step(loop)
            with self._sides, self:  # modes are a thread's own
                return step(loop)

        interpreter.GridExecutor.__call__ = call
        launching.counters = made
        Loop.step = seen  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            interpreter.GridExecutor.__call__ = stock
            launching.counters = counters
            Loop.step = step  # type: ignore[method-assign]

    def read(self) -> None:
        self._reads[self._phase] += not _looking()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "rooftile":
            self._under.append(func._opname)
            try:
                # Its launcher is called past the dispatcher, which would bring the call here again: it is seen, too.
                kernel = torch.library.get_kernel(func, "CPU")
                with self._sides, self:
                    return kernel.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
            finally:
                self._under.pop()
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # `contiguous`, `item`, `to` and the like: what they are made of is looked at
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, sides = func._opname, self._sides
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        fresh = name == "lift_fresh" or not inputs  # made of numbers
        if fresh:
            side = sides.named or "host"
        elif func.is_view or func._schema.is_mutable:
            side = "host" if all(sides.of(x) == "host" for x in inputs) else "device"
        else:
            side = sides.named or ("host" if all(sides.of(x) == "host" for x in inputs) else "device")
        if fresh or not (func._schema.is_mutable or func.is_view):
            for x in results:
                sides.put(x, side)
        if func.is_view or name in _NOTHING or (side == "host" and all(sides.of(x) == "host" for x in inputs)):
            return
        if name in _READS:
            self.read()
        elif func.namespace == "c10d":  # on GPUs it is NCCL's
            self._count("NCCL", f"c10d::{name}({', '.join(map(_said, inputs or results))})")
        elif name in _COPIES and _is_memcpy(*((args[0], args[1]) if name == "copy_" else (result, args[0]))):
            self._count("copy", f"aten::{name}")
        elif any(x.is_floating_point() for x in (*inputs, *results)) or not _looking():
            self._count("foreign", f"aten::{name}({', '.join(map(_said, inputs or results))})")

    def _count(self, kind: Kind, what: str) -> None:
        self._found[self._phase][kind, what, self._under[0] if self._under else ""] += 1

    def phases(self) -> list[Phase]:
        """What was recorded. Nothing in it is timed."""
        found = []
        for name, steps in self._steps.items():
            rows = []
            for launch, n in Counter(self.launches[name]).items():
                s = launch.source
                if s is None:
                    rows.append(Row(launch.kernel, "foreign", OTHER, launch.op, count=n))
                else:
                    rows.append(Row(s.name, "Rooftile", s.block, launch.op or s.family, s.place, n))
            for (kind, what, under), n in self._found[name].items():
                rows.append(Row(what, kind, _BLOCKS.get(kind, OTHER), under, count=n))
            phase = Phase(name, steps, sorted(rows, key=lambda r: -r.count), waits=self._reads[name])
            if not self.launches[name]:
                phase.problems.append("no kernel was launched")
            found.append(phase)
        return found
