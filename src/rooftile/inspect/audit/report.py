"""What `rooftile audit` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from rooftile.bench.report import number
from rooftile.inspect.audit.kernels import BLOCKS
from rooftile.inspect.audit.trace import IDLE, Phase

if TYPE_CHECKING:
    from rooftile.inspect.audit import Audit

TITLES = {
    "engine": "the engine",
    "serve": "the serving engine",
    "cuda": "the CUDA path",
    "patched": "the patched model",
}
_KINDS = {"Rooftile": "green", "Inductor": "yellow", "NCCL": "cyan", "copy": "dim", "foreign": "bold red"}
_LONGEST = 100


def short(name: str) -> str:
    """A C++ kernel's name without return type; its middle is left out where it is long, as its end says most."""
    name = name.removeprefix("void ")
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]} … {name[-_LONGEST // 2 + 3 :]}"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _each(n: float, steps: int) -> str:
    return f"{n / steps:.4g}"


def _kernels(audit: Audit, phase: Phase) -> Table:
    timed = phase.wall_us is not None
    each = "a step" if phase.steps > 1 else "in all"
    wall = "" if phase.wall_us is None else f", {number(phase.wall_us / phase.steps, 4)} us {each}"
    table = _table(f"{TITLES[audit.impl]}, {phase.name}{wall}")
    table.add_column("from", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    table.add_column(each, justify="right", no_wrap=True)
    for name in ("us", "share") if timed else ():
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("of", "op", "written in"):
        table.add_column(name, no_wrap=True)
    for row in phase.rows:
        kind = f"[{_KINDS[row.kind]}]{row.kind}[/]"
        cells = [kind, escape(short(row.name)), _each(row.count, phase.steps)]
        if row.us is not None and phase.wall_us:
            cells += [number(row.us / phase.steps, 4), f"{row.us / phase.wall_us:.1%}"]
        table.add_row(*cells, row.block, row.op, row.place)
    if phase.idle_us is not None and phase.wall_us:
        table.add_row("", IDLE, "", number(phase.idle_us / phase.steps, 4), f"{phase.idle_us / phase.wall_us:.1%}")
    return table


def _blocks(audits: Sequence[Audit], name: str) -> Table | None:
    """A phase by operations of a block, one implementation beside the other."""
    found = [(a, p) for a in audits for p in a.phases if p.name == name and p.wall_us]
    if not found:
        return None
    steps = found[0][1].steps
    table = _table(f"{name}, by operation: us{' a step' if steps > 1 else ''}, and the share of its own time")
    table.add_column("operation", no_wrap=True)
    for audit, _ in found:
        for column in (TITLES[audit.impl], "share", "kernels"):
            table.add_column(column, justify="right", no_wrap=True)
    by_block = [(phase, phase.by_block()) for _, phase in found]
    for block in (*BLOCKS, IDLE):
        if not any(block in blocks for _, blocks in by_block):
            continue
        cells = [block]
        for phase, blocks in by_block:
            count, us = blocks.get(block, (0, None))
            wall = phase.wall_us or 1.0
            cells += ["", "", ""] if us is None else [
                number(us / phase.steps, 4), f"{us / wall:.1%}", _each(count, phase.steps) if count else ""
            ]  # fmt: skip
        table.add_row(*cells)
    totals = [cell for p, _ in by_block for cell in (number((p.wall_us or 0.0) / p.steps, 4), "", "")]
    table.add_row("all", *totals)
    return table


def show(audits: Sequence[Audit], console: Console, measured: bool) -> None:
    """Each kernel, then the operations of a block beside each other, then whether it passes."""
    tables = [_kernels(audit, phase) for audit in audits for phase in audit.phases]
    names = dict.fromkeys(p.name for a in audits for p in a.phases)
    tables += [table for name in names if (table := _blocks(audits, name)) is not None]
    if not console.is_terminal:  # a file is as wide as its lines
        options = console.options.update(width=1000)
        console.width = max([console.width, *(Measurement.get(console, options, t).maximum for t in tables)])
    for table in tables:
        console.print(table)
    for audit in audits:
        if audit.absent:
            console.print(f"{TITLES[audit.impl]}: {audit.absent}", style="yellow", markup=False)
        waits = {p.name: p.waits for p in audit.phases if p.waits}
        if waits:
            said = ", ".join(f"{n} in {name}" for name, n in waits.items())
            console.print(f"{TITLES[audit.impl]}: the host waited for the device: {said}.", markup=False)
    _verdict(audits[0], console, measured)


def _verdict(audit: Audit, console: Console, measured: bool) -> None:
    for fault in audit.faults:
        console.print(fault, style="red", markup=False, highlight=False, soft_wrap=True)
    rows = [row for phase in audit.phases for row in phase.rows]
    ours = sum(row.count for row in rows if row.kind == "Rooftile")
    what = {
        "Inductor": "Triton kernels made by Inductor" + (", accepted here" if audit.accepted else ""),
        "NCCL": "of NCCL" if measured else "collectives, which are NCCL's on GPUs",
        "copy": "copies and memsets",
        "foreign": "of others" if measured else "ops of PyTorch that a GPU would compute",
    }
    counts = {kind: sum(row.count for row in rows if row.kind == kind) for kind in what}
    others = "".join(f", {n} {what[kind]}" for kind, n in counts.items() if n)
    passed = not audit.faults
    verdict = f"{TITLES[audit.impl]} {'passes' if passed else 'does not pass'}"
    console.print(
        f"{verdict}: {ours} runs of Rooftile's Triton kernels{others}",
        style="bold green" if passed else "bold red",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
