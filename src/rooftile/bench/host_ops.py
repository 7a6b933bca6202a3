"""`rooftile bench --host`: the host's time for one call of an op, beside that of the PyTorch op that it replaces.

Tensors are so small that the host takes longer to issue a call than the GPU to run it. Calls are issued back to back in
bursts that the GPU's queue holds, and the GPU is waited for between bursts, outside of the time. Ours and the baseline
take turns; a time is the median of the bursts.

An op that replaces no PyTorch op is compared with Triton's launcher: `kernel[grid](...)` for each kernel that it
launches, with the outputs allocated before.

With attention, its first call is measured too (`first_call`).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rooftile
from rooftile import runtime
from rooftile.bench import first_call
from rooftile.bench.host import launcher_call, smallest
from rooftile.bench.info import check_results, machine
from rooftile.bench.measure import draw
from rooftile.bench.rows import gpu_slug, write_whole
from rooftile.bench.timer import Call, Clock, burst_seconds, clock
from rooftile.cases import find_cases

DIRECTIONS = ("forward", "forward with gradients", "forward and backward")
LAUNCHER = "Triton's launcher"
BURST = 40  # calls, each of some ten launches at most: the queue of a GPU holds a thousand
BURSTS = 25
# The limit of a call: the larger of a factor times its baseline and some microseconds more.
LIMITS = {False: (1.5, 8.0), True: (2.0, 15.0)}  # by whether gradients are recorded


@dataclasses.dataclass(frozen=True)
class Problem:
    """An op at one small shape.

    `make(device)` gives the tensors by name; `ours` and `baseline` take them by name. `grads` names those that get
    gradients in the directions with gradients; an op without any is measured forward alone.
    """

    op: str
    shape: str
    baseline: str
    make: Callable[[torch.device], dict[str, Tensor]]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    grads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class HostRow:
    op: str
    direction: str
    shape: str
    baseline: str
    us: float
    baseline_us: float

    @property
    def limit_us(self) -> float:
        factor, more = LIMITS[self.direction != "forward"]
        return max(factor * self.baseline_us, self.baseline_us + more)


def _random(**shapes: Sequence[int]) -> Callable[[torch.device], dict[str, Tensor]]:
    """Tensors of those shapes, standard normal in bfloat16."""
    return lambda device: {name: torch.randn(*n, dtype=torch.bfloat16, device=device) for name, n in shapes.items()}


def _decoding(device: torch.device) -> dict[str, Tensor]:
    tensors = _random(q=(1, 1, 8, 64), k=(1, 256, 8, 64), v=(1, 256, 8, 64))(device)
    return {**tensors, "lengths": torch.full((1,), 256, dtype=torch.int32, device=device)}


def _rotating(device: torch.device) -> dict[str, Tensor]:
    tensors = _random(q=(1, 8, 64, 64), k=(1, 8, 64, 64))(device)
    angles = torch.randn(64, 32, device=device).repeat(1, 2)
    return {**tensors, "cos": angles.cos().bfloat16(), "sin": angles.sin().bfloat16()}


def _eager_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE as Hugging Face's models compute it."""

    def half(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    return q * cos + half(q) * sin, k * cos + half(k) * sin


def _looking_up(device: torch.device) -> dict[str, Tensor]:
    return {**_random(weight=(1024, 512))(device), "ids": torch.arange(16, device=device)}


def _classifying(device: torch.device) -> dict[str, Tensor]:
    return {**_random(x=(16, 1024))(device), "target": torch.arange(16, device=device)}


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


PROBLEMS = (
    Problem(
        "rms_norm", "16 x 1024", "F.rms_norm", _random(x=(16, 1024), w=(1024,)),
        lambda x, w: rooftile.rms_norm(x, w), lambda x, w: F.rms_norm(x, (1024,), w, 1e-6), ("x", "w"),
    ),
    Problem(
        "add_rms_norm", "16 x 1024", "add, F.rms_norm", _random(x=(16, 1024), r=(16, 1024), w=(1024,)),
        lambda x, r, w: rooftile.add_rms_norm(x, r, w)[0], lambda x, r, w: F.rms_norm(x + r, (1024,), w, 1e-6),
        ("x", "r", "w"),
    ),
    Problem(
        "layer_norm", "16 x 1024", "F.layer_norm", _random(x=(16, 1024), w=(1024,), b=(1024,)),
        lambda x, w, b: rooftile.layer_norm(x, w, b), lambda x, w, b: F.layer_norm(x, (1024,), w, b), ("x", "w", "b"),
    ),
    Problem(
        "softmax", "16 x 1024", "torch.softmax", _random(x=(16, 1024)),
        lambda x: rooftile.softmax(x), lambda x: torch.softmax(x, -1), ("x",),
    ),
    Problem(
        "kl_div", "16 x 1024", "F.kl_div", _random(x=(16, 1024), t=(16, 1024)),
        lambda x, t: rooftile.kl_div(x, t, reduction="sum"), lambda x, t: F.kl_div(x, t, reduction="sum"), ("x",),
    ),
    Problem(
        "cross_entropy", "16 x 1024", "F.cross_entropy", _classifying,
        lambda x, target: rooftile.cross_entropy(x, target), lambda x, target: F.cross_entropy(x, target), ("x",),
    ),
    Problem(
        "silu_mul", "16 x 1024", "F.silu, mul", _random(g=(16, 1024), u=(16, 1024)),
        lambda g, u: rooftile.silu_mul(g, u), lambda g, u: F.silu(g) * u, ("g", "u"),
    ),
    Problem(
        "gelu_mul", "16 x 1024", "F.gelu, mul", _random(g=(16, 1024), u=(16, 1024)),
        lambda g, u: rooftile.gelu_mul(g, u), lambda g, u: F.gelu(g) * u, ("g", "u"),
    ),
    Problem(
        "rope", "8 heads of 64 x 64", "eager formula", _rotating,
        lambda q, k, cos, sin: rooftile.rope(q, k, cos, sin, layout="bhtd")[0],
        lambda q, k, cos, sin: _eager_rope(q, k, cos, sin)[0], ("q",),
    ),
    Problem(
        "embedding", "16 of 1024 x 512", "F.embedding", _looking_up,
        lambda ids, weight: rooftile.embedding(ids, weight), lambda ids, weight: F.embedding(ids, weight),
    ),
    Problem(
        "linear", "1 x 512 x 512", "F.linear", _random(x=(1, 512), w=(512, 512)),
        lambda x, w: rooftile.linear(x, w), lambda x, w: F.linear(x, w), ("x", "w"),
    ),
    Problem(
        "linear", "64 x 512 x 512", "F.linear", _random(x=(64, 512), w=(512, 512)),
        lambda x, w: rooftile.linear(x, w), lambda x, w: F.linear(x, w), ("x", "w"),
    ),
    Problem(
        "matmul", "64 x 512 x 512", "torch.matmul", _random(a=(64, 512), b=(512, 512)),
        lambda a, b: rooftile.matmul(a, b), lambda a, b: torch.matmul(a, b), ("a", "b"),
    ),
    Problem(
        "gated_linear", "64 x 512 x 512", "F.linear, F.silu, mul", _random(x=(64, 512), w=(1024, 512)),
        lambda x, w: rooftile.gated_linear(x, w), lambda x, w: _gated(x, w), ("x", "w"),
    ),
    Problem(
        "gated_mlp", "64 x 512 x 512 x 512", "F.linear, F.silu, mul, F.linear",
        _random(x=(64, 512), w=(1024, 512), down=(512, 512)),
        lambda x, w, down: rooftile.gated_mlp(x, w, down), lambda x, w, down: F.linear(_gated(x, w), down),
        ("x", "w", "down"),
    ),
    Problem(
        "attention", "8 heads of 64 x 64", "SDPA", _random(q=(1, 8, 64, 64), k=(1, 8, 64, 64), v=(1, 8, 64, 64)),
        lambda q, k, v: rooftile.attention(q, k, v, causal=True, layout="bhtd"),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ("q", "k", "v"),
    ),
    Problem(
        "decode_attention", "8 heads of 64, 256 keys", "SDPA", _decoding,
        lambda q, k, v, lengths: rooftile.decode_attention(q, k, v, lengths, layout="bthd"),
        lambda q, k, v, lengths: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))),
    ),
)  # fmt: skip


