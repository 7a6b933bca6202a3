"""Check one op at one point: outputs or gradients against the float64 reference on the same inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Point
from rooftile.cases.draw import normal

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """The verdict on one output, or one gradient.

    Attributes:
        op: the case's name.
        shape: the point's label.
        options: the options that the op was called with.
        dtype: `"fp32"`, `"fp16"` or `"bf16"`.
        direction: `"forward"` or `"backward"`.
        output: the output's name, or `d<input>` for a gradient.
        error: `|out - ref| / |ref|`, Frobenius norms; NaN if there is nothing to compare.
        tolerance: the largest allowed error.
        eager_error: the same error for eager PyTorch in this dtype.
        passed: the error is within the tolerance, and nothing else is wrong.
        message: any other fault: a wrong shape or dtype, an input overwritten, an exception.
        abs_error: the largest `|out - ref|` of an element; NaN if there is nothing to compare.
    """

    op: str
    shape: str
    options: Mapping[str, Any]
    dtype: str
    direction: Direction
    output: str
    error: float
    tolerance: float
    eager_error: float
    passed: bool
    message: str = ""
    abs_error: float = math.nan

    def as_json(self) -> dict[str, Any]:
        """The row as JSON takes it: NaN and infinity are null."""
        row = dataclasses.asdict(self)
        for name in ("error", "tolerance", "eager_error", "abs_error"):
            row[name] = row[name] if math.isfinite(row[name]) else None
        return row


def relative_error(out: Tensor, ref: Tensor) -> float:
    """`|out - ref| / |ref|` over whole tensors, in float64. Two empty (or zero) tensors differ by 0."""
    out, ref = out.detach(), ref.detach().to(torch.float64)
    # Not vector_norm(ref, inf): a NaN or an infinity must stay one, whatever the norm.
    difference = float(torch.linalg.vector_norm(out.to(torch.float64) - ref))
    if difference == 0.0:
        return 0.0
    scale = float(torch.linalg.vector_norm(ref))
    return difference / scale if scale else math.inf


def largest_error(out: Tensor, ref: Tensor) -> float:
    """The largest `|out - ref|` of an element, in float64; NaN if one is NaN, 0 if there are none."""
    out, ref = out.detach(), ref.detach()
    return float((out.to(torch.float64) - ref.to(torch.float64)).abs().max()) if out.numel() else 0.0


# A ceiling is for an op of Rooftile. Baselines round more often: eager attention in bfloat16 rounds its
# scores, and loses 4.8e-3 to 5.01e-3 on different processors where the ceiling is 5e-3.
PEERS_CEILINGS = 2.0


def _badness(out: Tensor, ref: Tensor) -> float:
    """The relative error; infinite if there is none."""
    error = relative_error(out, ref) if out.shape == ref.shape else math.inf
    return math.inf if math.isnan(error) else error


def rounding_floor(dtype: torch.dtype) -> float:
    """An error that every kernel may have, however small eager PyTorch's error.

    For a type of 8 or 16 bits, half a unit in the last place: the largest error of one correct rounding. For float32,
    two units: the accuracy of a GPU's exp2 and reciprocal square root.
    """
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 1 / torch.iinfo(dtype).max
    return 2 * eps if dtype == torch.float32 else eps / 2


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN in this context, inside ops too, so that an unwritten element shows."""
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
            torch.set_deterministic_debug_mode(mode)


