"""The case: one description of an op, read by checks, benchmarks, compile-only inspection, tests and docs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Direction = Literal["forward", "backward"]
Roof = Literal["copy", "gemm", "gemm fp8"]
SETS = (
    "tiny", "edge", "llm", "sweep", "prefill", "prompt", "decode", "latent", "tokens", "gemm", "softmax", "memory",
    "training",
)  # fmt: skip
SMALL_SETS = ("tiny", "edge")  # those for the interpreter; it takes minutes or more at a point of the others


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
    """A ceiling of `|out - ref| / |ref|` (Frobenius norms over a whole tensor), and its reason.

    A check also limits the error to twice that of eager PyTorch in the same dtype against float64, if that is more than
    `check.rounding_floor`. The ceiling alone would let a kernel be worse than what it replaces.

    `peers` is a ceiling for eager PyTorch and other baselines, if they round where Rooftile does not.
    """

    ceiling: float
    reason: str
    peers: float = 0.0


class Unsupported(Exception):
    """Raised by a baseline that can't run at a point, with the reason, which its row shows."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A baseline: another implementation of the same op.

    `build(point)` imports what it needs and returns a function with the arguments of the op, or raises `ImportError`
    (shown as absent) or `Unsupported`. `mutates` names inputs that it overwrites: it then gets copies, which are
    not timed.
    """

    name: str
    build: Callable[[Point], Callable[..., Any]]
    mutates: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Training:
    """Forward and backward in one call, as a training step makes it.

    `grads` names the inputs whose gradients it asks for. `nbytes(point, itemsize)` and `flops(point)` are the least
    of both together: a loss need not read its inputs again for the gradient.
    """

    grads: tuple[str, ...]
    nbytes: Callable[[Point, int], int]
    flops: Callable[[Point], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpCase:
    """The description of one op for checks, benchmarks, inspection, tests and docs.

    Attributes:
        name: the op's public name, `rooftile.<name>`.
        formula: one line, for tables and docs.
        function: the public function, called as `function(**inputs, **options)`.
        reference: the same signature in plain PyTorch; with float64 (or float32) inputs it is the ground truth.
        eager: the same signature, the formula composed of PyTorch operations as Hugging Face models write it.
        inputs: `inputs(point, dtype, device, generator)` draws the named inputs; floating-point ones are normal.
        outputs: names of the results, in order.
        output_dtypes: by output's name, the dtypes at a point of outputs whose dtype is not the inputs'.
        grads: names of the inputs that get gradients; () for an op without a backward.
        nbytes: `nbytes(point, itemsize, direction)`, the least bytes that must move: each input once, each output once.
        flops: `flops(point, direction)`, the least floating-point operations.
        tolerances: by dtype, then by direction, for each direction that the op has.
        output_tolerances: by output's name, then by dtype, if an output has a lower ceiling than the rest.
        sets: named sets of points; those of `SETS` that make sense for the op.
        peers: baselines besides `eager` and torch.compile of it, which every case has.
        mutates: names of inputs that the op writes; they are drawn again for each call.
        excluded: targets that the op can't be compiled for, with the reason.
        spills: bytes of register spills allowed on any target.
        odd_spills: the same for rows of odd lengths, whose kernels load one element at a time, if it is more.
        deterministic: whether two runs on one GPU must be bit-identical; "asked" if only under
            `torch.use_deterministic_algorithms`, and other kernels run without it: both are checked.
        over: the dimension of the charts of time and memory, if a run has several sizes of it.
        float32_floor: an error that float32 may always have, whatever eager PyTorch's error, in both directions or by
            direction; if it is more than that of all ops (check.rounding_floor), the case gives the reason.
        training: what a call of forward and backward does, if not all gradients and the sums of both directions.
        roof: the roof of a row: "copy", a copy of the same bytes; "gemm", the slower of a streaming read of these
            bytes and a GEMM of as many operations, in the inputs' dtype or the one named.
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
    float32_floor: float | Mapping[Direction, float] = 0.0
    training: Training | None = None
    roof: Roof = "copy"

    def floor(self, dtype: torch.dtype, direction: Direction) -> float:
        """The error that results of that dtype may always have; 0 if only what all ops may have."""
        if dtype != torch.float32:
            return 0.0
        by = self.float32_floor
        return by.get(direction, 0.0) if isinstance(by, Mapping) else by

    def tolerance(self, dtype: torch.dtype, direction: Direction, output: str) -> Tolerance:
        """The tolerance of that output (or gradient, `d<input>`)."""
        return self.output_tolerances.get(output, {}).get(dtype, self.tolerances[dtype][direction])

    @property
    def directions(self) -> tuple[Direction, ...]:
        return ("forward", "backward") if self.grads else ("forward",)

    def together(self) -> OpCase:
        """The case of forward and backward in one call: its gradients, bytes and operations, in any direction."""
        if self.training is None:
            nbytes, flops = self.nbytes, self.flops
            both = Training(
                self.grads,
                lambda p, itemsize: nbytes(p, itemsize, "forward") + nbytes(p, itemsize, "backward"),
                lambda p: flops(p, "forward") + flops(p, "backward"),
            )
        else:
            both = self.training
        return dataclasses.replace(
            self,
            grads=both.grads,
            nbytes=lambda point, itemsize, direction: both.nbytes(point, itemsize),
            flops=lambda point, direction: both.flops(point),
        )

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(self.tolerances)