def _calls(function: Callable[..., Any], tensors: Mapping[str, Tensor], grads: Sequence[str], direction: str) -> Call:
    """A call in that direction; the caller sets the mode that records gradients."""
    if direction == "forward":
        return lambda: function(**tensors)
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items() if name in grads}
    given = {**tensors, **leaves}
    if direction == "forward with gradients":
        return lambda: function(**given)
    wanted = tuple(leaves.values())
    gradient = torch.randn_like(function(**given))
    return lambda: torch.autograd.grad(function(**given), wanted, gradient)


def _in_turns(ours: Call, theirs: Call, timer: Clock, bursts: int, burst: int) -> tuple[float, float]:
    """Microseconds of both, after their first calls have compiled."""
    for _ in range(3):
        ours()
        theirs()
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(bursts):
        for call, found in zip((ours, theirs), taken, strict=True):
            found.append(1e6 * burst_seconds(call, timer, burst))
    return statistics.median(taken[0]), statistics.median(taken[1])


def measure(
    problem: Problem, timer: Clock, device: torch.device, bursts: int = BURSTS, burst: int = BURST
) -> Iterator[HostRow]:
    """The rows of a problem, one for each of its directions."""
    with timer.active():
        tensors = problem.make(device)
        for direction in DIRECTIONS if problem.grads else DIRECTIONS[:1]:
            with torch.set_grad_enabled(direction != "forward"):
                ours = _calls(problem.ours, tensors, problem.grads, direction)
                theirs = _calls(problem.theirs, tensors, problem.grads, direction)
                us = _in_turns(ours, theirs, timer, bursts, burst)
            yield HostRow(problem.op, direction, problem.shape, problem.baseline, *us)


