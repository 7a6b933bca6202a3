"""The case: one description of an op, read by checks, benchmarks, compile-only inspection, tests and docs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Direction = Literal["forward", "backward"]
Roof = Literal["copy", "product", "product fp8", "product int8"]
SETS = ("tiny", "edge", "llm", "sweep", "prefill", "prompt", "decode", "gemm", "softmax", "memory")


@dataclasses.dataclass(frozen=True)
class Point:
    """One place in an op's space: the sizes of its tensors, and the options (modes, layouts) it is called with."""

    label: str
    dims: Mapping[str, int]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __getitem__(self, dim: str) -> int:
        return self.dims[dim]

    def __str__(self) -> str:
        options = " ".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.label} {options}".rstrip()


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The most that `|out - ref| / |ref|` (Frobenius norms, over a whole tensor) may be, and why that much.

    A check also holds an output to twice what eager PyTorch loses in the same dtype against float64, where that is
    more than a rounding: the ceiling alone would let a kernel be worse than what it replaces.

    `peers` is a ceiling for eager PyTorch and other peers, where they round and Rooftile does not.
    """

    ceiling: float
    reason: str
    peers: float = 0.0


class Unsupported(Exception):
    """Raised by a peer that can't run at a point, with the reason; it is shown in the peer's row."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another implementation of the same op.

    `build(point)` imports what it needs and returns a function with the arguments of the op, or raises `ImportError`
    (shown as absent) or `Unsupported`. `mutates` names inputs that it overwrites: it is then given copies, whose
    cost is not timed.
    """

    name: str
    build: Callable[[Point], Callable[..., Any]]
    mutates: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpCase:
    """Everything that checks, benchmarks, inspection, tests and docs know of one op.

    Attributes:
        name: the op's public name, `rooftile.<name>`.
        formula: one line, for tables and docs.
        function: the public function, called as `function(**inputs, **options)`.
        reference: the same signature in plain PyTorch; given float64 (or float32) inputs it is the truth.
        eager: the same signature, the formula composed of PyTorch operations as Hugging Face models write it.
        inputs: `inputs(point, dtype, device, generator)` draws the named inputs, standard normal where floating.
        outputs: names of the results, in order.
        output_dtypes: by output's name, the dtypes of those that have not the inputs' own, at a point.
        grads: names of the inputs that get gradients; () for an op that has a forward alone.
        nbytes: `nbytes(point, itemsize, direction)`, the least bytes that must move: each input once, each output once.
        flops: `flops(point, direction)`, the least floating-point operations.
        tolerances: by dtype, then by direction, for each direction that the op has.
        output_tolerances: by output's name, then by dtype, where one output is held closer than the rest.
        sets: named sets of points; those of `SETS` that make sense for the op.
        peers: beside `eager` and torch.compile of it, which every case has.
        mutates: names of inputs that the op writes; they are drawn afresh for each call.
        excluded: targets that the op can't be compiled for, with the reason.
        spills: bytes of register spills that are allowed on any target.
        odd_spills: the same of kernels for rows of odd lengths, which load one number at a time; where it is more.
        deterministic: whether two runs on one GPU must agree to the bit; "asked" where PyTorch has to be asked for it
            (`torch.use_deterministic_algorithms`), and other kernels run if not: both are checked.
        over: the dimension over which time and memory of the op are charted, where a run has several sizes of it.
        float32_floor: of float32, the error below which nothing is held to what eager PyTorch loses; where it is more
            than that of all ops (check.rounding_floor), the case says why.
        roof: what a row is held to: "copy", a copy of the same bytes; "product", the slower of a streaming read of the
            bytes and a matrix product of as many operations, in the inputs' dtype or the one named.
    """

    name: str
    formula: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    eager: Callable[..., Any]
    inputs: Callable[[Point, torch.dtype, torch.device, torch.Generator], dict[str, Tensor]]
    outputs: tuple[str, ...]
    grads: tuple[str, ...]
    nbytes: Callable[[Point, int, Direction], int]
    flops: Callable[[Point, Direction], int]
    tolerances: Mapping[torch.dtype, Mapping[Direction, Tolerance]]
    sets: Mapping[str, Sequence[Point]]
    output_tolerances: Mapping[str, Mapping[torch.dtype, Tolerance]] = dataclasses.field(default_factory=dict)
    output_dtypes: Callable[[Point], Mapping[str, torch.dtype]] = lambda point: {}
    peers: tuple[Peer, ...] = ()
    mutates: tuple[str, ...] = ()
    excluded: Mapping[str, str] = dataclasses.field(default_factory=dict)
    spills: int = 0
    odd_spills: int = 0
    deterministic: bool | Literal["asked"] = True
    over: str = ""
    float32_floor: float = 0.0
    roof: Roof = "copy"

    def tolerance(self, dtype: torch.dtype, direction: Direction, output: str) -> Tolerance:
        """What that output (or gradient, `d<input>`) is held to."""
        return self.output_tolerances.get(output, {}).get(dtype, self.tolerances[dtype][direction])

    @property
    def directions(self) -> tuple[Direction, ...]:
        return ("forward", "backward") if self.grads else ("forward",)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(self.tolerances)
