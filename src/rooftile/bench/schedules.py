"""`rooftile bench schedules`: the ways to run one GEMM beside each other, each with the best of its configurations.

A tuned table keeps the winner alone and can't say what a schedule or a kernel is worth. Here every way is a row: a few
of its configurations are checked and timed, as `rooftile tune` does it, and the best of each way is then timed in turns
with cuBLAS.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rooftile import runtime
from rooftile.bench import workloads
from rooftile.bench.info import check_results, machine
from rooftile.bench.measure import SAMPLES
from rooftile.bench.rows import gpu_slug, write_whole
from rooftile.bench.run import progress
from rooftile.bench.timer import Clock, clock
from rooftile.bench.tune.search import PEER, Dead, Search, Seconds, brief
from rooftile.bench.tune.space import TUNABLES, Tunable, label
from rooftile.cases.draw import normal
from rooftile.ops.gemm import choose
from rooftile.ops.gemm.config import GemmConfig, Problem, WeightFormat
from rooftile.ops.gemm.packing import quantize_int4, quantize_int8, unpack_int4
from rooftile.ops.gemm.weight_only import int4_linear, int8_linear

Ways = dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class QuantizedProblem:
    """x (m, k) in bfloat16, a weight (n, k) of int8, or of int4 in groups."""

    m: int
    n: int
    k: int
    group: int

    @property
    def problem(self) -> Problem:
        weight: WeightFormat = "int4" if self.group else "int8"
        return Problem(self.m, self.n, self.k, torch.bfloat16, weight=weight, group=self.group)


class QuantizedWeights:
    """The part of a `Tunable` that a comparison needs, of `int8_linear` and `int4_linear`."""

    peer = "cuBLAS, bfloat16"

    def __init__(self, name: str) -> None:
        self.name = self.table = name

    def describe(self, p: QuantizedProblem) -> dict[str, Any]:
        return {"m": p.m, "n": p.n, "k": p.k, "dtype": "bf16"}

    def nbytes(self, p: QuantizedProblem) -> int:
        return 2 * p.m * (p.k + p.n) + p.n * p.k // (2 if p.group else 1)

    def fields(self, config: GemmConfig) -> dict[str, Any]:
        return dataclasses.asdict(config)

    def draw(self, p: QuantizedProblem, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
        weight = normal((p.n, p.k), torch.float32, device, numbers).mul_(p.k**-0.5)
        q, scale = quantize_int4(weight, p.group) if p.group else quantize_int8(weight)
        x = normal((p.m, p.k), torch.bfloat16, device, numbers)
        return {"x": x, "weight": q, "scale": scale, "dense": weight.bfloat16()}

    def call(self, p: QuantizedProblem, inputs: Mapping[str, Tensor], config: GemmConfig) -> Tensor:
        op = int4_linear if p.group else int8_linear
        return op(inputs["x"], inputs["weight"], inputs["scale"], config=config)

    def reference(self, p: QuantizedProblem, inputs: Mapping[str, Tensor]) -> Tensor:
        q, scale = inputs["weight"], inputs["scale"]
        if p.group:
            q = unpack_int4(q, p.group).unflatten(1, (-1, p.group))
            return F.linear(inputs["x"].float(), (q * scale[:, :, None]).flatten(1))
        return F.linear(inputs["x"].float(), q * scale[:, None])

    def call_peer(self, p: QuantizedProblem, inputs: Mapping[str, Tensor]) -> Tensor:
        return F.linear(inputs["x"], inputs["dense"])

    def limit(self, p: QuantizedProblem) -> float:
        return 4e-3


# block_m, block_n, block_k, num_warps, num_stages of a Hopper tile: what tuned tables have most.
_TILES = (
    *((128, 256, 64, 8, 4), (256, 128, 64, 8, 4), (128, 128, 64, 8, 6), (128, 192, 64, 8, 5)),
    *((64, 256, 64, 4, 4), (64, 128, 128, 4, 4), (64, 64, 128, 4, 6)),
)
_PINGPONG = ((128, 128, 64, 8, 6), (64, 256, 64, 8, 5), (64, 128, 64, 8, 7))


def _hopper(tile: Sequence[int], pingpong: bool = False) -> GemmConfig:
    m, n, k, warps, stages = tile
    return GemmConfig("hopper", m, n, k, 8, 1, warps, stages, pingpong)


def hopper_schedules(p: Problem, target: runtime.Target) -> Ways:
    """The schedules of the Hopper GEMM, and the skinny kernel where x has few rows."""
    ways: Ways = {
        "data-parallel": [_hopper(t) for t in _TILES if t[0] < 2 * max(p.m, 64)],
        "ping-pong": [_hopper(t, pingpong=True) for t in _PINGPONG if t[0] < 2 * max(p.m, 64)],
    }
    if p.m <= 64:
        block_m = max(16, 1 << (p.m - 1).bit_length())
        ways["skinny"] = [GemmConfig("skinny", block_m, 64, 128, 1, split, 4, 4) for split in (1, 2, 4)]
    return {name: [c for c in some if choose.can_implement(p, c, target) is None] for name, some in ways.items()}


def quantized_kernels(q: QuantizedProblem, target: runtime.Target) -> Ways:
    """The kernels of a quantized weight: through shared memory, and of one row of x."""
    p = q.problem
    found = list(choose.candidates(p, target))
    base = next(c for c in found if c.kernel == "skinny")
    skinny = [base, dataclasses.replace(base, split_k=2 * base.split_k), dataclasses.replace(base, num_stages=3)]
    skinny += [dataclasses.replace(base, block_n=n, split_k=split) for n in (16, 32) for split in (1, 2)]
    ways: Ways = {"skinny": skinny}
    for kernel in ("gemv", "gemv_imma"):
        if some := [c for c in found if c.kernel == kernel]:
            ways[kernel] = some
    return {
        name: [c for c in dict.fromkeys(some) if choose.can_implement(p, c, target) is None]
        for name, some in ways.items()
    }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A file of results: an op, its problems, and the ways to run them."""

    tunable: Any
    problems: Callable[[], list[Any]]
    ways: Callable[[Any, runtime.Target], Ways]


