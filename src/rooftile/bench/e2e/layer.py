"""`rooftile bench e2e --layer`: the kernels of one decode layer, each beside cuBLAS's or SDPA's.

First GEMMs and attention alone, as others publish them; then what the engine launches, with norms and residual adds
fused. Checks and clocks are those of `rooftile bench`: weights rotate out of the L2 cache, as in a model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rooftile import runtime
from rooftile.bench import report
from rooftile.bench.e2e.model import check_context
from rooftile.bench.info import check_results
from rooftile.bench.measure import Effort
from rooftile.bench.rows import OURS, Row, best_peer, gpu_slug, groups, write_json
from rooftile.bench.run import Bench
from rooftile.bench.run import Settings as BenchSettings
from rooftile.bench.timer import clock
from rooftile.bench.workloads import MODELS, read
from rooftile.cases import OpCase, Point, find_cases
from rooftile.cases.check import NAMES
from rooftile.engine.config import ModelConfig

if TYPE_CHECKING:
    from rooftile.bench.e2e import Settings

PEERS = (
    "eager", "rms_norm+cublas", "cublas+silu_mul", "rms_norm+gated_linear",
    "sdpa flash", "sdpa cudnn", "sdpa efficient",
)  # fmt: skip
ALONE = ("qkv", "attention", "output", "gate_up", "down")
SECONDS = 0.05  # of device time for each implementation, at most
CAPTION = (
    "Microseconds of one kernel of a layer, median, weights out of the L2 cache, one CUDA graph. Best CUDA: the "
    "fastest correct baseline; eager PyTorch's GEMMs are cuBLAS's, its attention is SDPA's flash, cuDNN or efficient "
    "kernel over exactly the cached keys. Ratio: best CUDA over Rooftile."
)


def _point(case: OpCase, label: str, **dims: int) -> Point:
    """The first of a case's decode points, with other sizes."""
    first = case.sets["decode"][0]
    return dataclasses.replace(first, label=label, dims={**first.dims, **dims})


def points(c: ModelConfig, batch: int, context: int) -> Iterator[tuple[str, OpCase, Point]]:
    """What a layer computes for one token of each of `batch` sequences of `context` tokens, by name."""
    names = ["linear", "rms_norm_linear", "rms_norm_gated_linear", "decode_attention"]
    cases = {case.name: case for case in find_cases(names)}
    gemm, attention = cases["linear"], cases["decode_attention"]
    width = c.heads * c.head_dim
    qkv = width + 2 * c.kv_heads * c.head_dim

    def linear(name: str, k: int, n: int, bias: bool, residual: bool = False) -> tuple[str, OpCase, Point]:
        label = f"{batch}x{k}->{n}" + " bias" * bias + " residual" * residual
        sizes = {"rows": batch, "k": k, "n": n, "out": n, "has_bias": int(bias), "has_residual": int(residual)}
        return name, gemm, _point(gemm, label, **sizes)

    def normed(name: str, op: str, n: int, bias: bool) -> tuple[str, OpCase, Point]:
        case = cases[op]
        label = f"{batch}x{c.hidden}->{n}" + " bias" * bias
        sizes = {"rows": batch, "k": c.hidden, "n": n, "has_bias": int(bias)}
        if "out" in case.sets["decode"][0].dims:
            sizes["out"] = n // 2
        return name, case, _point(case, label, **sizes)

    sizes = {"batch": batch, "seq_len": context, "heads": c.heads, "kv_heads": c.kv_heads}
    sizes |= {"head_dim": c.head_dim, "value_dim": c.head_dim}
    label = f"B{batch} T{context} H{c.heads}/{c.kv_heads} D{c.head_dim}"
    yield linear("qkv", c.hidden, qkv, c.qkv_bias)
    yield "attention", attention, _point(attention, label, **sizes)
    yield linear("output", width, c.hidden, c.o_bias)
    yield linear("gate_up", c.hidden, 2 * c.intermediate, c.mlp_bias)
    yield linear("down", c.intermediate, c.hidden, c.mlp_bias)
    yield normed("norm_qkv", "rms_norm_linear", qkv, c.qkv_bias)
    yield "attention_paged", attention, _point(attention, f"{label} page 64", page=64, **sizes)
    yield linear("output_add", width, c.hidden, c.o_bias, residual=True)
    yield normed("norm_gate_up_act", "rms_norm_gated_linear", 2 * c.intermediate, c.mlp_bias)
    yield linear("down_add", c.intermediate, c.hidden, c.mlp_bias, residual=True)


