"""The speedup by tuning: of each GEMM, and of the GEMMs of a model's layer together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rooftile.bench.report import WIDTH, number, ratio
from rooftile.bench.workloads import LAYER, GemmShape

KINDS = ("default_us", "us", "peer_us")


@dataclasses.dataclass(frozen=True)
class Layer:
    """The GEMMs of one layer of a model, in sequence: microseconds, None if one of them is unknown."""

    model: str
    m: int
    dtype: str
    default_us: float | None
    us: float | None
    peer_us: float | None


def over(before: float | None, after: float | None) -> float | None:
    """How many times as fast."""
    return before / after if before and after else None


def find(entries: Iterable[Mapping[str, Any]], n: int, k: int, gated: bool = False) -> dict[tuple[int, str], Any]:
    """The entries of one weight, laid out as nn.Linear has it, by rows of x and dtype."""
    wanted = (n, k, gated, "nt")
    return {
        (e["m"], e["dtype"]): e
        for e in entries
        if (e.get("n"), e.get("k"), e.get("gated"), e.get("layout")) == wanted and {"m", "dtype"} <= set(e)
    }


def layers(entries: Sequence[Mapping[str, Any]], models: Mapping[str, Sequence[GemmShape]]) -> list[Layer]:
    """Every model, number of rows and dtype for which all GEMMs of a layer are known, as `linear` computes them."""
    found = []
    for model, shapes in models.items():
        parts = [find(entries, p.n, p.k) for p in shapes if p.name in LAYER]
        if not parts:
            continue
        for m, dtype in sorted(set.intersection(*(set(p) for p in parts)), key=lambda at: (at[1], at[0])):
            some = [p[m, dtype] for p in parts]
            sums = {kind: sum(e[kind] for e in some) if all(e.get(kind) for e in some) else None for kind in KINDS}
            found.append(Layer(model, m, dtype, **sums))
    return found


def mean_ratio(pairs: Iterable[tuple[float | None, float | None]]) -> tuple[float, int] | None:
    """The geometric mean of the ratios that there are, and how many."""
    ratios = [r for before, after in pairs if (r := over(before, after))]
    return (math.exp(sum(map(math.log, ratios)) / len(ratios)), len(ratios)) if ratios else None


def says(entries: Sequence[Mapping[str, Any]]) -> str:
    """All GEMMs in one line."""
    tuned = mean_ratio((e.get("default_us"), e.get("us")) for e in entries)
    peer = mean_ratio((e.get("peer_us"), e.get("us")) for e in entries)
    parts = [f"{tuned[0]:.3f} over the default ({tuned[1]} GEMMs)"] if tuned else []
    parts += [f"{peer[0]:.3f} over the baseline ({peer[1]})"] if peer else []
    return f"speedup by tuning, geometric mean: {', '.join(parts)}" if parts else "nothing was measured"


def show(
    console: Console,
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    models: Mapping[str, Sequence[GemmShape]],
    title: str,
    peer: str,
) -> None:
    """The table of what was tuned (what it is of, and its entry), and a line for each model's layer."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("of", "M", "N", "K", "dtype", "default us", "tuned us", f"{peer} us", "x default", f"x {peer}"):
        table.add_column(name, justify="left" if name in ("of", "dtype") else "right", no_wrap=True)
    table.add_column("configuration")
    for what, e in rows:
        figures = [number(e.get(kind), 4) for kind in KINDS]
        ratios = [ratio(over(e.get(kind), e["us"]), 3) for kind in ("default_us", "peer_us")]
        config = " ".join(str(v) for v in e["config"].values())
        sizes = [str(e.get(name, "–")) for name in ("m", "n", "k", "dtype")]
        table.add_row(what, *sizes, *figures, *ratios, config)
    out = console if console.is_terminal else Console(file=console.file, width=WIDTH)
    out.print(table)
    entries = [e for _, e in rows]
    for layer in layers(entries, models):
        line = f"{layer.model} M={layer.m} {layer.dtype}, a layer's GEMMs: "
        line += f"default {number(layer.default_us, 4)} us, tuned {number(layer.us, 4)} us "
        line += f"({ratio(over(layer.default_us, layer.us), 3)} x), "
        line += f"{peer} {number(layer.peer_us, 4)} us ({ratio(over(layer.peer_us, layer.us), 3)} x)"
        out.print(line, highlight=False, soft_wrap=True)
    out.print(says(entries), highlight=False)
