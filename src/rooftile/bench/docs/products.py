"""The documentation's tables of GEMMs: results/<gpu>/matmul/ and the tuning tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftile import tuning
from rooftile.bench import workloads
from rooftile.bench.docs.tables import (
    FIGURES,
    LARGE,
    NO_RESULTS,
    TIE,
    bound,
    by_gpu,
    closing,
    every_row,
    figures_of,
    impls_of,
    machine,
    machines,
    markdown,
    ours_of,
    ratios_of,
)
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import Row, groups
from rooftile.bench.tune import report as tune_report
from rooftile.bench.tune.report import over
from rooftile.cases.rms_norm_linear import traffic

SUITE = "matmul"
BACKWARD = "matmul-backward"
FUSED = "rms_norm_linear"  # has its own table
# By rows of x: one token of each of a few sequences, or of many; prompts.
REGIMES = (("M <= 16", 1, 16), ("16 < M <= 64", 17, 64), ("M > 64", 65, 1 << 62))
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def _size(row: Row, *names: str) -> int | None:
    """A size of the row's point, by the first of the names that it has."""
    return next((row.dims[name] for name in names if name in row.dims), None)


def matmul(results: Path) -> str:
    """Every row of the suites, slower ones included, except the forward of the op with its own table."""
    parts = [every_row(results, SUITE, leave_out=(FUSED,)), every_row(results, BACKWARD)]
    return "\n\n".join(part for part in parts if part != NO_RESULTS) or NO_RESULTS


def _summary_cells(op: str, direction: str, regime: str, found: Sequence[list[Row]]) -> list[str]:
    ours, ratios = ours_of(found), ratios_of(found)
    fractions = [r.roof_fraction for r in ours if r.roof_fraction and (r.nbytes >= LARGE or bound(r) == "GEMM")]
    roof = f"{statistics.median(fractions):.3f} ({len(fractions)})" if fractions else "–"
    dtypes = ", ".join(dict.fromkeys(r.dtype for r in ours))
    head = [f"`{op}`", direction, regime, dtypes, str(len(ours))]
    if ratios is None:
        return [*head, "–", "–", "–", roof]
    mean, row, all_of_them = ratios
    tied = f"{sum(r >= TIE for r in all_of_them)} of {len(all_of_them)}"
    return [*head, f"{mean:.3f}", f"{row.ratio_to_best_peer:.3f} ({row.place}, {row.dtype})", tied, roof]


def summary(results: Path) -> str:
    """A line for each op, direction and regime of rows: its ratios to the best baseline and to the roof."""
    columns = (
        "op", "direction", "rows of x", "dtypes", "rows>", "ratio, geometric mean>", "least>", f"at {TIE} or more>",
        "of the roof, median (rows)>",
    )  # fmt: skip
    parts = []
    for files in by_gpu(results, SUITE).values():
        found: dict[tuple[str, str, str], list[list[Row]]] = {}
        for group in groups(row for _, rows in files for row in rows):
            rows = _size(group[0], "rows", "m") or 0
            regime = next((name for name, low, high in REGIMES if low <= rows <= high), "–")
            found.setdefault((group[0].op, group[0].direction, regime), []).append(group)
        if found:
            parts += [*machines(files), markdown(columns, [_summary_cells(*k, some) for k, some in found.items()]), ""]
    return "\n".join(parts).strip() or NO_RESULTS


_TRAFFIC = ("two kernels, MB>", "one, x read twice, MB>", "one, x read once, MB>")


def _traffic(row: Row) -> list[str]:
    """Megabytes under `_TRAFFIC`: what must move in theory."""
    m, k, n = _size(row, "rows", "m"), _size(row, "k"), _size(row, "n")
    if m is None or k is None or n is None:
        return ["–"] * len(_TRAFFIC)
    itemsize = ITEMSIZES.get(row.dtype, 2)
    return [f"{itemsize * elements / 1e6:.2f}" for elements in traffic(m, n, k)]