def run_layer(settings: Settings, console: Console) -> int:
    """Measure, show and write. Returns 1 if one of our kernels is wrong or has raised, else 0.

    Raises:
        ValueError: a model is not known or made for fewer tokens, or results are asked of the interpreter.
    """
    device = runtime.default_device()
    timer = clock(device)
    check_results(settings.results, timer.measures)
    s = settings.filled(timer.measures)
    assert s.prompt is not None
    for name in s.models:
        check_context(name, s.prompt)
    effort = Effort(seconds=min(SECONDS, s.seconds)) if timer.measures else Effort(warmup=0, iters=2)
    peers = (*PEERS, *(("compile",) if timer.measures else ()))  # compiling for a CPU takes long
    bench = Bench(BenchSettings(peers=peers, effort=effort), console, timer, device)
    bench.measure_roofs()
    bench.meta.update(suite="e2e", caption=CAPTION, tuning="on" if s.tuned else "off")
    failed = False
    every: list[Row] = []
    for name in s.models:
        title, values = read(name, MODELS)
        config = ModelConfig.from_hf(values)
        for batch in s.batches:
            rows: list[Row] = []
            meta = {**bench.meta, "model": title, "config": values, "context": s.prompt}
            untuned = "" if s.tuned else "-untuned"
            file = f"layer-{title}-{NAMES[s.dtype]}{untuned}-b{batch}-c{s.prompt}.json"
            for kernel, case, point in points(config, batch, s.prompt):
                new = bench.measure_safely(case, point, s.dtype, "forward")
                for row in new:
                    row.op = f"layer.{kernel}"
                rows += new
                if s.results is not None:
                    write_json(s.results / gpu_slug(str(meta["gpu"])) / "e2e" / file, meta, rows)
                if s.json is not None:
                    write_json(s.json, meta, every + rows)
                bench.clock.release()
            show(console, f"{title} {NAMES[s.dtype]} B{batch}, context {s.prompt}", rows, timer.measures)
            failed |= any(r.failed for r in rows)
            every += rows
    return int(failed)


COLUMNS = (
    "kernel", "shape", "rooftile us>", "best CUDA us>", "which", "ratio>", "over eager>", "GB/s>", "of roof>",
    "max error>", "status",
)  # fmt: skip


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [us for us in parts if us is not None]
    return math.fsum(known) if len(known) == len(ALONE) else None


def cells(rows: Sequence[Row], measured: bool) -> list[list[str]]:
    """A kernel on each line under `COLUMNS`, then the sums of single kernels; a sum that lacks a part is left out."""
    found: list[list[str]] = []
    alone: list[tuple[float | None, float | None]] = []
    for group in groups(rows):
        ours = next(r for r in group if r.impl == OURS)
        peer = best_peer(group)
        best = None if peer is None else peer.us
        kernel = ours.op.partition(".")[2]
        if kernel in ALONE:
            alone.append((ours.us, best))
        ratio = best / ours.us if best and ours.us and measured else None
        found.append([
            kernel, ours.place, report.number(ours.us, 4), report.number(best, 4), peer.impl if peer else "",
            report.ratio(ratio), report.ratio(ours.speedup_vs_eager), report.number(ours.gbs, 4),
            report.ratio(ours.roof_fraction), "–" if ours.max_error is None else f"{ours.max_error:.1e}", ours.status,
        ])  # fmt: skip
    us, best = _sum([us for us, _ in alone]), _sum([best for _, best in alone])
    ratio = best / us if best and us and measured else None
    total = ["sum of the first five", "", report.number(us, 4), report.number(best, 4), "", report.ratio(ratio)]
    return [*found, [*total, "", "", "", "", ""]]


def show(console: Console, title: str, rows: Sequence[Row], measured: bool) -> None:
    """A kernel on each line, and the sums of single kernels."""
    out = console if console.is_terminal else Console(file=console.file, width=report.WIDTH)
    title = f"one decode layer, {title}" + ("" if measured else f" ({report.NO_MEASUREMENT})")
    table = Table(title=title, title_justify="left", caption=CAPTION, caption_justify="left")
    for name in COLUMNS:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", no_wrap=True)
    for line in cells(rows, measured):
        table.add_row(*(Text(cell) for cell in line), end_section=line[0] == ALONE[-1])
    out.print(report.without_dashes(table))
    for row in rows:
        if row.message and row.status in ("FAIL", "error"):
            out.print(f"{row.op} {row.impl}: {row.status} {row.message}", markup=False, highlight=False)
