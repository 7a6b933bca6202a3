"""The documentation's tables of whole models that generate: results/<gpu>/e2e/."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftile.bench.docs.tables import NO_RESULTS, aged, is_older, machine, machine_line, markdown
from rooftile.bench.e2e import layer
from rooftile.bench.e2e.paths import CUDA, CUDA_FP8, HF, HF_EAGER, OURS_UNTUNED, PATCHED, PEERS
from rooftile.bench.e2e.report import E2ERow
from rooftile.bench.e2e.results import FILES, over, read_results
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import OURS, read_json
from rooftile.bench.workloads import MODELS, RANDOM

SUITE = "e2e"
_ROOFS = (("roof_copy_gbs", 4), ("roof_read_gbs", 4), ("roof_tflops", 3))  # of a run, and the digits that are shown
HUGGING_FACE = (HF, HF_EAGER, PATCHED)  # in the summary, where there are rows of them
# What was measured: the columns that begin each table.
_POINT = ("model", "weights", "batch>", "prompt>", "new>")


@dataclasses.dataclass(frozen=True)
class _Point:
    """A model at one batch size and prompt: a file of results."""

    meta: Mapping[str, Any]
    rows: Sequence[E2ERow]

    @property
    def order(self) -> tuple[Any, ...]:
        names, model, dims = list(MODELS), str(self.meta["model"]), self.rows[0].dims
        place = names.index(model) if model in names else len(names)
        sizes = (dims["prompt"], dims["new"], dims["batch"])
        return (place, model, self.rows[0].dtype, str(self.meta["quantize"] or ""), self.meta["tuning"] == "off", sizes)

    def row(self, op: str, impl: str) -> E2ERow | None:
        return next((r for r in self.rows if (r.op, r.impl) == (op, impl)), None)

    def cells(self, quantize: str | None) -> list[str]:
        """Under `_POINT`."""
        dims = self.rows[0].dims
        weights = f"{self.rows[0].dtype} {quantize or ''}".rstrip()
        return [str(self.meta["model"]), weights, *(str(dims[name]) for name in ("batch", "prompt", "new"))]

    def of_copy(self, row: E2ERow) -> float | None:
        """Its bandwidth, as a fraction of that of a copy in its run."""
        roof = self.run(row.run).get("roof_copy_gbs")
        return row.gbs / roof if row.gbs and roof else None

    def run(self, date: str) -> Mapping[str, Any]:
        """The metadata of one run."""
        found: Mapping[str, Any] = self.meta.get("runs", {}).get(date, self.meta)
        return found


def _points(results: Path) -> dict[str, list[_Point]]:
    """The files by GPU: the models as they are listed, dense weights first, batch sizes ascending."""
    found: dict[str, list[_Point]] = {}
    for path in sorted(results.glob(f"*/{SUITE}/{FILES}")):
        whole = read_results(path)
        if whole.rows:
            found.setdefault(path.parts[-3], []).append(_Point(whole.meta, whole.rows))
    return {gpu: sorted(points, key=lambda p: p.order) for gpu, points in found.items()}


def _runs(points: Iterable[_Point]) -> dict[str, int]:
    """The runs that rows come from, by date, numbered."""
    dates = sorted({row.run for point in points for row in point.rows})
    return {date: i for i, date in enumerate(dates, 1)}


def _between(values: Iterable[Any], digits: int) -> str:
    known = [v for v in values if v is not None]
    return "–".join(dict.fromkeys(number(v, digits) for v in (min(known), max(known)))) if known else "not measured"


def _machines(points: Sequence[_Point]) -> list[str]:
    """A line for each machine and commit: the models, the runs, the roofs from the least to the most."""
    numbers = _runs(points)
    models: dict[str, dict[str, bool]] = {}
    runs: dict[str, dict[str, Mapping[str, Any]]] = {}
    for point in points:
        weights = "random weights" if point.meta["weights"] == RANDOM else "a checkpoint's weights"
        for row in point.rows:
            line = machine({**point.meta, "date": row.run})
            models.setdefault(line, {})[f"`{point.meta['model']}` ({weights})"] = is_older(row.op, point.meta, SUITE)
            runs.setdefault(line, {})[row.run] = point.run(row.run)
    parts = []
    for line, found in runs.items():
        copy, read, product = (_between((run.get(n) for run in found.values()), digits) for n, digits in _ROOFS)
        said = f"copy {copy} GB/s, read {read} GB/s, bf16 GEMM {product} TFLOP/s"
        which = ", ".join(str(numbers[date]) for date in sorted(found))
        parts += [f"{', '.join(models[line])}: {line}; runs: {which}. Roofs: {said}.{aged(models[line])}", ""]
    return parts


def _ms(us: float | None) -> str:
    return number(None if us is None else us / 1e3, 4)


def _time(row: E2ERow | None) -> str:
    """Its median in milliseconds, or its status."""
    if row is None:
        return "–"
    return _ms(row.us) if row.status == "ok" else row.status


def _figures(point: _Point, row: E2ERow) -> list[str]:
    times = [_time(row), "–" if row.us is None else f"{_ms(row.us_p20)}–{_ms(row.us_p80)}", _ms(row.us_p99)]
    rate = number(row.tokens_per_s, 4)
    if row.op == "decode":
        return [*times, rate, number(row.gbs, 4), ratio(row.roof_fraction, 3), ratio(point.of_copy(row), 3)]
    return [*times, _ms(row.host_us), rate, number(row.tflops), ratio(row.roof_fraction, 3)]


_TIMES = ("ms>", "p20–p80>", "p99>")
_FIGURES = {
    "decode": (*_TIMES, "tokens/s>", "GB/s>", "of the read roof>", "of the copy roof>"),
    "prefill": (*_TIMES, "of the host>", "tokens/s>", "TFLOP/s>", "of the roof>"),
}


def _cells(point: _Point, row: E2ERow, runs: Mapping[str, int]) -> list[str]:
    # The first baseline: CUDA's kernels run in the same way, or, for a patched model, the original one.
    # PyTorch in fp8 is measured beside an engine in fp8 alone.
    peers = [name for name in PEERS.get(row.impl, ()) if name != CUDA_FP8 or point.row(row.op, name)]
    peer = point.row(row.op, peers[0]) if peers else None
    against = [ratio(over(row, peer), 3), peer.impl if peer else "–"]
    untuned = f"{row.impl} (tuning off)" if row.options.get("tuning") == "off" else row.impl
    note = "; ".join(part for part in (row.message, row.note) if part)
    head = [*point.cells(row.options.get("quantize")), untuned]
    return [*head, *_figures(point, row), *against, str(runs[row.run]), note]


def _tuning(points: Iterable[_Point]) -> str:
    """The speedup by the tuned tables, end to end; empty if no run was made without them."""
    cells = []
    for point in points:
        for op in _FIGURES:
            ours, without = point.row(op, OURS), point.row(op, OURS_UNTUNED)
            if ours and without:
                times = [_time(ours), _time(without), ratio(over(ours, without), 3)]
                cells.append([*point.cells(point.meta["quantize"]), op, *times])
    columns = (*_POINT, "what", "tuned, ms>", "without tables, ms>", "ratio>")
    return markdown(columns, cells) if cells else ""


def every_row(results: Path) -> str:
    """Every row: decoding, prompts, and both with and without tuned tables; then a list of the implementations."""
    parts = []
    for gpu, points in _points(results).items():
        runs = _runs(points)
        parts += _machines(points)
        for op, figures in _FIGURES.items():
            columns = (*_POINT, "implementation", *figures, "ratio>", "to", "run>", "note")
            cells = [_cells(point, row, runs) for point in points for row in point.rows if row.op == op]
            parts += [f"**{op}**", "", markdown(columns, cells), ""] if cells else []
        tuned = _tuning(points)
        parts += ["**with tuned tables and without**", "", tuned, ""] if tuned else []
        notes = {name: what for point in points for name, what in point.meta["implementations"].items()}
        used = {row.impl for point in points for row in point.rows}
        parts += [*(f"- `{name}`: {what}" for name, what in notes.items() if name in used), ""]
        charts = [f"`results/{gpu}/{SUITE}/{path.name}`" for path in sorted((results / gpu / SUITE).glob("*.png"))]
        parts += [f"Charts of milliseconds a step by batch: {', '.join(charts)}.", ""] if charts else []
    return "\n".join(parts).strip() or NO_RESULTS


def _summary_cells(point: _Point, hugging_face: Sequence[str], runs: Mapping[str, int]) -> list[str]:
    cells = []
    for op in _FIGURES:
        ours, cuda = point.row(op, OURS), point.row(op, CUDA)
        cells += [_time(ours), _time(cuda), ratio(over(ours, cuda), 3)]
        cells += [_time(point.row(op, name)) for name in hugging_face]
        if op == "decode":
            cells += [number(ours.gbs, 4), ratio(point.of_copy(ours), 3)] if ours else ["–", "–"]
    numbers = (runs[row.run] for op in _FIGURES if (row := point.row(op, OURS)))
    return [*point.cells(point.meta["quantize"]), *cells, ", ".join(map(str, dict.fromkeys(numbers)))]


def summary(results: Path) -> str:
    """A line for each model, weights and batch: a step and the prompts, beside the same with CUDA's kernels."""
    parts = []
    for every in _points(results).values():
        points = [p for p in every if p.meta["tuning"] != "off" and any(r.impl == OURS for r in p.rows)]
        if not points:
            continue
        known = {row.impl for point in points for row in point.rows}
        others = [name for name in HUGGING_FACE if name in known]
        columns = (
            *_POINT, "ms a step>", "CUDA path>", "ratio>", *(f"`{name}`>" for name in others), "GB/s>",
            "of the copy roof>", "prefill, ms>", "CUDA path>", "ratio>", *(f"`{name}`>" for name in others),
            "run of ours>",
        )  # fmt: skip
        shown = [r for p in points for r in p.rows if r.impl in (OURS, CUDA, *others) and r.message]
        said = (f"{r.shape} `{r.impl}` {r.op}: {r.status}, {r.message}." for r in shown)
        parts += [
            *_machines(points),
            markdown(columns, (_summary_cells(p, others, _runs(points)) for p in points)),
            "",
        ]
        parts += itertools.chain.from_iterable((line, "") for line in said)
    return "\n".join(parts).strip() or NO_RESULTS


def layers(results: Path) -> str:
    """The kernels of one decode layer, each beside CUDA's fastest."""
    parts = []
    for path in sorted(results.glob(f"*/{SUITE}/layer-*.json")):
        meta, rows = read_json(path)
        if rows:
            batch = next((r.dims[name] for r in rows for name in ("batch", "rows") if name in r.dims), "–")
            untuned = ", without tuned tables" if meta.get("tuning") == "off" else ""
            what = f"`{meta['model']}`, {rows[0].dtype}, batch {batch}, {meta['context']} tokens in the cache{untuned}"
            older = aged({"": is_older(rows[0].op, meta, SUITE)})
            parts += [f"{what}: {machine_line(meta)}{older}", "", markdown(layer.COLUMNS, layer.cells(rows, True)), ""]
            said = (f"{r.op} {r.impl}: {r.status}, {r.message}." for r in rows if r.status in ("FAIL", "error"))
            parts += itertools.chain.from_iterable((line, "") for line in said)
    return "\n".join(parts).strip() or NO_RESULTS
