"""`rooftile bench optim`: one step of AdamW over a list of parameters, beside torch.optim.AdamW.

Each implementation is first checked against torch.optim.AdamW in float64, on parameters of the list's shapes cut to at
most 2^16 elements. The time of the device is that of captured steps, over lists that rotate out of the L2 cache; the
host's is that of a step outside of a graph.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from rooftile import runtime
from rooftile.bench import report
from rooftile.bench.info import check_results
from rooftile.bench.measure import ROOF, Effort, Timing, fastest, host_us, interleave, rotation
from rooftile.bench.rows import OURS, Row, compare, gpu_slug, write_json
from rooftile.bench.run import Bench, Settings, brief
from rooftile.bench.streams import copy_calls
from rooftile.bench.timer import Clock, clock
from rooftile.cases.adamw import NUMBERS, TOLERANCES
from rooftile.cases.check import NAMES, relative_error
from rooftile.optim import AdamW

EAGER, FOREACH, FUSED = "eager", "torch foreach", "torch fused"  # eager: one parameter after another
IMPLS = (OURS, EAGER, FOREACH, FUSED)
_CUT = 1 << 16


@dataclasses.dataclass(frozen=True)
class Problem:
    """A list of parameters, which have gradients and moments of their dtype."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    clips: bool = False

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Parameter, gradient and moments read, all but the gradient written; for a norm, the gradient read before."""
        return (8 if self.clips else 7) * self.dtype.itemsize * self.elements


def _llama() -> tuple[tuple[int, ...], ...]:
    """The parameters of Llama-3.2-1B."""
    layer = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
    return ((128256, 2048), *((*layer, (2048,), (2048,)) * 16), (2048,))


_MILLION = 10**6
PROBLEMS = (
    *(Problem(f"{n}M", ((n * _MILLION,),)) for n in (1, 10, 50, 500)),
    Problem("50M clipped", ((50 * _MILLION,),), clips=True),
    Problem("Llama-3.2-1B", _llama(), torch.bfloat16),
    Problem("Llama-3.2-1B clipped", _llama(), torch.bfloat16, clips=True),
)
TINY = (Problem("tiny", ((300,), (17, 33))), Problem("tiny clipped", ((300,), (5, 7)), torch.bfloat16, clips=True))
_OPTIONS = {"lr": 1e-4, "weight_decay": 0.1}
# The check's step moves a parameter by more than bfloat16 rounds it: at 1e-4 one that moves nothing would pass.
_CHECKED = {name: NUMBERS[name] for name in ("lr", "weight_decay")}
_MAX_NORM = 1.0


def _parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Standard normal parameters with standard normal gradients."""
    params = [nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_()) for shape in shapes]
    for p in params:
        p.grad = torch.empty_like(p).normal_()
    return params


def _step(
    impl: str, params: list[nn.Parameter], clips: bool, capturable: bool, options: dict[str, Any] = _OPTIONS
) -> tuple[Callable[[], Any], Any]:
    """A step of an implementation, and its optimizer."""
    if impl == OURS:
        ours = AdamW(params, capturable=capturable, max_grad_norm=_MAX_NORM if clips else None, **options)
        return ours.step, ours
    how = {"foreach": impl == FOREACH, "fused": impl == FUSED}
    theirs = torch.optim.AdamW(params, capturable=capturable, **{**how, **options})
    if not clips:
        return theirs.step, theirs

    def step() -> None:
        nn.utils.clip_grad_norm_(params, _MAX_NORM)
        theirs.step()

    return step, theirs


def _error(impl: str, problem: Problem, device: torch.device, capturable: bool) -> float:
    """The largest relative error of parameters and moments after a step, against torch.optim.AdamW in float64."""
    torch.manual_seed(0)
    shapes = [(min(torch.Size(shape).numel(), _CUT),) for shape in problem.shapes]
    params = _parameters(shapes, problem.dtype, device)
    exact = [nn.Parameter(p.detach().double()) for p in params]
    for p, e in zip(params, exact, strict=True):
        assert p.grad is not None
        e.grad = p.grad.double()
    step, optimizer = _step(impl, params, problem.clips, capturable, _CHECKED)
    reference = torch.optim.AdamW(exact, **_CHECKED)  # type: ignore[arg-type]
    if problem.clips:
        nn.utils.clip_grad_norm_(exact, _MAX_NORM)
    step()
    reference.step()
    worst = 0.0
    for p, e in zip(params, exact, strict=True):
        own, true = optimizer.state[p], reference.state[e]
        pairs = [(p, e), *((own[name], true[name]) for name in ("exp_avg", "exp_avg_sq"))]
        worst = max(worst, *(relative_error(a, b) for a, b in pairs))
    return worst


