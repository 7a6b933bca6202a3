"""The output of a benchmark: the table, CSV, plots. The JSON is in `rows.py`."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rooftile.bench.charts import page, style
from rooftile.bench.rows import OURS, Row, geometric_mean, groups
from rooftile.bench.twins import BAR, CUDA

NO_MEASUREMENT = "interpreter, not a measurement"
WIDTH = 176  # of a table that is written to a file or a pipe
WIDE = 150  # the least width that shows all columns


def number(value: float | None, digits: int = 3) -> str:
    """A figure with that many significant digits; a dash for None."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}"


def ratio(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def without_dashes(table: Table) -> Table:
    """The table without the columns that have a dash, or nothing, in every row: the interpreter measures no bandwidth,
    and compares with few baselines."""
    if table.row_count:
        table.columns = [c for c in table.columns if any(str(cell) not in ("", "–") for cell in c.cells)]
    return table


def _style(row: Row) -> str:
    if row.status in ("FAIL", "error"):
        return "red"
    if row.status != "ok":
        return "dim"
    return "bold" if row.impl == OURS else ""


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of figures: in every table, in measured ones, in wide ones, or for GEMMs."""

    name: str
    cell: Callable[[Row], str]
    when: Literal["always", "measured", "wide", "gemm"] = "measured"


_COLUMNS = (
    _Column("us", lambda r: number(r.us, 4), "always"),
    _Column("p20–p80", lambda r: "–" if r.us is None else f"{number(r.us_p20, 4)}–{number(r.us_p80, 4)}", "wide"),
    _Column("host us", lambda r: number(r.host_us)),
    _Column("GB/s", lambda r: number(r.gbs, 4)),
    _Column("TFLOP/s", lambda r: number(r.tflops), "gemm"),
    _Column("of roof", lambda r: ratio(r.roof_fraction)),
    _Column("vs eager", lambda r: ratio(r.speedup_vs_eager)),
    _Column("vs best", lambda r: ratio(r.ratio_to_best_peer)),
    _Column("peak MiB", lambda r: "–" if r.peak_bytes is None else number(r.peak_bytes / 2**20), "wide"),
    _Column("above", lambda r: "–" if r.extra_bytes is None else number(r.extra_bytes / 2**20), "wide"),
    _Column("max error", lambda r: error(r.max_error), "always"),
    _Column("max abs", lambda r: error(r.max_abs_error), "always"),
)


def _notes(found: Sequence[list[Row]]) -> list[str]:
    """The messages of the rows that were not timed, each once."""
    said: dict[tuple[str, str], list[Row]] = {}
    for row in (r for group in found for r in group if r.message):
        said.setdefault((row.status, row.message), []).append(row)
    lines = []
    for (status, message), rows in said.items():
        names = ", ".join(dict.fromkeys(r.impl for r in rows))
        places = list(dict.fromkeys(f"{r.place} {r.dtype}" for r in rows))
        where = "" if len(places) == len(found) else f" at {', '.join(places[:3])}{', …' if len(places) > 3 else ''}"
        lines.append(f"{status}: {names}{where}: {message}")
    return lines


def _table(op: str, direction: str, found: Sequence[list[Row]], measured: bool, wide: bool) -> Table:
    title = f"{op} {direction}" + ("" if measured else f" ({NO_MEASUREMENT})")
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("shape", "dtype", "impl"):
        table.add_column(name, no_wrap=True)
    kinds = {"measured", "wide", "gemm"} if wide else {"measured"}
    if found[0][0].roof != "copy":
        kinds.add("gemm")
    shown = [c for c in _COLUMNS if c.when == "always" or (measured and c.when in kinds)]
    for column in shown:
        table.add_column(column.name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for group in found:
        for i, row in enumerate(group):
            head = (row.place, row.dtype) if i == 0 else ("", "")
            cells = [*head, row.impl, *(column.cell(row) for column in shown), row.status]
            # Text, not str: rich would read markup in a label.
            table.add_row(*(Text(c) for c in cells), style=_style(row), end_section=row is group[-1])
    return table


def twins_share(group: Sequence[Row]) -> float | None:
    """Ours as a share of the speed of the twin in CUDA C++, if both were timed."""
    us = {row.impl: row.us for row in group}
    ours, cuda = us.get(OURS), us.get(CUDA)
    return cuda / ours if ours and cuda else None


def twins_line(found: Sequence[Sequence[Row]]) -> str:
    """Ours as a share of the speed of the twin in CUDA C++, over the rows that have both."""
    shares = {f"{group[0].place} {group[0].dtype}": s for group in found if (s := twins_share(group)) is not None}
    if not shares:
        return f"{len(found)} rows, none with the CUDA C++ twin"
    mean, below = geometric_mean([*shares.values()]), [name for name, share in shares.items() if share < BAR]
    figures = f"geometric mean {mean:.3f}, least {min(shares.values()):.3f}, {len(below)} below {BAR}"
    named = f" ({', '.join(below)})" if below else ""
    return f"{len(shares)} rows, of the CUDA C++ twin's speed: {figures}{named}"


def show(console: Console, rows: Iterable[Row], measured: bool) -> None:
    """A table for each op and direction; a narrow terminal omits some columns."""
    out = console if console.is_terminal else Console(file=console.file, width=WIDTH)
    by_table: dict[tuple[str, str], list[list[Row]]] = {}
    for group in groups(rows):
        by_table.setdefault((group[0].op, group[0].direction), []).append(group)
    for (op, direction), found in by_table.items():
        out.print(without_dashes(_table(op, direction, found, measured, wide=out.width >= WIDE)))
        for line in _notes(found):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        ours = [r for group in found for r in group if r.impl == OURS and r.ratio_to_best_peer]
        if measured and ours:
            ratios = [r.ratio_to_best_peer or 0.0 for r in ours]
            mean = f"geometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}"
            out.print(f"speedup over the best baseline, {len(ratios)} rows: {mean}", highlight=False)
        if measured and any(r.impl == CUDA for group in found for r in group):
            out.print(twins_line(found), highlight=False)
        out.print()


HOST_COLUMNS = (
    "Triton's launcher, us", "op, us", "beyond it", "with autograd, us", "beyond it", "first forward, ms",
    "first backward, ms",
)  # fmt: skip


def host_cells(host: Mapping[str, Any], first_call_ms: Mapping[str, float]) -> list[str]:
    """One op's figures under `HOST_COLUMNS`."""
    launcher = host["launcher_us"]
    figures = (launcher, host["op_us"], host["op_us"] - launcher, host["op_grad_us"], host["op_grad_us"] - launcher)
    return [f"{f:.1f}" for f in figures] + [number(first_call_ms.get(d)) for d in ("forward", "backward")]


def show_host(
    console: Console, host: Mapping[str, Mapping[str, Any]], first_call_ms: Mapping[str, Mapping[str, float]]
) -> None:
    """The host's time of each op's forward beside Triton's own launcher, and the cost of its first call."""
    table = Table(title="host, one call", title_justify="left", title_style="bold")
    for name in ("op", "shape", "dtype"):
        table.add_column(name, no_wrap=True)
    for name in HOST_COLUMNS:
        table.add_column(name, justify="right")
    for op, h in host.items():
        table.add_row(op, h["shape"], h["dtype"], *host_cells(h, first_call_ms.get(op, {})))
    out = console if console.is_terminal else Console(file=console.file, width=WIDTH)
    out.print(table)


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Row)])
        writer.writeheader()
        for row in rows:
            writer.writerow({**dataclasses.asdict(row), "options": json.dumps(dict(row.options))})


