"""Tasks and their results: the records that pass between `rooftile inspect` and its worker processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from rooftile.cases import Direction, OpCase, Point
from rooftile.cases.check import DIRECTIONS, NAMES
from rooftile.runtime import Target

# Not `edge` and `softmax`: each awkward size is another kernel; together they take minutes, and no model has them.
SETS = ("tiny", "llm", "sweep", "prefill", "decode", "gemm")
Verdict = Literal["PASS", "FAIL", "excluded"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One call: an op at a point, in a dtype (`"fp32"`, `"fp16"`, `"bf16"`) and a direction.

    `source` is the module whose `CASES` (or registry) the worker finds the op in.
    """

    op: str
    point: Point
    dtype: str
    direction: Direction
    source: str = "rooftile.cases"

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Task:
        return Task(**{**fields, "point": Point(**fields["point"])})


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        hash: Triton's own: two launches with one hash share the binary.
        constants: its `tl.constexpr` arguments, and those that Triton specialized to constants.
        signature: the types of its arguments; those divisible by 16 end in ":16".
        registers, stack, spills, shared, load, store, mistakes, machine_code, instructions: see
            `rooftile.inspect.resources.Resources`.
        compile_ms: the processor time of the first call, from the launcher to the binary, with nothing cached.
    """

    hash: str
    name: str
    constants: dict[str, Any]
    signature: dict[str, str]
    num_warps: int
    num_stages: int
    num_ctas: int
    threads: int
    registers: int
    stack: int
    spills: int
    shared: int
    load: str
    store: str
    compile_ms: float
    mistakes: list[str] = dataclasses.field(default_factory=list)
    machine_code: str = ""
    instructions: int = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel as one op uses it, with the points that share it; without a kernel, the reason.

    `log` is the compiler's output if it failed.
    """

    arch: str
    op: str
    direction: str
    dtype: str
    points: tuple[str, ...]
    kernel: Kernel | None
    verdict: Verdict
    message: str = ""
    log: str = ""

    def as_json(self) -> dict[str, Any]:
        row = dataclasses.asdict(self)
        return {**{k: v for k, v in row.items() if k != "kernel"}, **(row["kernel"] or {})}


def allowed_spills(case: OpCase, kernel: Kernel) -> int:
    """Bytes that the kernel may spill: more if its widest load is 4 bytes or less."""
    return max(case.spills, case.odd_spills if kernel.load in ("1", "2", "4") else 0)


def faults(kernel: Kernel, target: Target, allowed_spills: int = 0) -> list[str]:
    """Why the kernel can't or shouldn't be launched on the target; empty if it can."""
    found = []
    if kernel.spills > allowed_spills:
        found.append(f"spills {kernel.spills} bytes of registers, {allowed_spills} allowed")
    if kernel.shared > target.shared_memory:
        found.append(f"takes {kernel.shared} bytes of shared memory, a block has {target.shared_memory}")
    if kernel.threads > target.max_threads:
        found.append(f"takes {kernel.threads} threads, a block has {target.max_threads}")
    found += [f"the compiler's mistake: {mistake}" for mistake in kernel.mistakes]
    return found


def _distinct(points: Iterable[Point]) -> list[Point]:
    return list({f"{sorted(p.dims.items())} {sorted(p.options.items())}": p for p in points}.values())


def _real_points(case: OpCase, sets: Sequence[str], first: bool) -> list[Point]:
    """The case's points of real sizes, or the first of each set; and the first with the options of each tiny point."""
    real = [p for name in sets if name != "tiny" for p in case.sets.get(name, ())[: 1 if first else None]]
    modes = [p.options for p in case.sets.get("tiny", ())] if "tiny" in sets else []
    return _distinct([*real, *(dataclasses.replace(p, options={**p.options, **o}) for p in real[:1] for o in modes)])


def _with_other_tensors(case: OpCase, points: Iterable[Point], others: Iterable[Point]) -> list[Point]:
    """Those points whose input tensors, by name, dtype and rank, are those of no other point nor of a point before."""

    def tensors(point: Point) -> tuple[tuple[str, torch.dtype, int], ...]:
        inputs = case.inputs(point, case.dtypes[-1], torch.device("meta"), torch.Generator())
        return tuple((name, t.dtype, t.dim()) for name, t in inputs.items())

    seen = set(map(tensors, others))
    found = []
    for point in points:
        if (given := tensors(point)) not in seen:
            found.append(point)
            seen.add(given)
    return found


def plan(
    cases: Iterable[OpCase],
    *,
    sets: Sequence[str] = SETS,
    dtypes: Sequence[torch.dtype] | None = None,
    directions: Sequence[Direction] = DIRECTIONS,
    source: str = "rooftile.cases",
    first: bool = False,
) -> list[Task]:
    """The calls of those cases to compile.

    Real sizes are compiled in all of the case's dtypes, or in those given; tiny ones, which cover options and layouts,
    only in the last of them. With `first`, only the first point of each set of real sizes is compiled, with each tiny
    point's options; and of the tiny points, if there are real ones, only those that are given other tensors.
    """
    tasks = []
    for case in cases:
        chosen = [dtype for dtype in case.dtypes if dtypes is None or dtype in dtypes]
        tiny = list(case.sets.get("tiny", ())) if "tiny" in sets else []
        real = _real_points(case, sets, first)
        if first and tiny and real:
            tiny = _with_other_tensors(case, tiny, real)
        for dtype in chosen:
            tasks += [
                Task(case.name, point, NAMES[dtype], direction, source)
                for point in _distinct([*(tiny if dtype == chosen[-1] else ()), *real])
                for direction in directions
                if direction in case.directions
            ]
    return tasks
