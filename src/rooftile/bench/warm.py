"""Compiling what a benchmark will run, in several processes at once, before anything is measured.

A suite compiles some hundred kernels, most of them for the baselines. In sequence that takes longer than measuring
them. The processes share out the implementations and run each once; the benchmark finds the binaries on disk.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Sequence

import torch

from rooftile import runtime
from rooftile.bench.rows import TOGETHER, Measured
from rooftile.cases import Point

FEWEST_TASKS = 12  # under which the processes' own start, some ten seconds, is not worth it


@dataclasses.dataclass(frozen=True)
class Task:
    op: str
    point: Point
    dtype: torch.dtype
    direction: Measured
    peers: tuple[str, ...] | None


def _start() -> None:
    import torch._inductor.config

    # Each process compiles by itself, and leaves the choice among configurations, which is measured, to a quiet GPU.
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.autotune_local_cache = False


def compile_task(task: Task) -> None:
    """Run each implementation once. A failure shows later, in its row."""
    from rooftile.bench.measure import bind, draw
    from rooftile.bench.variants import variants
    from rooftile.cases import find_cases

    (case,) = find_cases([task.op])
    case = case.together() if task.direction == TOGETHER else case
    device = runtime.default_device()
    given = draw(case, task.point, task.dtype, task.direction, device, seed=0)
    with torch.set_grad_enabled(task.direction != "forward"):
        for variant in variants(case, task.point, task.peers, task.direction != TOGETHER):
            if variant.function is None:
                continue
            try:
                bind(variant, case, task.point, task.direction, given)()
            except Exception:
                continue
    del given
    if device.type != "cpu":
        torch.get_device_module(device.type).empty_cache()  # the other processes need memory too


def warm(tasks: Sequence[Task], jobs: int, done: Callable[[], None] = lambda: None) -> None:
    """Compile the tasks in `jobs` processes. A process that dies ends the warming, not the benchmark."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=_start) as pool:
        futures = [pool.submit(compile_task, task) for task in tasks]
        for future in concurrent.futures.as_completed(futures):
            if isinstance(future.exception(), concurrent.futures.process.BrokenProcessPool):
                return
            done()


def default_jobs(tasks: int) -> int:
    """Processes to compile in: three quarters of the cores, if there is enough work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(12, 3 * cores // 4, tasks // 4) if tasks >= FEWEST_TASKS and runtime.MODE is runtime.Mode.GPU else 0