def rms_norm_linear(results: Path) -> str:
    """The norm fused into the GEMM, by the number of rows: where it is slower it must not be used."""
    parts = []
    for files in by_gpu(results, SUITE).values():
        files = [(meta, [r for r in rows if r.op == FUSED and r.direction == "forward"]) for meta, rows in files]
        files = [(meta, rows) for meta, rows in files if rows]
        weights: dict[tuple[int | None, int | None, str], list[list[Row]]] = {}
        for group in groups(row for _, rows in files for row in rows):
            weights.setdefault((_size(group[0], "k"), _size(group[0], "n"), group[0].dtype), []).append(group)
        if weights:
            parts += machines(files)
        for (k, n, dtype), found in weights.items():
            peers = impls_of(found)
            columns = ("M>", *FIGURES, *(f"{name}, us>" for name in peers), *_TRAFFIC)
            found.sort(key=lambda group: _size(group[0], "rows", "m") or 0)
            cells = ([str(_size(g[0], "rows", "m")), *figures_of(g, peers), *_traffic(g[0])] for g in found)
            parts += [f"**{k} -> {n}, {dtype}**", "", markdown(columns, cells), ""]
            parts += [f"Speedup over the best baseline (above 1 is faster), {closing(found)}.", ""]
    if not parts:
        return NO_RESULTS
    model = "MB is what must move: 3MK + K + NK + MN elements for a norm and a GEMM after it; "
    one = "2MK + K + NK + MN for one kernel that reads x first for the norm; MK less for one that reads it once."
    return "\n".join([*parts, model + one])


# The tuning tables


def _layer_cells(layer: tune_report.Layer) -> list[str]:
    figures = [number(value, 4) for value in (layer.default_us, layer.us, layer.peer_us)]
    ratios = [ratio(over(value, layer.us), 3) for value in (layer.default_us, layer.peer_us)]
    return [layer.model, str(layer.m), layer.dtype, *figures, *ratios]


def _entry_cells(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterable[list[str]]:
    for what, e in entries:
        figures = [number(e.get(kind), 4) for kind in tune_report.KINDS]
        ratios = [ratio(over(e.get(kind), e.get("us")), 3) for kind in ("default_us", "peer_us")]
        config = " ".join(str(v) for v in e["config"].values())
        yield [what, str(e.get("dtype", "–")), *figures, *ratios, f"`{config}`"]


_TIMES = ("default, us>", "tuned, us>", "cuBLAS, us>", "over default>", "over cuBLAS>")


def tuning_table(results: Path) -> str:
    """The speedup by the packaged tables: the GEMMs of a layer together, then each key."""
    models = {name: workloads.gemm_shapes(config) for name, config in workloads.LAYERS.items() if name != "tiny"}
    parts = []
    for path in sorted(tuning.PACKAGE.glob("*/*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        table = tuning.read(path, data["meta"]["op"], path.parent.name)
        entries = list(table.entries.values())
        if not entries:
            continue
        for run in table.meta.get("runs", []):
            parts += [f"{machine(run)}.", ""]
        layers = tune_report.layers(entries, models)
        if layers:
            parts += ["The four GEMMs of a layer, in sequence:", ""]
            parts += [markdown(("model", "M>", "dtype", *_TIMES), map(_layer_cells, layers)), ""]
            mean = tune_report.mean_ratio((layer.default_us, layer.us) for layer in layers)
            peer = tune_report.mean_ratio((layer.peer_us, layer.us) for layer in layers)
            said = [f"{value[0]:.3f} over {name}" for name, value in (("the default", mean), ("cuBLAS", peer)) if value]
            parts += [f"Speedup of the tuned layer, geometric mean: {', '.join(said)}.", ""]
        each = markdown(("key", "dtype", *_TIMES, "configuration"), _entry_cells(table.entries.items()))
        title = f"<summary>{len(entries)} GEMMs: {tune_report.says(entries)}</summary>"
        parts += ['<details markdown="1">', title, "", each, "", "</details>", ""]
    return "\n".join(parts).strip() or NO_RESULTS
