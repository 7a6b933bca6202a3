"""The documentation's tables of training: results/<gpu>/training/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rooftile.bench.docs.tables import NO_RESULTS, by_gpu, closing, groups_of, impls_of, machines, markdown, ours_of
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import OURS, Row, best_peer
from rooftile.bench.training import SUITE


def _memory(row: Row) -> int | None:
    """Bytes above inputs and outputs; an optimizer's step has no outputs."""
    return row.peak_bytes if row.extra_bytes is None else row.extra_bytes


def _mib(nbytes: int | None) -> str:
    return "–" if nbytes is None else number(nbytes / 2**20)


def _cells(group: list[Row], peers: Sequence[str]) -> list[str]:
    (ours,), best = ours_of([group]), best_peer(group)
    cells = {r.impl: f"{number(r.us, 4)} ({_mib(_memory(r))})" if r.us is not None else r.status for r in group}
    figures = [cells[OURS], ratio(ours.roof_fraction, 3), ratio(ours.ratio_to_best_peer, 3)]
    return [ours.place, *figures, "–" if best is None else best.impl, *(cells.get(name, "–") for name in peers)]


def table(results: Path) -> str:
    """Every row of losses and optimizers, slower ones included: a table for each op and dtype."""
    parts = []
    for files in by_gpu(results, SUITE).values():
        by_op: dict[tuple[str, str, str], list[list[Row]]] = {}
        for group in groups_of(files):
            by_op.setdefault((group[0].op, group[0].direction, group[0].dtype), []).append(group)
        parts += machines(files)
        for (op, direction, dtype), found in by_op.items():
            peers = impls_of(found)
            columns = ("shape", "us (MiB)>", "of the roof>", "ratio>", "best baseline", *(f"{name}>" for name in peers))
            parts += [f"**`{op}` {direction}, {dtype}**", "", markdown(columns, (_cells(g, peers) for g in found)), ""]
            parts += [f"`{op}` {direction}, {dtype}, speedup over the best baseline, {closing(found)}.", ""]
            notes = dict.fromkeys(f"`{r.impl}` {r.message}." for g in found for r in g if r.us and r.message)
            parts += [part for note in notes for part in (note, "")]
    return "\n".join(parts).strip() or NO_RESULTS
