"""The documentation's tables of GEMM schedules and kernels beside each other, from `rooftile bench schedules`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rooftile.bench.docs.tables import NO_RESULTS, aged, commit_of, is_older, markdown


def _rows(results: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    found = sorted(results.glob(f"*/schedules/{name}.json"))
    if not found:
        return None
    data = json.loads(found[0].read_text(encoding="utf-8"))
    return data["meta"], data["rows"]


def table(results: Path, name: str) -> str:
    """Microseconds of each way by problem; the fastest of ours is bold."""
    found = _rows(results, name)
    if found is None:
        return NO_RESULTS
    meta, rows = found
    ways = list(dict.fromkeys(r["schedule"] for r in rows))
    ours = [way for way in ways if not way.startswith("cuBLAS")]
    cells = []
    for m, n, k in dict.fromkeys((r["m"], r["n"], r["k"]) for r in rows):
        us = {r["schedule"]: r["us"] for r in rows if (r["m"], r["n"], r["k"]) == (m, n, k)}
        best = min((us[way] for way in ours if us.get(way)), default=None)
        times = ["–" if not us.get(way) else f"{us[way]:.4g}" for way in ways]
        bold = [way in ours and us.get(way) == best for way in ways]
        cells.append([str(m), f"{k} -> {n}", *(f"**{t}**" if b else t for t, b in zip(times, bold, strict=True))])
    older = aged({"": is_older(name, meta)})
    head = f"**{meta['gpu']}**, {commit_of(meta)}. Microseconds in bfloat16, each way at its best configuration.{older}"
    return f"{head}\n\n{markdown(('M', 'K -> N', *(f'{way}>' for way in ways)), cells)}"
