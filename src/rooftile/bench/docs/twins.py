"""The documentation's table of ops beside their twins in CUDA C++, from `rooftile bench twins`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rooftile.bench.docs.tables import NO_RESULTS, by_gpu, groups_of, machines, markdown
from rooftile.bench.report import number, ratio, twins_line, twins_share
from rooftile.bench.rows import OURS, Row
from rooftile.bench.twins import BAR, CUDA

SUITE = "twins"
TITLES = {OURS: "Triton", CUDA: "CUDA C++", "compile": "compile", "eager": "eager"}


def _cells(rows: Sequence[Row]) -> list[str]:
    found = {row.impl: row for row in rows}
    ours, against = found[OURS], twins_share(rows)
    share = ratio(against, 3)
    if against is not None and against < BAR:
        share = f"**{share}**"
    figures = [ratio(ours.speedup_vs_eager), number(ours.gbs, 4), ratio(ours.roof_fraction, 3)]
    cells = [ours.place, ours.dtype, share, *figures]
    for figure in ("us", "host_us"):
        for impl in TITLES:
            row = found.get(impl)
            cells.append("–" if row is None else row.status if row.us is None else number(getattr(row, figure), 4))
    return cells


def table(results: Path) -> str:
    """Device time and the host's time of a call, which is the launch overhead, in columns of their own."""
    columns = (
        "shape", "dtype", "of the twin's speed>", "over eager>", "GB/s>", "of the roof>",
        *(f"{t}, us>" for t in TITLES.values()), *(f"launch: {t}, us>" for t in TITLES.values()),
    )  # fmt: skip
    parts = []
    for files in by_gpu(results, SUITE).values():
        by_op: dict[str, list[list[Row]]] = {}
        for group in groups_of(files):
            by_op.setdefault(group[0].op, []).append(group)
        parts += machines(files)
        for op, found in by_op.items():
            parts += [f"**`{op}`**", "", markdown(columns, map(_cells, found)), "", f"`{op}`: {twins_line(found)}.", ""]
    return "\n".join(parts).strip() or NO_RESULTS
