"""The comparison of `rooftile bench twins`: each twin gets its fastest configuration, then all are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from rooftile import runtime
from rooftile.bench import twins
from rooftile.bench.measure import Effort, Timing, measure
from rooftile.bench.run import Settings, plan, progress, run
from rooftile.bench.timer import Clock, clock
from rooftile.bench.variants import Variant
from rooftile.cases import OpCase, Point, Unsupported
from rooftile.cases.check import NAMES

SUITE = "twins"
BRIEF = Effort(warmup=5, iters=60, seconds=0.01)


def choose(
    case: OpCase, point: Point, dtype: torch.dtype, timer: Clock, device: torch.device
) -> dict[twins.Config, float]:
    """The microseconds of each configuration of a twin that runs. `twins.build` takes the fastest from now on."""
    twin = twins.TWINS[case.name]
    configs = twin.configs(twin.length(point), dtype.itemsize)
    found = {str(i): Variant(str(i), twins.build(case.name, point, c)) for i, c in enumerate(configs)}
    alone = dataclasses.replace(case, roof="gemm")  # without copies of as many bytes
    timings = measure(alone, point, dtype, "forward", list(found.values()), timer, BRIEF, device)
    us = {configs[int(name)]: t.us[0] for name, t in timings.items() if isinstance(t, Timing)}
    if us:
        twins.chosen[case.name, str(point), dtype] = min(us, key=us.__getitem__)
    return us


def choose_all(settings: Settings, timer: Clock, device: torch.device, console: Console) -> None:
    """A configuration for each row of the comparison; none where the twin can't run, whose rows say why."""
    work = [(case, p, d) for case, points in plan(settings).values() for p in points for d in settings.dtypes or ()]
    with progress(console, len(work), settings.verbose) as (begin, done):
        for case, point, dtype in work:
            begin(f"{case.name} {NAMES[dtype]} {point}: configurations of the twin")
            try:
                us = choose(case, point, dtype, timer, device)
            except (ImportError, Unsupported):
                done()
                continue
            times = ", ".join(f"{c.threads}x{c.count} {t:.2f}" for c, t in us.items())
            done(f"{case.name} {NAMES[dtype]} {point}, us by threads and count: {times}")
    timer.release()


def compare(
    ops: Sequence[str],
    console: Console,
    dtypes: Sequence[torch.dtype] | None = None,
    results: Path | None = None,
    json: Path | None = None,
    verbose: bool = False,
) -> int:
    """Measure, show, and write `results/<gpu>/twins/<op>.json`. Returns 1 if a row of ours is wrong or raised, else 0.

    Raises:
        ValueError: an op has no twin, or results are requested in the interpreter.
    """
    if unknown := [op for op in ops if op not in twins.TWINS]:
        raise ValueError(f"no twin of {', '.join(unknown)}; ops with a twin: {', '.join(twins.TWINS)}")
    measures = runtime.MODE is runtime.Mode.GPU
    settings = Settings(
        ops=tuple(ops) or tuple(twins.TWINS),
        sets=("sweep",) if measures else ("tiny",),
        dtypes=dtypes or (torch.bfloat16,),
        directions=("forward",),
        peers=("eager", "compile", twins.CUDA) if measures else ("eager", twins.CUDA),
        json=json,
        results=results,
        suite=SUITE,
        verbose=verbose,
        host=False,
    )
    device = runtime.default_device()
    timer = clock(device)
    if measures:
        choose_all(settings, timer, device, console)
    return run(settings, console, device, timer)
