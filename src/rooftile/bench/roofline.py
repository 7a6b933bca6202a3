"""`rooftile roofline`: every measured kernel on the measured roofline of its GPU."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rooftile.bench import charts
from rooftile.bench.charts import COLOURS, TEXT
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import OURS, Row
from rooftile.cases import all_cases

ROW_WISE, GEMM, QUANTIZED = "row-wise", "GEMM", "GEMM, quantized weights"
ATTENTION, DECODING, LOSSES = "attention", "attention in decoding", "losses with their GEMM"
FAMILIES = {
    ROW_WISE: COLOURS["liger"], GEMM: COLOURS["compile"], QUANTIZED: COLOURS["quack"], ATTENTION: COLOURS["rooftile"],
    DECODING: COLOURS["fa4"], LOSSES: COLOURS["cudnn"],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A measured call: its intensity in operations a byte and its rate in TFLOP/s, by the least bytes and operations.

    `roof_fraction` is the row's, against the roofs of its run."""

    family: str
    intensity: float
    tflops: float
    roof_fraction: float | None = None


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The kernels of one GPU, and the medians of the roofs that its runs measured."""

    gpu: str
    name: str
    read_gbs: float
    gemms: Mapping[str, float]
    kernels: Sequence[Kernel]

    @property
    def data(self) -> Any:
        return dataclasses.asdict(self)


def family(row: Row) -> str | None:
    """The family of a row's kernel; None for a whole model, which is many."""
    op = row.op.partition("layer.")[2] or row.op
    if op.startswith("attention"):
        return DECODING if row.op.startswith("layer.") else ATTENTION
    if op == "decode_attention":
        return DECODING
    if row.op.startswith("layer."):
        return GEMM
    if op not in all_cases():
        return None
    if op in ("linear_cross_entropy", "linear_jsd"):
        return LOSSES
    if row.roof == "copy":
        return ROW_WISE
    return QUANTIZED if op.startswith(("int", "fp8")) else GEMM


def read(results: Path, gpu: str) -> Roofline | None:
    """The roofline of one GPU; None if nothing was measured on it."""
    kernels: list[Kernel] = []
    roofs: dict[str, list[float]] = collections.defaultdict(list)
    name = gpu
    for _, meta, rows in charts.machine_rows(results, gpu):
        own = [r for r in rows if r.impl == OURS and r.us and r.gbs and r.tflops and family(r)]
        if not own or not meta.get("roof_read_gbs"):
            continue
        name = str(meta["gpu"])
        roofs["read"].append(meta["roof_read_gbs"])
        for dtype, tflops in (meta.get("roof_products") or {"bf16": meta["roof_tflops"]}).items():
            roofs[dtype].append(tflops)
        for r in own:
            rate, speed = float(r.tflops or 0), float(r.gbs or 1)
            place = (float(f"{1e3 * rate / speed:.3g}"), float(f"{rate:.3g}"))
            kernels.append(Kernel(str(family(r)), *place, r.roof_fraction))
    if not kernels:
        return None
    medians = {key: round(statistics.median(values), 1) for key, values in roofs.items()}
    return Roofline(gpu, name, medians.pop("read"), medians, kernels)


def _roofs(axes: Any, line: Roofline, least: float, most: float) -> None:
    """The read roof up to the highest GEMM roof, and each dtype's GEMM roof from where it meets that."""
    peak = max(line.gemms.values())
    corner = 1e3 * peak / line.read_gbs
    axes.plot([least, corner], [least * line.read_gbs / 1e3, peak], color=TEXT, linewidth=1.4)
    above = 1.2 * line.read_gbs / 1e3  # a line parallel to the roof's, where the label stands
    axes.text(
        1.3 * least, 1.3 * least * above, f"read {number(line.read_gbs, 4)} GB/s", fontsize=8, color=TEXT,
        rotation=math.degrees(math.atan(above)), rotation_mode="anchor", transform_rotates_text=True,
    )  # fmt: skip
    for names, tflops in _levels(line.gemms):
        axes.plot([1e3 * tflops / line.read_gbs, most], [tflops, tflops], color=TEXT, linewidth=1.4)
        text = f" {', '.join(names)} {number(tflops)}"
        axes.annotate(text, (most, tflops), va="center", fontsize=8, color=TEXT, annotation_clip=False)


def _levels(gemms: Mapping[str, float]) -> list[tuple[list[str], float]]:
    """The GEMM roofs from the highest, each with its dtypes: those within a tenth are one line."""
    found: list[tuple[list[str], float]] = []
    for dtype, tflops in sorted(gemms.items(), key=lambda item: -item[1]):
        if found and tflops > 0.9 * found[-1][1]:
            found[-1][0].append(dtype)
        else:
            found.append(([dtype], tflops))
    return found


def draw(line: Roofline, paths: Sequence[Path]) -> None:
    """Write the chart to each of the paths, an SVG for a page or a PNG."""
    with charts.page() as plt:
        figure, axes = plt.subplots(figsize=(8.6, 5.2), layout="constrained")
        least = min(k.intensity for k in line.kernels) / 1.5
        most = 2 * max(*(k.intensity for k in line.kernels), 1e3 * max(line.gemms.values()) / line.read_gbs)
        _roofs(axes, line, least, most)
        for name, colour in FAMILIES.items():
            found = dict.fromkeys((k.intensity, k.tflops) for k in line.kernels if k.family == name)
            if found:
                x, y = zip(*found, strict=True)
                axes.plot(x, y, "o", markersize=3.2, color=colour, markeredgewidth=0, alpha=0.75, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(least, most)
        axes.set_xlabel("FLOP per byte, by the least bytes that must move")
        axes.set_ylabel("TFLOP/s")
        axes.set_title(f"{len(line.kernels)} measured calls of Rooftile's kernels, {line.name}", fontsize=11)
        axes.legend(fontsize=8, loc="lower right", markerscale=2)
        for path in paths:
            if path.suffix == ".svg":
                charts.save(figure, path, line.data)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def lines(results: Path) -> list[Roofline]:
    """The roofline of each GPU that has results."""
    found = (read(results, path.name) for path in sorted(results.glob("*")) if path.is_dir())
    return [line for line in found if line is not None]


def run(results: Path, folder: Path, console: Console) -> None:
    """Write `roofline-<gpu>.svg` and `.png` and show each family's distance from its roof.

    Raises:
        ValueError: there are no results.
    """
    found = lines(results)
    if not found:
        raise ValueError(f"{results} has no measured kernels")
    for line in found:
        paths = [folder / f"roofline-{line.gpu}.{kind}" for kind in ("svg", "png")]
        draw(line, paths)
        table = Table(title=line.name, title_justify="left")
        for name in ("family", "calls", "FLOP per byte", "TFLOP/s, most", "of the roof, median"):
            table.add_column(name, justify="left" if name == "family" else "right")
        for name in FAMILIES:
            some = [k for k in line.kernels if k.family == name]
            if some:
                spread = [number(f(k.intensity for k in some)) for f in (min, max)]
                fractions = [k.roof_fraction for k in some if k.roof_fraction]
                middle = ratio(statistics.median(fractions) if fractions else None)
                table.add_row(name, str(len(some)), "–".join(spread), number(max(k.tflops for k in some)), middle)
        console.print(table)
        console.print(f"{', '.join(map(str, paths))}: written", markup=False, highlight=False, soft_wrap=True)