def measure(
    problem: Problem, impls: Sequence[str], clock: Clock, effort: Effort, device: torch.device, bench: Bench
) -> list[Row]:
    """The rows of a list."""
    options = {"max_grad_norm": _MAX_NORM} if problem.clips else {}
    dims = {"elements": problem.elements, "tensors": len(problem.shapes)}
    place = ("adamw", "forward", problem.name, NAMES[problem.dtype])
    rows = {
        impl: Row(*place, impl, options=options, dims=dims, nbytes=problem.nbytes, method="host clock")
        for impl in impls
    }
    ceiling = TOLERANCES[problem.dtype]["forward"].ceiling
    held = 4 * problem.dtype.itemsize * problem.elements
    copies = rotation(problem.nbytes, clock.l2, held * len(impls), clock.free_bytes()) if clock.measures else 1
    with clock.active():
        lists = [_parameters(problem.shapes, problem.dtype, device) for _ in range(copies)]
        blocks = {}
        for impl, row in rows.items():
            try:
                row.max_error = _error(impl, problem, device, clock.measures)
                # PyTorch rounds the clipped gradient, which is squared, and foreach every operation. Its fused kernel
                # was 1.3e-5 from float64 in float32 on an H100.
                allowed = ceiling if impl == OURS else max(4 * ceiling, 2e-5)
                if not row.max_error <= allowed:
                    row.status, row.message = "FAIL", f"error {row.max_error:.2e} is over {allowed:.2e}"
                    continue
                steps = [_step(impl, params, problem.clips, clock.measures)[0] for params in lists]
                for step in steps:  # which makes the state
                    step()
                row.peak_bytes = clock.peak_bytes(steps[0])
                row.host_us = host_us(steps[0], clock) if clock.measures else None
                blocks[impl] = clock.block(steps)
            except Exception as error:
                row.status, row.message = "error", brief(error)
        roofs = {}
        if clock.measures:
            with torch.no_grad():
                calls = copy_calls(problem.nbytes, copies, device)
                roofs = {f"{ROOF} {name}": clock.block(each) for name, each in calls.items()}
        timings: dict[str, Timing | Exception] = {}
        for name, samples in interleave({**blocks, **roofs}, clock, effort, random.Random(0)):
            if isinstance(samples, Exception):
                timings[name] = samples
            else:
                block = blocks.get(name) or roofs[name]
                timings[name] = Timing(tuple(samples), 0.0, 0, block.method, block.calls)
    roof = fastest([timings[name] for name in roofs]) if roofs else None
    for impl in blocks:
        row, timing = rows[impl], timings[impl]
        if isinstance(timing, Exception):
            row.status, row.message = "error", brief(timing)
            continue
        row.us, row.us_p20, row.us_p80 = timing.us
        row.method, row.samples, row.calls = timing.method, len(timing.samples), timing.calls
        if isinstance(roof, Timing):
            row.gbs, row.roof_gbs = problem.nbytes / row.us / 1e3, problem.nbytes / roof.us[0] / 1e3
            row.roof_fraction = row.gbs / row.roof_gbs
    if clock.measures:
        compare(rows.values())
    bench.rows += rows.values()
    return list(rows.values())


def run(
    names: Sequence[str],
    console: Console,
    results: Path | None = None,
    json: Path | None = None,
    effort: Effort | None = None,
    timer: Clock | None = None,
) -> int:
    """Measure the lists of those names, or all; in the interpreter, tiny ones. With `results`, write
    `<gpu>/training/adamw.json` there.

    Returns 1 if a row of ours is wrong or raised, else 0.

    Raises:
        ValueError: a list is not known, or results are requested in the interpreter.
    """
    device = runtime.default_device()
    timer = timer or clock(device)
    check_results(results, timer.measures)
    problems = PROBLEMS if timer.measures else TINY
    unknown = sorted(set(names) - {p.name for p in problems})
    if unknown:
        where = "" if timer.measures else " in the interpreter"
        raise ValueError(
            f"unknown list {', '.join(unknown)}; known lists{where}: {', '.join(p.name for p in problems)}"
        )
    bench = Bench(Settings(), console, timer, device)
    bench.measure_roofs()
    effort = effort or (Effort(seconds=0.5) if timer.measures else Effort(warmup=0, iters=2))
    for problem in problems:
        if not names or problem.name in names:
            measure(problem, IMPLS, timer, effort, device, bench)
            timer.release()
    report.show(console, bench.rows, timer.measures)
    if results is not None:
        path = results / gpu_slug(str(bench.meta["gpu"])) / "training" / "adamw.json"
        write_json(path, {**bench.meta, "suite": "training"}, bench.rows)
    if json is not None:
        write_json(json, bench.meta, bench.rows)
    return int(any(row.failed for row in bench.rows))
