"""The documentation's table of known gaps: every row of results/ in which a baseline is faster than Rooftile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rooftile.bench.charts import machine_rows
from rooftile.bench.docs.tables import NO_RESULTS, TIE, aged, folded, is_older, markdown
from rooftile.bench.report import number
from rooftile.bench.rows import OURS, Row, best_peer, groups


def _compared(results: Path) -> Iterator[tuple[Mapping[str, Any], str, Row, float, str]]:
    """Our rows that have a ratio: the run's machine, the suite, the row, its ratio, the fastest baseline."""
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        for path, meta, rows in machine_rows(results, folder.name):
            for group in groups(rows):
                ours, best = next((r for r in group if r.impl == OURS), None), best_peer(group)
                if ours is not None and best is not None and ours.ratio_to_best_peer:
                    yield meta, path.parent.name, ours, ours.ratio_to_best_peer, best.impl


def gaps(results: Path) -> str:
    """Every row under 0.98 of its best baseline, by GPU: a line for each op, then the rows."""
    by_gpu: dict[str, list[tuple[str, Row, float, str]]] = {}
    older: dict[str, dict[str, dict[str, bool]]] = {}
    for meta, suite, row, ratio, best in _compared(results):
        by_gpu.setdefault(meta["gpu"], []).append((suite, row, ratio, best))
        if ratio < TIE:
            ages = older.setdefault(meta["gpu"], {}).setdefault(f"`{row.op}` ({suite})", {})
            ages[row.direction] = ages.get(row.direction, False) or is_older(row.op, meta, suite, row.direction)
    parts = []
    for gpu, found in sorted(by_gpu.items()):
        below = [measured for measured in found if measured[2] < TIE]
        line = f"**{gpu}**: {len(below)} of {len(found)} rows with a baseline are below {TIE}."
        parts += [line + aged(folded(older.get(gpu, {}))), ""]
        if not below:
            continue
        kinds: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
        for suite, row, ratio, best in below:
            kinds.setdefault((suite, row.op, row.direction), []).append((ratio, best))
        cells = []
        for (suite, op, direction), ratios in sorted(kinds.items()):
            rows = sum((s, r.op, r.direction) == (suite, op, direction) for s, r, *_ in found)
            faster = ", ".join(dict.fromkeys(best for _, best in sorted(ratios)))
            cells.append([f"`{op}`", direction, suite, f"{len(ratios)} of {rows}", f"{min(ratios)[0]:.3f}", faster])
        parts += [markdown(("op", "direction", "suite", "rows below>", "least>", "faster are"), cells), ""]
        parts += ['<details markdown="1">', f"<summary>All {len(below)} rows</summary>", ""]
        below.sort(key=lambda b: (b[1].op, b[1].direction, b[0], b[2]))
        parts += [
            markdown(
                ("op", "direction", "suite", "shape", "dtype", "us>", "ratio>", "best baseline"),
                (_cells(*measured) for measured in below),
            ),
            "",
            "</details>",
            "",
        ]
    return "\n".join(parts).strip() or NO_RESULTS


def _cells(suite: str, row: Row, ratio: float, best: str) -> list[str]:
    return [f"`{row.op}`", row.direction, suite, row.place, row.dtype, number(row.us, 4), f"{ratio:.3f}", best]