def upcast(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the inputs, in float64 but for integers."""
    return {n: t.to(torch.float64 if t.is_floating_point() else t.dtype, copy=True) for n, t in inputs.items()}


def generator(device: torch.device, seed: int) -> torch.Generator:
    """A source of random numbers on that device. The meta device has none, and needs none."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else tuple(outputs) if isinstance(outputs, list) else (outputs,)


def run_forward(
    function: Callable[..., Any], inputs: Mapping[str, Tensor], point: Point, mutates: Sequence[str] = ()
) -> tuple[Tensor, ...]:
    """The outputs. An input that the function overwrites is passed as a copy."""
    given = {n: t.clone() if n in mutates else t for n, t in inputs.items()}
    with torch.no_grad():
        return as_tuple(function(**given, **point.options))


def run_backward(
    function: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    point: Point,
    grads: Sequence[str],
    output_grads: Sequence[Tensor],
    mutates: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    """The gradients of the inputs named in `grads`, for those gradients of the outputs."""
    leaves = {n: t.detach().requires_grad_(n in grads) for n, t in inputs.items()}
    given = {n: t.clone() if n in mutates else t for n, t in leaves.items()}
    outputs = as_tuple(function(**given, **point.options))
    return torch.autograd.grad(outputs, [leaves[n] for n in grads], list(output_grads))


def _bits(x: Tensor) -> Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(integers[x.element_size()])


@dataclasses.dataclass(frozen=True)
class _Results:
    """One implementation's results, and the names of what it should not have written."""

    tensors: tuple[Tensor, ...]
    overwritten: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Task:
    """The computation at a point in one direction, for any implementation."""

    point: Point
    inputs: dict[str, Tensor]
    grads: tuple[str, ...]
    output_grads: tuple[Tensor, ...]
    direction: Direction

    def run(self, function: Callable[..., Any], mutates: Sequence[str] = ()) -> tuple[Tensor, ...]:
        if self.direction == "forward":
            return run_forward(function, self.inputs, self.point, mutates)
        return run_backward(function, self.inputs, self.point, self.grads, self.output_grads, mutates)

    def run_on_copies(self, function: Callable[..., Any], mutates: Sequence[str]) -> _Results:
        """The results from copies of all inputs, and the names of the copies that were changed."""
        inputs = {n: t.clone() for n, t in self.inputs.items()}
        output_grads = tuple(g.clone() for g in self.output_grads)
        results = dataclasses.replace(self, inputs=inputs, output_grads=output_grads).run(function, mutates)
        overwritten = [n for n, t in inputs.items() if not torch.equal(_bits(t), _bits(self.inputs[n]))]
        for i, g in enumerate(output_grads):
            if not torch.equal(_bits(g), _bits(self.output_grads[i])):
                overwritten.append(f"the gradient of output {i}")
        return _Results(results, tuple(overwritten))

    def in_float64(self) -> _Task:
        output_grads = tuple(g.to(torch.float64) for g in self.output_grads)
        return dataclasses.replace(self, inputs=upcast(self.inputs), output_grads=output_grads)


def _task(
    case: OpCase, point: Point, dtype: torch.dtype, direction: Direction, device: torch.device, seed: int
) -> _Task:
    numbers = generator(device, seed)
    inputs = case.inputs(point, dtype, device, numbers)
    if direction == "forward":
        return _Task(point, inputs, (), (), direction)
    # Shapes of the outputs, from the reference on tensors that hold nothing.
    on_meta = {n: t.to("meta") for n, t in inputs.items()}
    shapes = [tuple(y.shape) for y in as_tuple(case.reference(**on_meta, **point.options))]
    output_grads = tuple(normal(shape, dtype, device, numbers) for shape in shapes)
    return _Task(point, inputs, tuple(n for n in case.grads if n in inputs), output_grads, direction)


def _names(case: OpCase, point: Point, direction: Direction) -> tuple[str, ...]:
    if direction == "forward":
        return case.outputs
    meta = torch.device("meta")
    drawn = case.inputs(point, torch.float32, meta, generator(meta, 0))
    return tuple(f"d{n}" for n in case.grads if n in drawn)


class Truth:
    """What every implementation is compared with at a point: each part is computed when first asked for, and kept.

    The reference takes far longer than an implementation, and a bench compares several with it.

    Args:
        case, point, dtype, direction: of what.
        device: where to run; by default the accelerator, or the CPU under the interpreter.
        seed: inputs, and gradients of the outputs, are a function of it.
    """

    def __init__(
        self,
        case: OpCase,
        point: Point,
        dtype: torch.dtype,
        direction: Direction,
        *,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        from rooftile import runtime

        self.case, self.point, self.dtype, self.direction = case, point, dtype, direction
        device = runtime.default_device() if device is None else torch.device(device)
        self._too_large: str | None = None
        self._draw = functools.partial(_task, case, point, dtype, direction, device, seed)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of the results."""
        return _names(self.case, self.point, self.direction)

    @functools.cached_property
    def task(self) -> _Task:
        return self._draw()

    @functools.cached_property
    def references(self) -> dict[str, Tensor]:
        """The results in float64, by name."""
        return dict(zip(self.names, self.task.in_float64().run(self.case.reference), strict=True))

    @functools.cached_property
    def eager_errors(self) -> dict[str, float]:
        eagers = list(self.task.run(self.case.eager))  # before the reference, which takes more memory
        return {n: relative_error(eagers.pop(0).to(self.expected(n)), ref) for n, ref in self.references.items()}

    def known(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """`eager_errors` and `references`. That they do not fit into memory is found once."""
        if self._too_large is not None:
            raise torch.OutOfMemoryError(self._too_large)
        try:
            return self.eager_errors, self.references
        except torch.OutOfMemoryError as error:
            self._too_large = str(error)
            raise

    def expected(self, name: str) -> torch.dtype:
        """The dtype of a result."""
        if self.direction == "forward":
            return self.case.output_dtypes(self.point).get(name, self.dtype)
        return self.task.inputs[name[1:]].dtype


def _verdict(out: Tensor, ref: Tensor, dtype: torch.dtype, error: float, tolerance: float) -> str:
    """The fault of an output, or ""."""
    if out.shape != ref.shape:
        return f"shape {tuple(out.shape)}, expected {tuple(ref.shape)}"
    if out.dtype != dtype:
        return f"dtype {out.dtype}, expected {dtype}"
    if not math.isfinite(error):
        bad = out.numel() - int(torch.isfinite(out.float()).sum())  # PyTorch can't ask e4m3fn itself
        return f"{bad} of {out.numel()} elements are NaN or infinite" if bad else "the reference is zero, or not finite"
    return "" if error <= tolerance else f"error {error:.2e} is over {tolerance:.2e}"


def check(
    truth: Truth, *, function: Callable[..., Any] | None = None, mutates: Sequence[str] | None = None
) -> list[CheckRow]:
    """One row for each output (forward) or gradient (backward) of the case at that point.

    An error must be at most `min(ceiling, max(2 * eager's error, rounding_floor))`. The floor is that of the inputs'
    dtype or of the output's, whichever is more; a case may have its own for float32. The op's own function runs in
    poisoned memory, and an undeclared change of an input is a fault. A baseline's ceiling is `PEERS_CEILINGS` times
    the op's, or its own. An exception makes FAIL rows with its message.

    Args:
        truth: what to check.
        function: another implementation to check instead of the case's, such as a baseline's. Its memory is not
            poisoned (torch.compile would compile it again outside), and it may change its inputs.
        mutates: inputs that `function` overwrites; it gets copies. Default: the case's.
    """
    case, point, dtype, direction, names = truth.case, truth.point, truth.dtype, truth.direction, truth.names
    rows: list[CheckRow] = []

    def row(
        output: str, error: float, tolerance: float, eager_error: float, message: str, abs_error: float = math.nan
    ) -> None:
        where = (case.name, point.label, dict(point.options), NAMES[dtype], direction, output)
        rows.append(CheckRow(*where, error, tolerance, eager_error, not message, message, abs_error))

    def compare() -> None:
        task, own = truth.task, function is None
        written = case.mutates if mutates is None else tuple(mutates)
        with poisoned() if own else contextlib.nullcontext():
            results = task.run_on_copies(case.function if function is None else function, written)
        outs = list(results.tensors)
        # Poisoned memory selects deterministic kernels; the other kernels are checked too.
        others = (
            list(task.run_on_copies(case.function, written).tensors) if own and case.deterministic == "asked" else []
        )
        if len(outs) != len(names):
            raise RuntimeError(f"{len(outs)} results, expected {len(names)}: {', '.join(names)}")
        eager_errors, refs = truth.known()
        for name in names:  # each is freed before the next is compared
            out, ref, eager_error = outs.pop(0), refs[name], eager_errors[name]
            if others and _badness(other := others.pop(0), ref) > _badness(out, ref):
                out = other
            expected = truth.expected(name)
            allowed = case.tolerance(dtype, direction, name)
            ceiling = allowed.ceiling if own else max(PEERS_CEILINGS * allowed.ceiling, allowed.peers)
            floor = max(rounding_floor(dtype), rounding_floor(expected), case.floor(dtype, direction))
            tolerance = min(ceiling, max(2 * eager_error, floor))
            comparable = out.shape == ref.shape
            error = relative_error(out, ref) if comparable else math.nan
            message = _verdict(out, ref, expected, error, tolerance)
            if own and results.overwritten:
                message = f"overwrote {', '.join(results.overwritten)}; {message}".rstrip("; ")
            row(name, error, tolerance, eager_error, message, largest_error(out, ref) if comparable else math.nan)

    try:
        compare()
    except Exception as error:
        done = len(rows)
        for name in names[done:]:
            ceiling = case.tolerance(dtype, direction, name).ceiling
            row(name, math.nan, ceiling, math.nan, f"{type(error).__name__}: {error}".strip())
        del error
        gc.collect()  # a traceback may keep tensors alive
    return rows


def check_point(
    case: OpCase,
    point: Point,
    dtype: torch.dtype,
    direction: Direction,
    *,
    function: Callable[..., Any] | None = None,
    mutates: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> list[CheckRow]:
    """`check` of one implementation; the arguments are those of `Truth` and `check`."""
    truth = Truth(case, point, dtype, direction, device=device, seed=seed)
    return check(truth, function=function, mutates=mutates)


def check_case(
    case: OpCase,
    sets: Sequence[str],
    dtypes: Sequence[torch.dtype] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Iterator[list[CheckRow]]:
    """The rows of every point of those sets that the case has: at each point, in each dtype, in each direction."""
    for point, dtype, direction in calls(case, sets, dtypes):
        yield check_point(case, point, dtype, direction, device=device)


def calls(
    case: OpCase, sets: Sequence[str], dtypes: Sequence[torch.dtype] | None = None
) -> list[tuple[Point, torch.dtype, Direction]]:
    """Every point of those sets that the case has, in those of its dtypes, or all, in each direction."""
    own = [d for d in case.dtypes if dtypes is None or d in dtypes]
    return list(itertools.product(points(case, sets), own, case.directions))


def points(case: OpCase, sets: Sequence[str]) -> list[Point]:
    """The points of those sets, each once."""
    found: list[Point] = []
    for name in sets:
        found += [p for p in case.sets.get(name, ()) if p not in found]
    return found


def tolerance_rows() -> list[tuple[str, str, str, float, str]]:
    """Every tolerance as (op, output or direction, dtype, ceiling, reason), for the docs."""
    from rooftile.cases import all_cases

    rows: list[tuple[str, str, str, float, str]] = []
    for case in all_cases().values():
        for dtype in case.dtypes:
            for direction in case.directions:
                t = case.tolerances[dtype][direction]
                rows.append((case.name, direction, NAMES[dtype], t.ceiling, t.reason))
            for output, by_dtype in case.output_tolerances.items():
                if dtype in by_dtype:
                    t = by_dtype[dtype]
                    rows.append((case.name, f"{output} (forward)", NAMES[dtype], t.ceiling, t.reason))
    return rows
