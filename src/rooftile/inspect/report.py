"""`rooftile inspect`: every kernel on every target, as tables and as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rooftile import __version__
from rooftile.cases import OpCase
from rooftile.inspect.compiling import Compilers, compile_on
from rooftile.inspect.plan import SETS, Row, Task, plan

_STYLES = {"PASS": "green", "FAIL": "bold red", "excluded": "yellow"}


class _Queue:
    """The tasks for one target and dtype, dealt to processes op by op: each takes the next op when it is done with one.

    Ops with more work go first, by a guess: GEMMs and attention take several times as long as row-wise ops.
    """

    def __init__(self, tasks: Iterable[Task], cases: Mapping[str, OpCase]) -> None:
        by_op: dict[str, list[Task]] = {}
        for task in tasks:
            by_op.setdefault(task.op, []).append(task)
        self._left = sorted(by_op.items(), key=lambda item: len(item[1]) * (1 if cases[item[0]].roof == "copy" else 4))
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Task]:
        while True:
            with self._lock:
                if not self._left:
                    return
                _, tasks = self._left.pop()
            yield from tasks


def inspect_all(
    cases: Sequence[OpCase],
    archs: Sequence[str],
    console: Console,
    sets: Sequence[str] = SETS,
    dtypes: Sequence[torch.dtype] | None = None,
    hashed: bool = False,
    first: bool = False,
) -> list[Row]:
    """Every call of those cases, sets and dtypes, compiled for those targets. `first`: see `plan`."""
    tasks = plan(cases, sets=sets, dtypes=dtypes, first=first)
    return compile_all(dict.fromkeys(archs, tasks), cases, console, hashed)


def compile_all(
    tasks: Mapping[str, Sequence[Task]], cases: Sequence[OpCase], console: Console, hashed: bool = False
) -> list[Row]:
    """The calls of each target compiled for it, in that order of targets; on a terminal, with a progress bar.

    With `hashed`, the machine code of each kernel is hashed.

    A process compiles for one target and one dtype, since dtypes share no kernels. A core that has none left helps with
    those that are not done: ops share few kernels.
    """
    by_name = {case.name: case for case in cases}
    queues = []
    for arch, own in tasks.items():
        for dtype in dict.fromkeys(task.dtype for task in own):
            queues.append((arch, _Queue((task for task in own if task.dtype == dtype), by_name)))
    cores = os.cpu_count() or 1
    jobs = queues * cores
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        ThreadPoolExecutor(max(1, min(len(jobs), cores))) as pool,
        contextlib.closing(Compilers()) as compilers,
    ):
        bars = {arch: progress.add_task(arch, total=len(own)) for arch, own in tasks.items()}

        def compile_job(job: tuple[str, _Queue]) -> list[Row]:
            arch, queue = job
            return compile_on(arch, queue, by_name, lambda: progress.advance(bars[arch]), hashed, compilers)

        rows: list[Row] = []
        for found in pool.map(compile_job, jobs):
            rows += [row for row in found if row.verdict != "excluded" or row not in rows]  # said once, not by dtype
    archs, order = list(tasks), list(by_name)
    return sorted(rows, key=lambda r: (archs.index(r.arch), order.index(r.op), r.direction != "forward"))


def limited(rows: Sequence[Row], seconds: float) -> list[Row]:
    """The rows; those of kernels that took longer to compile fail."""

    def judged(row: Row) -> Row:
        if row.kernel is None or row.kernel.compile_ms <= 1e3 * seconds:
            return row
        said = f"takes {row.kernel.compile_ms / 1e3:.1f} s to compile, {seconds:g} allowed"
        return dataclasses.replace(row, verdict="FAIL", message="; ".join(filter(None, (row.message, said))))

    return [judged(row) for row in rows]


def _short(points: Sequence[str]) -> str:
    return ", ".join(points[:2]) + (f" and {len(points) - 2} more" if len(points) > 2 else "")


def _reason(row: Row) -> str:
    """The most useful lines: the error's last line, and the log's last error."""
    said = [line.strip() for line in row.message.splitlines() if line.strip()]
    logged = [line.strip() for line in row.log.splitlines() if re.search("error|assert|fatal", line, re.IGNORECASE)]
    return ": ".join(said[-1:] + logged[-1:])


def _styled(verdict: str) -> str:
    return f"[{_STYLES[verdict]}]{verdict}[/]"


def _table(rows: Sequence[Row], arch: str) -> Table:
    table = Table(
        title=f"{arch}: compiled, never run", title_justify="left", header_style="bold",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for name in ("op", "direction", "kernel", "dtype"):
        table.add_column(name, no_wrap=True)
    table.add_column("points", overflow="fold")
    for name in ("warps", "stages", "registers", "spills", "shared", "threads", "load", "store", "compile ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        k = row.kernel
        figures: tuple[Any, ...] = ("",) * 9
        if k is not None:
            figures = (
                k.num_warps, k.num_stages, k.registers, k.spills, k.shared, k.threads, k.load, k.store,
                f"{k.compile_ms:.0f}",
            )  # fmt: skip
        name = k.name if k else ""
        table.add_row(
            row.op, row.direction, name, row.dtype, escape(_short(row.points)), *map(str, figures), _styled(row.verdict)
        )
    return table


def _summary(rows: Sequence[Row]) -> Table:
    table = Table(
        title="Of each target, compiled and never run", title_justify="left", header_style="bold",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    table.add_column("target", no_wrap=True)
    most = ("most registers", "most spills", "most shared")
    for name in ("kernels", *most, "median compile ms", "longest", "all, s", "failed rows"):
        table.add_column(name, justify="right")
    for arch in dict.fromkeys(row.arch for row in rows):
        kernels = list({r.kernel.hash: r.kernel for r in rows if r.arch == arch and r.kernel}.values())
        failed = sum(r.verdict == "FAIL" for r in rows if r.arch == arch)
        figures: tuple[Any, ...] = ("",) * 6
        if kernels:
            times = sorted(k.compile_ms for k in kernels)
            figures = (
                max(k.registers for k in kernels),
                max(k.spills for k in kernels),
                max(k.shared for k in kernels),
                f"{times[len(times) // 2]:.0f}",
                f"{times[-1]:.0f}",
                f"{sum(times) / 1e3:.1f}",
            )
        table.add_row(arch, str(len(kernels)), *map(str, figures), f"[bold red]{failed}[/]" if failed else "0")
    return table


def _findings(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.verdict == "PASS":
            continue
        kernel = row.kernel.name if row.kernel else ""
        what = " ".join(filter(None, (row.arch, row.op, row.direction, row.dtype, kernel, _short(row.points))))
        yield f"{_styled(row.verdict)} {escape(what)}: {escape(_reason(row))}"


def show(rows: Sequence[Row], console: Console) -> None:
    """A table for each target, then failures and exclusions with their reasons, then a line for each target."""
    tables = [_table([r for r in rows if r.arch == arch], arch) for arch in dict.fromkeys(r.arch for r in rows)]
    if not console.is_terminal:  # a file is as wide as its lines
        options = console.options.update(width=1000)
        widths = (Measurement.get(console, options, t).maximum for t in (*tables, _summary(rows)))
        console.width = max(console.width, *widths)
    for table in tables:
        console.print(table)
    console.print(
        "points: the cases that share the kernel. registers: 32-bit, a thread's. spills: bytes of them in local "
        "memory, as they stand in the code. shared: bytes a block takes. load, store: bytes of the widest access to "
        "global memory. compile ms: processor time of the first call, nothing cached; the first of a "
        "process bears Triton's own start.",
        style="dim",
    )
    show_summary(rows, console)


def show_summary(rows: Sequence[Row], console: Console) -> None:
    """Failures and exclusions with their reasons, then a line for each target."""
    for finding in _findings(rows):
        console.print(finding, highlight=False, soft_wrap=True)
    console.print(_summary(rows))
    verdicts = Counter(row.verdict for row in rows)
    excluded = f", {verdicts['excluded']} excluded" if verdicts["excluded"] else ""
    console.print(
        f"{verdicts['PASS']}/{verdicts['PASS'] + verdicts['FAIL']} passed{excluded}",
        style="bold red" if verdicts["FAIL"] else "bold green",
        highlight=False,
    )


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """{"meta": {...}, "rows": [...]}: a row for each op, direction, dtype and kernel."""
    import triton

    meta = {
        "rooftile": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tuning": os.environ.get("ROOFTILE_TUNING_GPU", "none"),
        "note": "compiled, never run",
    }
    return {"meta": meta, "rows": [row.as_json() for row in rows]}


def write_json(rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(rows), indent=1) + "\n", encoding="utf-8")
