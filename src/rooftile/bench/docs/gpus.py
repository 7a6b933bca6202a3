"""The documentation's table that sets GPUs side by side: the rows that more than one has, by op and direction."""

from __future__ import annotations

import statistics
from pathlib import Path

from rooftile.bench.docs.headline import SUITES, short
from rooftile.bench.docs.tables import NO_RESULTS, markdown
from rooftile.bench.report import ratio
from rooftile.bench.rows import OURS, Row, geometric_mean, read_json

Place = tuple[str, str, str, str]  # op, direction, dtype, shape with options


def _rows(results: Path) -> dict[str, dict[Place, Row]]:
    """Our rows of the published sweeps, by GPU."""
    found: dict[str, dict[Place, Row]] = {}
    for suite in SUITES:
        for path in sorted(results.glob(f"*/{suite}/*.json")):
            meta, rows = read_json(path)
            own = found.setdefault(short(str(meta["gpu"])), {})
            own.update({(r.op, r.direction, r.dtype, r.place): r for r in rows if r.impl == OURS and r.us})
    return found


def table(results: Path) -> str:
    """A line for each op and direction: on each GPU our speedup over the best baseline and the fraction of the roof,
    and the speedup of the last GPU over the first, over the rows that all have."""
    found = _rows(results)
    gpus = sorted(found)
    if len(gpus) < 2:
        return NO_RESULTS
    shared: dict[tuple[str, str], list[Place]] = {}
    for place in found[gpus[0]]:
        if all(place in found[gpu] for gpu in gpus):
            shared.setdefault(place[:2], []).append(place)
    cells = []
    for (op, direction), places in sorted(shared.items()):
        line = [f"`{op}`", direction, str(len(places))]
        for gpu in gpus:
            rows = [found[gpu][place] for place in places]
            ratios = [r.ratio_to_best_peer for r in rows if r.ratio_to_best_peer]
            roofs = [r.roof_fraction for r in rows if r.roof_fraction]
            line += [
                ratio(geometric_mean(ratios)) if ratios else "–",
                ratio(statistics.median(roofs) if roofs else None),
            ]
        faster = [(found[gpus[0]][p].us or 0) / (found[gpus[-1]][p].us or 1) for p in places]
        cells.append([*line, ratio(geometric_mean(faster))])
    columns = [f"{gpu}, {what}>" for gpu in gpus for what in ("speedup", "of the roof")]
    head = ("op", "direction", "rows>", *columns, f"{gpus[-1]} over {gpus[0]}>")
    return markdown(head, cells) if cells else NO_RESULTS