def _linear(rows: Sequence[int], names: Sequence[str], squares: Sequence[int] = ()) -> list[Problem]:
    of: Tunable = TUNABLES["linear"]
    shapes = {(p.n, p.k) for m in ("llama-3-8b", "qwen2.5-7b") for p in workloads.load(m)[1] if p.name in names}
    sizes = [(m, n, k) for n, k in sorted(shapes) for m in rows] + [(s, s, s) for s in squares]
    return [of.problem(*size, torch.bfloat16, "ieee") for size in sizes]


def _quantized(group: int) -> list[QuantizedProblem]:
    shapes = ((28672, 4096), (6144, 4096), (4096, 4096), (4096, 14336))
    return [QuantizedProblem(m, n, k, group) for n, k in shapes for m in (1, 4, 8, 16)]


COMPARISONS: dict[str, Comparison] = {
    "linear": Comparison(
        TUNABLES["linear"],
        lambda: _linear((16, 64, 128, 256, 512, 2048), ("qkv", "o", "gate_up", "down"), (2048, 4096, 8192)),
        hopper_schedules,
    ),
    "int8_linear": Comparison(QuantizedWeights("int8_linear"), lambda: _quantized(0), quantized_kernels),
    "int4_linear": Comparison(QuantizedWeights("int4_linear"), lambda: _quantized(128), quantized_kernels),
}


def _compile(name: str, problem: Any, config: Any) -> None:
    """Run a configuration once in a process of its own, so that its kernel is found on disk."""
    tunable, device = COMPARISONS[name].tunable, runtime.default_device()
    inputs = tunable.draw(problem, device, torch.Generator(device).manual_seed(0))
    with torch.no_grad():
        tunable.call(problem, inputs, config)
    torch.accelerator.synchronize()


def compile_ahead(name: str, problems: Sequence[Any], target: runtime.Target, jobs: int) -> None:
    """Compile every configuration at the smallest of the problems that it runs."""
    comparison = COMPARISONS[name]
    tasks: dict[tuple[Any, int], tuple[Any, Any]] = {}
    for p in sorted(problems, key=comparison.tunable.nbytes):
        for c in (c for some in comparison.ways(p, target).values() for c in some):
            # Kernels of quantized weights and of one row are compiled for sizes.
            tasks.setdefault((c, 0 if name == "linear" else p.k), (p, c))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        done = [pool.submit(_compile, name, p, c) for p, c in tasks.values()]
        for future in done:
            with contextlib.suppress(Exception):  # the comparison says what is wrong with it
                future.result()