def measure_beside_launcher(
    name: str, timer: Clock, device: torch.device, bursts: int = BURSTS, burst: int = BURST
) -> HostRow:
    """An op that replaces no PyTorch op, at its case's smallest point.

    Raises:
        RuntimeError: the op launches nothing through Triton's launcher.
    """
    (case,) = find_cases([name])
    point = smallest(case, torch.bfloat16)
    with timer.active(), torch.no_grad():
        tensors = draw(case, point, torch.bfloat16, "forward", device, seed=0).tensors
        ours: Call = lambda: case.function(**tensors, **point.options)  # noqa: E731
        theirs = launcher_call(ours, f"{name} at {point}")
        us = _in_turns(ours, theirs, timer, bursts, burst)
    return HostRow(name, "forward", point.label, LAUNCHER, *us)


def to_json(meta: Mapping[str, Any], rows: Sequence[HostRow]) -> str:
    """One row on each line."""
    lines = ",\n".join(f"  {json.dumps({**dataclasses.asdict(row), 'limit_us': row.limit_us})}" for row in rows)
    head = json.dumps(meta, indent=1, ensure_ascii=False).replace("\n", "\n ")
    return f'{{\n "meta": {head},\n "rows": [\n{lines}\n ]\n}}\n'


def show(console: Console, rows: Sequence[HostRow]) -> None:
    table = Table(title="Host microseconds a call", title_justify="left")
    for column in ("op", "shape", "direction", "baseline"):
        table.add_column(column)
    for column in ("us", "baseline us", "ratio", "limit us", ""):
        table.add_column(column, justify="right")
    for row in rows:
        figures = [f"{x:.1f}" for x in (row.us, row.baseline_us)]
        ratio, over = f"{row.us / row.baseline_us:.2f}", "over" if row.us > row.limit_us else ""
        table.add_row(row.op, row.shape, row.direction, row.baseline, *figures, ratio, f"{row.limit_us:.1f}", over)
    console.print(table)


def show_first_calls(console: Console, found: Sequence[first_call.FirstCall]) -> None:
    table = Table(title="First call of a process", title_justify="left")
    for column in ("call", "Triton's cache"):
        table.add_column(column)
    for column in ("s", "limit s", ""):
        table.add_column(column, justify="right")
    for f in found:
        over = "over" if f.seconds > f.limit_s else ""
        table.add_row(f.call, f.cache, f"{f.seconds:.2f}", f"{f.limit_s:g}", over)
    console.print(table)


def run(
    names: Sequence[str],
    console: Console,
    results: Path | None = None,
    json_file: Path | None = None,
    *,
    timer: Clock | None = None,
    device: torch.device | None = None,
) -> int:
    """Measure, show, and write `results/<gpu>/host/host.json`. Returns 1 if an op could not be measured, else 0.

    Args:
        names: ops; by default all of `PROBLEMS`, and all with a case that replace no PyTorch op.

    Raises:
        ValueError: an op is not known, or results are asked of the interpreter.
    """
    device = device or runtime.default_device()
    measures = runtime.MODE is runtime.Mode.GPU
    check_results(results, measures)
    timer = timer or clock(device)
    effort = {} if measures else {"bursts": 1, "burst": 1}
    cases = [case.name for case in find_cases(list(names) or None)]
    replacing = {problem.op for problem in PROBLEMS}
    rows: list[HostRow] = []
    first_calls: list[first_call.FirstCall] = []
    code = 0

    def attempt(name: str, measured: Callable[[], list[Any]], found: list[Any] = rows) -> None:
        nonlocal code
        try:
            found.extend(measured())
        except Exception as error:  # an op that fails is reported, and the others are measured
            code = 1
            console.print(f"{name}: {type(error).__name__}: {str(error)[:200]}", style="red", markup=False)

    for problem in PROBLEMS:
        if problem.op in cases:
            attempt(problem.op, lambda problem=problem: list(measure(problem, timer, device, **effort)))  # type: ignore[misc]
    if measures:  # the interpreter has no launcher
        for name in cases:
            if name not in replacing:
                attempt(name, lambda name=name: [measure_beside_launcher(name, timer, device, **effort)])  # type: ignore[misc]
        if "attention" in cases:
            attempt("first call of attention", first_call.measure, first_calls)
    show(console, rows)
    if first_calls:
        show_first_calls(console, first_calls)
    if not measures:
        console.print("In Triton's interpreter: these times mean nothing.", style="yellow")
    meta = {**machine(), "first_calls": [dataclasses.asdict(found) for found in first_calls]}
    for path in (results and results / gpu_slug(str(meta["gpu"])) / "host" / "host.json", json_file):
        if path is not None:
            write_whole(path, to_json(meta, rows))
            console.print(f"written to {path}", soft_wrap=True, highlight=False)
    return code