def _plain(direction: str) -> str:
    """A direction in a file's name."""
    return direction.replace("+", "-")


def _draw(axes: Any, found: Sequence[list[Row]], measured: bool) -> None:
    """Bandwidth over shapes, a line for each implementation; in the interpreter, time instead."""
    figure = "gbs" if measured else "us"
    places = [g[0].place for g in found]
    names = list(dict.fromkeys(r.impl for g in found for r in g if r.us is not None))
    for name in names:
        values = [next((getattr(r, figure) for r in g if r.impl == name), None) for g in found]
        axes.plot(range(len(places)), [float("nan") if v is None else v for v in values], **style(name))
    if measured:
        roof = [next((r.roof_gbs for r in g if r.roof_gbs), float("nan")) for g in found]
        label = "a copy of the same bytes" if found[0][0].roof == "copy" else "a streaming read"
        axes.plot(range(len(places)), roof, "k--", linewidth=1.2, label=f"roof: {label}")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s" if measured else "microseconds")
    axes.set_xticks(range(len(places)), places, rotation=30, ha="right")
    axes.grid(axis="x", visible=False)


def plot(folder: Path, rows: Iterable[Row], machine: str, measured: bool) -> list[Path]:
    """A chart for each op and direction, a panel for each dtype; the files' paths."""
    with page() as plt:
        folder.mkdir(parents=True, exist_ok=True)
        charts: dict[tuple[str, str], dict[str, list[list[Row]]]] = {}
        for group in groups(rows):
            by_dtype = charts.setdefault((group[0].op, group[0].direction), {})
            by_dtype.setdefault(group[0].dtype, []).append(group)
        paths = []
        for (op, direction), by_dtype in charts.items():
            width = max(8.0, 1.0 + 0.75 * max(len(found) for found in by_dtype.values()))
            label = max(len(group[0].place) for found in by_dtype.values() for group in found)
            height = len(by_dtype) * (3.8 + 0.045 * label)  # labels stand at a slant below each panel
            figure, panels = plt.subplots(
                len(by_dtype), 1, figsize=(width, height), squeeze=False, layout="constrained"
            )
            for axes, (dtype, found) in zip(panels[:, 0], by_dtype.items(), strict=True):
                _draw(axes, found, measured)
                axes.set_title(f"{op} {direction}, {dtype}, {machine if measured else NO_MEASUREMENT}", fontsize=11)
            panels[0, 0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
            path = folder / f"{op}-{_plain(direction)}.png"
            figure.savefig(path, dpi=120)
            plt.close(figure)
            paths.append(path)
        return paths


def _series(rows: Iterable[Row], dim: str) -> list[list[Row]]:
    """Rows that differ only in that dimension and in the implementation, if it has three sizes or more."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        if dim in row.dims and row.us is not None:
            rest = tuple((k, v) for k, v in row.dims.items() if k != dim)
            found.setdefault((row.op, row.direction, row.dtype, rest, str(dict(row.options))), []).append(row)
    return [some for some in found.values() if len({row.dims[dim] for row in some}) >= 3]


def plot_over(folder: Path, rows: Iterable[Row], dim: str, machine: str) -> list[Path]:
    """A chart for each op, direction and dtype, of time and of memory over one dimension; the files' paths."""
    with page() as plt:
        paths: list[Path] = []
        for some in _series(rows, dim):
            first = some[0]
            figure, panels = plt.subplots(1, 2, figsize=(11.0, 4.4), layout="constrained")
            for axes, label, value in (
                (panels[0], "milliseconds", lambda r: r.us / 1e3),
                (panels[1], "MiB beside the inputs, at most", lambda r: r.peak_bytes / 2**20 if r.peak_bytes else None),
            ):
                for name in dict.fromkeys(r.impl for r in some):
                    found = sorted((r.dims[dim], value(r)) for r in some if r.impl == name and value(r) is not None)
                    axes.plot([x for x, _ in found], [y for _, y in found], **style(name))
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.set_xlabel(dim)
                axes.set_ylabel(label)
            panels[0].legend(fontsize=8)
            options = " ".join(f"{k}={v}" for k, v in first.options.items())
            figure.suptitle(f"{first.op} {first.direction}, {first.dtype} {options}, {machine}", fontsize=11)
            sizes = "-".join(f"{k}{v}" for k, v in first.dims.items() if k in ("batch", "heads", "head_dim"))
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{'-'.join(filter(None, (first.op, _plain(first.direction), first.dtype, sizes)))}.png"
            if path in paths:  # they differ in options, or in a size that is not named
                path = path.with_stem(f"{path.stem}-{sum(p.stem.startswith(path.stem) for p in paths) + 1}")
            figure.savefig(path, dpi=110)
            plt.close(figure)
            paths.append(path)
        return paths
