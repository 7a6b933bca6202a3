"""The documentation's tables of attention: results/<gpu>/attention/ and the suites beside it, attention-*/."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftile.bench.docs.tables import (
    NO_RESULTS,
    TIE,
    by_gpu,
    every_row,
    groups_of,
    impls_of,
    machines,
    markdown,
    ours_of,
    ratios_of,
    titled,
)
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import OURS, Row
from rooftile.bench.tune.report import over
from rooftile.cases.check import DIRECTIONS

# Suites and their names. All but the first have fewer lengths: FlexAttention compiles for each shape, which takes
# minutes.
SUITES = {
    "attention": "",
    "attention-fp16": "float16",
    "attention-flex": "with FlexAttention",
    "attention-prompt": "one prompt",
    "attention-decode": "with FlexAttention",
}
MEMORY = "attention-memory"
SWEEP = "attention-sweep"
NAIVE = "naive"
LARGE = 256 << 20  # bytes of cache; decoding with a smaller one is not compared with the roof


def rows(results: Path) -> str:
    """Every row of the suites, slower ones included."""
    parts = [every_row(results, suite, name=name) for suite, name in SUITES.items() if by_gpu(results, suite)]
    return "\n\n".join(parts) or NO_RESULTS


def _summary_cells(title: str, direction: str, found: Sequence[list[Row]]) -> list[str]:
    ours, ratios = ours_of(found), ratios_of(found)
    bound = ours[0].op.startswith("decode")
    fractions = [r.roof_fraction for r in ours if r.roof_fraction and bound and r.nbytes >= LARGE]
    roof = f"{statistics.median(fractions):.3f} ({len(fractions)})" if fractions else "–"
    rates = [r.tflops for r in ours if r.tflops and not bound]
    head = [title, direction, ", ".join(dict.fromkeys(r.dtype for r in ours)), str(len(ours))]
    tail = [number(max(rates)) if rates else "–", roof]
    if ratios is None:
        return [*head, "–", "–", "–", *tail]
    mean, row, all_of_them = ratios
    tied = f"{sum(r >= TIE for r in all_of_them)} of {len(all_of_them)}"
    least = f"{row.ratio_to_best_peer:.3f} ({row.place}, {row.dtype})"
    return [*head, f"{mean:.3f}", least, tied, *tail]


def summary(results: Path) -> str:
    """A line for each op and direction of each suite: its ratios to the best baseline of each row, and to the roof."""
    columns = (
        "op", "direction", "dtypes", "rows>", "ratio, geometric mean>", "least>", f"at {TIE} or more>",
        "TFLOP/s, most>", "of the read roof, median (rows of 256 MiB)>",
    )  # fmt: skip
    parts = []
    measured: dict[str, list[tuple[str, tuple[dict[str, Any], list[Row]]]]] = {}
    for suite, name in SUITES.items():
        for gpu, files in by_gpu(results, suite).items():
            measured.setdefault(gpu, []).extend((name, file) for file in files)
    for named in measured.values():
        found: dict[tuple[str, str], list[list[Row]]] = {}
        by_name = [(name, group) for name, file in named for group in groups_of([file])]
        for name, group in sorted(by_name, key=lambda n: n[1][0].op):
            found.setdefault((titled(group[0].op, name), group[0].direction), []).append(group)
        if found:
            parts += machines([file for _, file in named], [name for name, _ in named])
            parts += [markdown(columns, [_summary_cells(*k, some) for k, some in found.items()]), ""]
    return "\n".join(parts).strip() or NO_RESULTS


def _mebibytes(row: Row | None) -> str:
    return "–" if row is None or row.peak_bytes is None or row.us is None else number(row.peak_bytes / 2**20)


def _cells(group: Sequence[Row], impls: Sequence[str]) -> list[str]:
    by_impl: Mapping[str, Row] = {r.impl: r for r in group}
    times = [number(by_impl[name].us, 4) if name in by_impl else "–" for name in impls]
    rates = [number(by_impl[OURS].tflops), ratio(by_impl[OURS].speedup_vs_eager)]
    return [group[0].place, group[0].dtype, *rates, *times, *(_mebibytes(by_impl.get(name)) for name in impls)]


def memory(results: Path) -> str:
    """Time and memory of one call by length, for the naive form, the blocked form and the kernel."""
    parts = []
    for files in by_gpu(results, MEMORY).values():
        parts += machines(files)
        by_direction: dict[str, list[list[Row]]] = {}
        for group in groups_of(files):
            by_direction.setdefault(group[0].direction, []).append(group)
        for direction, found in by_direction.items():
            impls = [OURS, *impls_of(found)]
            columns = (
                "shape",
                "dtype",
                "TFLOP/s>",
                "over eager>",
                *(f"{n}, us>" for n in impls),
                *(f"{n}, MiB>" for n in impls),
            )
            parts += [f"**{direction}**", "", markdown(columns, (_cells(group, impls) for group in found)), ""]
    return "\n".join(parts).strip() or NO_RESULTS


def _sweep_cells(group: Sequence[Row] | None) -> list[str]:
    us = {r.impl: r.us for r in group or ()}
    ours, naive = us.get(OURS), us.get(NAIVE)
    rate = next((r.tflops for r in group or () if r.impl == OURS), None)
    return [number(ours, 4), number(rate), number(naive, 4), ratio(over(naive, ours))]


def sweep(results: Path) -> str:
    """Time of one call, and its speedup over the naive form, forward and backward."""
    figures = ("us>", "TFLOP/s>", f"{NAIVE}, us>", "speedup>")
    columns = ("shape", "dtype", *(f"{direction}, {name}" for direction in DIRECTIONS for name in figures))
    parts = []
    for files in by_gpu(results, SWEEP).values():
        by_place: dict[tuple[str, str], dict[str, list[Row]]] = {}
        for group in groups_of(files):
            by_place.setdefault((group[0].place, group[0].dtype), {})[group[0].direction] = group
        cells = ([*k, *(c for d in DIRECTIONS for c in _sweep_cells(by.get(d)))] for k, by in by_place.items())
        parts += [*machines(files), markdown(columns, cells), ""]
    return "\n".join(parts).strip() or NO_RESULTS
