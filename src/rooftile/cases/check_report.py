"""`rooftile check`: every point of the requested sets, as a table that ends with n/m passed, as JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rooftile import __version__, runtime
from rooftile.cases.case import SMALL_SETS, OpCase
from rooftile.cases.check import CheckRow, calls, check_case


def default_sets() -> tuple[str, ...]:
    """Real model shapes are for a GPU; the interpreter would take hours."""
    return (*SMALL_SETS, "llm") if runtime.MODE is runtime.Mode.GPU else SMALL_SETS


def check_all(
    cases: Sequence[OpCase], sets: Sequence[str], dtypes: Sequence[torch.dtype] | None, console: Console
) -> list[CheckRow]:
    """The rows of all cases; on a terminal, with a progress bar. A line names each case that lacks a set, and one the
    sets on which the interpreter is slow."""
    slow = [s for s in sets if s not in SMALL_SETS and any(s in case.sets for case in cases)]
    if slow and runtime.MODE is runtime.Mode.INTERPRETER:
        console.print(f"{', '.join(slow)}: real sizes, at which the interpreter takes minutes a point.", style="yellow")
    for case in cases:
        absent = [s for s in sets if s not in case.sets]
        if absent:
            console.print(f"{case.name} has no set {', '.join(absent)}; it has {', '.join(case.sets)}.", style="yellow")
    steps = {case.name: len(calls(case, sets, dtypes)) for case in cases}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[CheckRow] = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("checking", total=sum(steps.values()))
        for case in cases:
            progress.update(bar, description=case.name)
            for found in check_case(case, sets, dtypes):
                rows += found
                progress.advance(bar)
    return rows


def _shape(row: CheckRow) -> str:
    return " ".join([row.shape, *(f"{name}={value}" for name, value in row.options.items())])


def show(rows: Sequence[CheckRow], console: Console) -> None:
    """The table, the reason of each failure, and the count."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("op", "shape"):
        table.add_column(column, overflow="fold")
    for column in ("dtype", "direction", "output"):
        table.add_column(column, no_wrap=True)
    for column in ("error", "eager's", "tolerance", "max abs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        numbers = (f"{value:.1e}" for value in (row.error, row.eager_error, row.tolerance, row.abs_error))
        verdict = "[green]PASS[/]" if row.passed else "[bold red]FAIL[/]"
        table.add_row(row.op, escape(_shape(row)), row.dtype, row.direction, row.output, *numbers, verdict)
    if not console.is_terminal:  # a file is as wide as its lines
        console.width = max(console.width, Measurement.get(console, console.options.update(width=1000), table).maximum)
    console.print(table)

    failed = [row for row in rows if not row.passed]
    for row in failed:
        where = f"{row.op} {_shape(row)} {row.dtype} {row.direction} {row.output}"
        console.print(f"[bold red]FAIL[/] {escape(where)}: {escape(row.message)}", highlight=False, soft_wrap=True)
    style = "bold red" if failed else "bold green"
    console.print(f"{len(rows) - len(failed)}/{len(rows)} passed", style=style, highlight=False)


def write_csv(rows: Sequence[CheckRow], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(CheckRow)])
        writer.writeheader()
        for row in rows:
            writer.writerow({**row.as_json(), "options": json.dumps(dict(row.options))})


def as_json(rows: Sequence[CheckRow]) -> dict[str, Any]:
    import triton

    device = runtime.default_device()
    meta = {
        "rooftile": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "mode": runtime.MODE.value,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }
    passed = sum(row.passed for row in rows)
    return {"meta": meta, "passed": passed, "total": len(rows), "rows": [row.as_json() for row in rows]}


def write_json(rows: Sequence[CheckRow], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(rows), indent=1, allow_nan=False) + "\n", encoding="utf-8")
