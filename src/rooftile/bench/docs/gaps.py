"""The documentation's table of known gaps: every row of results/ in which a baseline is faster than Rooftile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rooftile.bench.docs.tables import NO_RESULTS, TIE, aged, is_older, markdown
from rooftile.bench.report import number
from rooftile.bench.rows import OURS

_PLACE = ("op", "direction", "shape", "dtype", "options", "run")  # what ours and its baselines have in common


def _compared(results: Path) -> Iterator[tuple[dict[str, Any], str, dict[str, Any], str]]:
    """Our rows that have a ratio: the run's machine, the suite, the row, the fastest baseline."""
    for path in sorted(results.glob("*/*/*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in found.get("rows", ()) if "impl" in row]
        for ours in rows:
            if ours["impl"] != OURS or not ours.get("ratio_to_best_peer"):
                continue
            place = [ours.get(name) for name in _PLACE]
            peers = [r for r in rows if r["impl"] != OURS and r["us"] and [r.get(n) for n in _PLACE] == place]
            # The baseline that the ratio is to: variants of ours are among the rows, too.
            target = ours["us"] * ours["ratio_to_best_peer"]
            best = min(peers, key=lambda r: abs(r["us"] - target), default={"impl": "–"})
            yield found["meta"], path.parent.name, ours, best["impl"]


def gaps(results: Path) -> str:
    """Every row under 0.98 of its best baseline, by GPU: a line for each op, then the rows."""
    by_gpu: dict[str, list[tuple[str, dict[str, Any], str]]] = {}
    older: dict[str, dict[str, bool]] = {}
    for meta, suite, row, best in _compared(results):
        by_gpu.setdefault(meta["gpu"], []).append((suite, row, best))
        if row["ratio_to_best_peer"] < TIE:
            name = f"`{row['op']}` ({suite})"
            older.setdefault(meta["gpu"], {}).setdefault(name, is_older(row["op"], meta, suite))
    parts = []
    for gpu, found in sorted(by_gpu.items()):
        below = [(suite, row, best) for suite, row, best in found if row["ratio_to_best_peer"] < TIE]
        line = f"**{gpu}**: {len(below)} of {len(found)} rows with a baseline are below {TIE}."
        parts += [line + aged(older.get(gpu, {})), ""]
        if not below:
            continue
        kinds: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
        for suite, row, best in below:
            kinds.setdefault((suite, row["op"], row["direction"]), []).append((row["ratio_to_best_peer"], best))
        cells = []
        for (suite, op, direction), ratios in sorted(kinds.items()):
            rows = sum((s, r["op"], r["direction"]) == (suite, op, direction) for s, r, _ in found)
            faster = ", ".join(dict.fromkeys(best for _, best in sorted(ratios)))
            cells.append([f"`{op}`", direction, suite, f"{len(ratios)} of {rows}", f"{min(ratios)[0]:.3f}", faster])
        parts += [markdown(("op", "direction", "suite", "rows below>", "least>", "faster are"), cells), ""]
        parts += ['<details markdown="1">', f"<summary>All {len(below)} rows</summary>", ""]
        below.sort(key=lambda b: (b[1]["op"], b[1]["direction"], b[0], b[1]["ratio_to_best_peer"]))
        parts += [
            markdown(
                ("op", "direction", "suite", "shape", "dtype", "us>", "ratio>", "best baseline"),
                (_cells(suite, row, best) for suite, row, best in below),
            ),
            "",
            "</details>",
            "",
        ]
    return "\n".join(parts).strip() or NO_RESULTS


def _cells(suite: str, row: dict[str, Any], best: str) -> list[str]:
    shape = f"{row['shape']} {' '.join(f'{k}={v}' for k, v in row.get('options', {}).items())}".rstrip()
    figures = [number(row["us"], 4), f"{row['ratio_to_best_peer']:.3f}", best]
    return [f"`{row['op']}`", row["direction"], suite, shape, row["dtype"], *figures]
