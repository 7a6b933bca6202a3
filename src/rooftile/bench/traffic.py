"""Memory passes before and after fusion: what the composed formula moves, beside the least that its op must move."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rooftile.cases import Direction, OpCase, Point
from rooftile.cases.case import SETS
from rooftile.cases.check import as_tuple, generator

META = torch.device("meta")
REAL = ("llm", *(name for name in SETS if name not in ("tiny", "edge", "llm")))  # sets of a model's sizes
# These read only as many elements of their first tensor as they return; the writes, as many as they are given.
GATHERS = ("embedding", "gather", "index", "index_select")
SCATTERS = ("index_put_", "index_put", "index_copy_", "scatter_", "scatter")
NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "_unsafe_view", "_reshape_alias")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Of one call: PyTorch operations of the composed formula that run a kernel, the bytes that they move, the least
    bytes of the op, and those of its largest tensor. A pass is one read or write of that tensor."""

    kernels: int
    moved: int
    least: int
    largest: int

    @property
    def passes(self) -> tuple[float, float]:
        """Before fusion and after it."""
        return self.moved / self.largest, self.least / self.largest


def nbytes(x: Tensor) -> int:
    """The bytes of the elements that a tensor has in memory: a broadcast one has each once."""
    return math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()


class _Counter(TorchDispatchMode):
    """Counts the operations that run a kernel, and the bytes of their inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        views = all(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if views or name in NO_KERNEL:
            return out
        inputs = _unique(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        outputs = _unique(x for x in tree_leaves(out) if isinstance(x, Tensor))
        self.kernels += 1
        written = sum(map(nbytes, outputs))
        read = sum(map(nbytes, inputs))
        if name in GATHERS:
            read += min(0, written - nbytes(inputs[0]))
        elif name in SCATTERS:
            values = sum(map(nbytes, inputs[1:]))
            read, written = values, values
        self.moved += read + written
        return out


def _unique(tensors: Iterator[Tensor]) -> list[Tensor]:
    return list({id(x): x for x in tensors}.values())


def traffic(case: OpCase, point: Point, dtype: torch.dtype, direction: Direction) -> Traffic:
    """The traffic of one call, by running the composed formula on tensors without memory."""
    inputs = case.inputs(point, dtype, META, generator(META, 0))
    grads = [n for n in case.grads if n in inputs] if direction == "backward" else []
    leaves = {n: x.detach().requires_grad_(n in grads) for n, x in inputs.items()}
    counter = _Counter()
    with contextlib.nullcontext() if grads else torch.no_grad():
        with counter if direction == "forward" else contextlib.nullcontext():
            outputs = as_tuple(case.eager(**leaves, **point.options))
        if direction == "backward":
            given = [torch.empty_like(y) for y in outputs]
            with counter:
                torch.autograd.grad(outputs, [leaves[n] for n in grads], given, allow_unused=True)
    largest = max(map(nbytes, itertools.chain(inputs.values(), outputs)))
    least = case.nbytes(point, dtype.itemsize, direction)
    return Traffic(counter.kernels, counter.moved, least, largest)


def first_point(case: OpCase) -> Point | None:
    """The first point of a model's size."""
    return next((points[0] for name in REAL if (points := case.sets.get(name))), None)


def all_traffic(cases: Sequence[OpCase]) -> Iterator[tuple[OpCase, Point, str, Direction, Traffic]]:
    """Each case in each direction at its first point of a model's size, in bf16 or else its first dtype."""
    from rooftile.cases.check import NAMES

    for case in cases:
        dtype = torch.bfloat16 if torch.bfloat16 in case.dtypes else case.dtypes[0]
        point = first_point(case)
        for direction in case.directions if point is not None else ():
            assert point is not None
            yield case, point, NAMES[dtype], direction, traffic(case, point, dtype, direction)
