"""What the tables of the documentation share: Markdown, the files of a suite by GPU, ratios in words."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rooftile.bench.report import number
from rooftile.bench.rows import OURS, Row, geometric_mean, read_json

NO_RESULTS = "*Not measured yet: results/ holds nothing for this table.*"
LARGE = 128 << 20  # bytes, from which on a row is held to the roof: below it, starting and ending a kernel shows
TIE = 0.98  # of the best peer's speed, or more


def markdown(columns: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; a column whose name ends with ">" is aligned to the right."""
    table = Table(box=box.MARKDOWN)
    for name in columns:
        right = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if right else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(c.replace("|", "\\|")) for c in row))
    out = io.StringIO()
    Console(file=out, width=10_000, color_system=None).print(table)
    lines = [line.strip() for line in out.getvalue().strip().splitlines()]
    # Markdown wants the alignment in the second line, which rich draws without.
    rules = ["---:" if name.endswith(">") else "---" for name in columns]
    return "\n".join([lines[0], f"| {' | '.join(rules)} |", *lines[2:]])


def machine_line(meta: dict[str, Any]) -> str:
    """Where and when a table was measured."""
    roofs = (
        f"copy {number(meta['roof_copy_gbs'], 4)} GB/s, read {number(meta['roof_read_gbs'], 4)} GB/s, "
        f"bf16 product {number(meta['roof_tflops'])} TFLOP/s"
    )
    versions = f"driver {meta['driver']}, PyTorch {meta['torch']}, Triton {meta['triton']}"
    when = f"commit `{str(meta['commit'])[:10]}`, {str(meta['date'])[:10]}"
    return f"**{meta['gpu']}** ({versions}), {when}. Roofs: {roofs}."


def by_gpu(results: Path, suite: str) -> dict[str, list[tuple[dict[str, Any], list[Row]]]]:
    found: dict[str, list[tuple[dict[str, Any], list[Row]]]] = {}
    for path in sorted(results.glob(f"*/{suite}/*.json")):
        found.setdefault(path.parts[-3], []).append(read_json(path))
    return found


def machines(files: Iterable[tuple[dict[str, Any], list[Row]]]) -> list[str]:
    """A line for each run that the files come from, with the ops that it measured, each followed by an empty one."""
    runs: dict[str, dict[str, None]] = {}
    for meta, rows in files:
        runs.setdefault(machine_line(meta), {}).update((f"`{row.op}`", None) for row in rows)
    return [part for line, ops in runs.items() if ops for part in (f"{', '.join(ops)}: {line}", "")]


def ours_of(found: Iterable[list[Row]]) -> list[Row]:
    return [next(r for r in group if r.impl == OURS) for group in found]


def ratios_of(found: Iterable[list[Row]]) -> tuple[float, Row, list[float]] | None:
    """The geometric mean of our ratios to the best peers, the row of the least of them, and all; None for none."""
    rows = [r for r in ours_of(found) if r.ratio_to_best_peer]
    if not rows:
        return None
    ratios = [r.ratio_to_best_peer or 0.0 for r in rows]
    return geometric_mean(ratios), rows[ratios.index(min(ratios))], ratios


def closing(found: Sequence[list[Row]]) -> str:
    ratios = ratios_of(found)
    if ratios is None:
        return f"{len(found)} rows, none with a peer to compare with"
    mean, row, all_of_them = ratios
    least = f"least {row.ratio_to_best_peer:.3f} ({row.place}, {row.dtype})"
    rows = f"{len(all_of_them)} row{'s' if len(all_of_them) > 1 else ''}"
    return f"{rows}: geometric mean {mean:.3f}, {least}"
