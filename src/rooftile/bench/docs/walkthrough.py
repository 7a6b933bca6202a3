"""The documentation's two kernels, step by step: what bounds each, what was measured, and what a profiler counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rooftile.bench import profile
from rooftile.bench.docs.headline import short
from rooftile.bench.docs.tables import NO_RESULTS, by_gpu, machine, machines, markdown, ours_of
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import Row
from rooftile.cases import Direction, find_cases
from rooftile.cases.check import DTYPES

# The suite that has the op, and the shape. `rooftile bench published profile` profiles the same.
KERNELS = {"rms_norm": ("rowwise", "16384x4096"), "linear": ("matmul", "4096x4096->6144")}
DTYPE = "bf16"
DIRECTION: Direction = "forward"


def _counted(op: str) -> tuple[int, int]:
    """The least bytes and the operations of one call, by the op's case."""
    (case,) = find_cases([op])
    point = profile.find_point(case, KERNELS[op][1])
    return case.nbytes(point, DTYPES[DTYPE].itemsize, DIRECTION), case.flops(point, DIRECTION)


def _runs(results: Path, op: str) -> list[tuple[dict[str, Any], list[Row]]]:
    """The rows of that call, by run."""
    suite, shape = KERNELS[op]
    found = []
    for files in by_gpu(results, suite).values():
        for meta, rows in files:
            group = [r for r in rows if (r.op, r.place, r.dtype, r.direction) == (op, shape, DTYPE, DIRECTION)]
            found += [(meta, group)] if group else []
    return found


def least(results: Path) -> str:
    """What each call must do, and the least time that the roofs of each run allow."""
    columns = (
        "op", "shape", "MB>", "GFLOP>", "FLOP a byte>", "GPU", "bytes, GB/s>", "GEMM, TFLOP/s>",
        "equal at, FLOP a byte>", "the bytes, us>", "the FLOPs, us>", "least, us>",
    )  # fmt: skip
    cells = []
    for op, (_, shape) in KERNELS.items():
        nbytes, flops = _counted(op)
        head = [f"`{op}`", shape, number(nbytes / 1e6, 4), number(flops / 1e9, 4), number(flops / nbytes, 4)]
        runs = _runs(results, op)
        for meta, group in runs:
            (ours,) = ours_of([group])
            gbs, tflops = ours.roof_gbs or meta["roof_copy_gbs"], ours.roof_tflops or meta["roof_tflops"]
            us = (nbytes / gbs / 1e3, flops / tflops / 1e6)
            each = (gbs, tflops, 1e3 * tflops / gbs, *us, max(us))
            cells.append([*head, short(str(meta["gpu"])), *(number(value, 4) for value in each)])
        if not runs:
            cells.append([*head, "not measured yet", *["–"] * 6])
    return markdown(columns, cells)


def _measured_cells(meta: dict[str, Any], row: Row) -> list[str]:
    us = row.status if row.us is None else number(row.us, 4)
    figures = [number(row.gbs, 4), number(row.tflops), ratio(row.roof_fraction, 3), ratio(row.speedup_vs_eager)]
    return [short(str(meta["gpu"])), row.impl, us, *figures]


def measured(results: Path, op: str) -> str:
    """Every implementation of that call, ours first."""
    runs = _runs(results, op)
    if not runs:
        return NO_RESULTS
    columns = ("GPU", "implementation", "us>", "GB/s>", "TFLOP/s>", "of the roof>", "over eager>")
    return "\n".join(
        [*machines(runs), markdown(columns, (_measured_cells(meta, r) for meta, rows in runs for r in rows))]
    )


def counters(results: Path) -> str:
    """What `rooftile profile --results` wrote of the two calls."""
    parts = []
    for op, (_, shape) in KERNELS.items():
        for path in sorted(results.glob(f"*/profile/{op}-{DIRECTION}-{DTYPE}.json")):
            data = json.loads(path.read_text(encoding="utf-8"))
            for row in (r for r in data["rows"] if r["shape"] == shape and "kernels" in r):
                found = [profile.Profile(**kernel) for kernel in row["kernels"]]
                names = [p.kernel.partition("(")[0] for p in found]
                parts += [f"`{op}`, {shape}: {machine(data['meta'])}.", ""]
                parts += [markdown(("", *(f"{name}>" for name in names)), profile.lines(found)), ""]
    return "\n".join(parts).strip() or NO_RESULTS