def compare(
    name: str, problem: Any, timer: Clock, device: torch.device, target: runtime.Target, seconds: Seconds
) -> list[dict[str, Any]]:
    """A row for each way to run the problem, and one for the library's GEMM.

    Raises:
        Dead: the device can't be used any more in this process.
    """
    comparison = COMPARISONS[name]
    tunable, ways = comparison.tunable, comparison.ways(problem, target)
    rows: list[dict[str, Any]] = []
    with timer.active(), torch.no_grad():
        s = Search(tunable, problem, timer, device, seconds, lambda text: None)
        best: dict[str, Any] = {}
        for way, configs in ways.items():
            for c in configs:
                s.attempt(c)
            if right := [c for c in configs if c in s.times]:
                best[way] = min(right, key=s.times.__getitem__)
        final = s.race([*dict.fromkeys(best.values()), PEER], seconds.final, SAMPLES)
        sizes = tunable.describe(problem)
        flops = 2 * problem.m * problem.n * problem.k
        peer = final.get(PEER)

        def row(way: str, config: Any, us: float | None, error: float | None, message: str) -> dict[str, Any]:
            tflops = None if us is None else flops / us / 1e6
            ratio = None if us is None or peer is None else 1e6 * peer / us
            fields = None if config is None else tunable.fields(config)
            figures = {"us": us, "tflops": tflops, "vs_peer": ratio, "error": error}
            tidy = {k: None if v is None else float(f"{v:.5g}") for k, v in figures.items()}
            return {"op": name, **sizes, "schedule": way, **tidy, "config": fields, "message": message}

        for way, configs in ways.items():
            if (c := best.get(way)) is None:
                why = "" if not configs else brief(ValueError(s.failed.get(label(tunable, configs[0]), "wrong")))
                rows.append(row(way, None, None, None, why or "no configuration takes this problem"))
            else:
                us = 1e6 * final[c] if c in final else None
                rows.append(row(way, c, us, s.errors.get(c), "" if us else "failed in the last race"))
        rows.append(row(tunable.peer, None, None if peer is None else 1e6 * peer, None, ""))
        del s
    timer.release()
    return rows


def show(console: Console, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    ways = list(dict.fromkeys(r["schedule"] for r in rows))
    table = Table("M", "N", "K", *(f"{w}, us" for w in ways), title=name, title_justify="left")
    for m, n, k in dict.fromkeys((r["m"], r["n"], r["k"]) for r in rows):
        found = {r["schedule"]: r["us"] for r in rows if (r["m"], r["n"], r["k"]) == (m, n, k)}
        table.add_row(str(m), str(n), str(k), *("–" if found.get(w) is None else f"{found[w]:.2f}" for w in ways))
    Console(file=console.file, width=176).print(table)


def to_json(meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The file's text: one row on each line."""
    lines = ",\n".join(json.dumps(r) for r in rows)
    return '{"meta": ' + json.dumps(dict(meta), indent=1) + ',\n"rows": [\n' + lines + "\n]}\n"


def run(
    names: Sequence[str],
    console: Console,
    results: Path | None = None,
    *,
    jobs: int = 12,
    timer: Clock | None = None,
    device: torch.device | None = None,
) -> int:
    """Compare, show, and write `results/<gpu>/schedules/<name>.json`. 1 where a way failed on the device, else 0.

    Raises:
        ValueError: a comparison is not known, or results are asked of the interpreter.
    """
    if unknown := [name for name in names if name not in COMPARISONS]:
        raise ValueError(f"unknown comparison {', '.join(unknown)}; known: {', '.join(COMPARISONS)}")
    measures = runtime.MODE is runtime.Mode.GPU
    check_results(results, measures)
    device = device or runtime.default_device()
    target, timer = runtime.target(device), timer or clock(device)
    seconds = Seconds() if measures else Seconds(0.0, 0.0, 0.0)
    code = 0
    for name in names or COMPARISONS:
        began, problems = time.monotonic(), COMPARISONS[name].problems()
        if measures and jobs:
            compile_ahead(name, problems, target, jobs)
        compiled = time.monotonic()
        rows: list[dict[str, Any]] = []
        with progress(console, len(problems)) as (begin, done):
            for p in problems:
                begin(f"{name} {p.m}x{p.n}x{p.k}")
                try:
                    rows += compare(name, p, timer, device, target, seconds)
                except Dead as error:
                    console.print(f"{name} {p.m}x{p.n}x{p.k}: {error}", style="red", markup=False)
                    code = 1
                    break
                done()
        show(console, name, rows)
        took = f"{compiled - began:.0f} s of compiling, {time.monotonic() - compiled:.0f} s of measuring"
        console.print(f"{name}: {took}", highlight=False)
        if results is not None:
            meta = machine()
            path = results / gpu_slug(str(meta["gpu"])) / "schedules" / f"{name}.json"
            write_whole(path, to_json(meta, rows))
            console.print(f"written to {path}", soft_wrap=True, highlight=False)
        if code:
            break
    return code
