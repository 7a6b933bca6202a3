"""`rooftile report`: one HTML page of all results: tables that sort and filter, charts; and a list of old rows."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rooftile.bench import charts, roofline, sources
from rooftile.bench.docs.headline import short
from rooftile.bench.docs.tables import TIE, commit_of, host_files
from rooftile.bench.report import error, number, ratio
from rooftile.bench.rows import OURS, Row, best_peer, groups, is_ours

MODELS = ("e2e", "prefill")  # suites of whole models, whose implementations have a row each
NOT_KNOWN = "commit not known"


@dataclasses.dataclass(frozen=True)
class Column:
    name: str
    number: bool = False


@dataclasses.dataclass(frozen=True)
class Cell:
    """`value` sorts a column of numbers; `note` is shown on hovering."""

    text: str
    value: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Line:
    cells: Sequence[Cell]
    loses: bool = False
    older: bool = False

    @property
    def classes(self) -> str:
        return " ".join(name for name, has in (("loses", self.loses), ("older", self.older)) if has)


@dataclasses.dataclass(frozen=True)
class Table:
    name: str
    title: str
    caption: str
    columns: Sequence[Column]
    lines: Sequence[Line]


@dataclasses.dataclass(frozen=True)
class Measured:
    """The rows of one op at one point, and their file."""

    path: Path
    meta: dict[str, Any]
    rows: list[Row]

    @property
    def gpu(self) -> str:
        return self.path.parts[-3]

    @property
    def suite(self) -> str:
        return self.path.parts[-2]

    @property
    def age(self) -> sources.Age:
        return sources.age(self.rows[0].op, self.meta, self.suite, self.rows[0].direction)

    @property
    def of_model(self) -> bool:
        return (self.suite in MODELS or self.rows[0].op.startswith("train")) and not self.rows[0].op.startswith("layer")


def figure(value: float | None, digits: int = 4, form: Callable[..., str] = number) -> Cell:
    return Cell(form(value, digits), value)


def read(results: Path) -> Iterator[Measured]:
    """All rows that are measurements of ops or models, by point."""
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        for path, meta, rows in charts.machine_rows(results, folder.name):
            for group in groups(rows):
                yield Measured(path, dict(meta), group)


def _age_cell(measured: Measured) -> Cell:
    age = measured.age
    text = {"current": "current", "older": "older", "unknown": NOT_KNOWN}[age.state]
    return Cell(text, note=age.reason)


def _is_old(age: sources.Age) -> bool:
    return age.state != "current"


_OPS = (
    *map(Column, ("GPU", "suite", "op", "direction", "shape", "dtype")),
    *(Column(name, number=True) for name in ("us", "GB/s", "TFLOP/s", "of the roof", "over eager", "ratio")),
    Column("best baseline"), Column("max error", number=True), Column("max abs", number=True),
    Column("samples", number=True), *map(Column, ("commit", "age", "baselines, us")),
)  # fmt: skip


def _op_line(m: Measured) -> Line | None:
    ours = next((r for r in m.rows if r.impl == OURS), None)
    if ours is None:
        return None
    best = best_peer(m.rows)
    others = (f"{r.impl} {number(r.us, 4) if r.us else r.status}" for r in m.rows if r is not ours)
    text = (m.gpu.upper(), m.suite, ours.op, ours.direction, ours.place, ours.dtype)
    time = figure(ours.us) if ours.us else Cell(ours.status)
    cells = [
        *map(Cell, text), time, figure(ours.gbs), figure(ours.tflops), figure(ours.roof_fraction, 3, ratio),
        figure(ours.speedup_vs_eager, 2, ratio), figure(ours.ratio_to_best_peer, 3, ratio),
        Cell(best.impl if best else "–"), Cell(error(ours.max_error), ours.max_error),
        Cell(error(ours.max_abs_error), ours.max_abs_error), Cell(str(ours.samples), ours.samples),
        Cell(_commit(m.meta)), _age_cell(m), Cell(", ".join(others)),
    ]  # fmt: skip
    loses = ours.status != "ok" or (ours.ratio_to_best_peer or TIE) < TIE
    return Line(cells, loses, _is_old(m.age))


_MODELS = (
    *map(Column, ("GPU", "suite", "what", "model", "dtype", "implementation")),
    *(Column(name, number=True) for name in ("ms", "tokens/s", "of the roof", "over eager", "ratio", "peak GiB")),
    *map(Column, ("commit", "age", "note")),
)  # fmt: skip


def _model_lines(m: Measured) -> Iterator[Line]:
    for r in m.rows:
        text = (m.gpu.upper(), m.suite, r.op, r.place, r.dtype, r.impl)
        time = figure(r.us / 1e3) if r.us else Cell(r.status)
        gib = None if r.peak_bytes is None else r.peak_bytes / 2**30
        cells = [
            *map(Cell, text), time, figure(r.tokens_per_s), figure(r.roof_fraction, 3, ratio),
            figure(r.speedup_vs_eager, 2, ratio), figure(r.ratio_to_best_peer, 3, ratio), figure(gib, 3),
            Cell(_commit(m.meta)), _age_cell(m), Cell(r.message),
        ]  # fmt: skip
        yield Line(cells, is_ours(r.impl) and (r.ratio_to_best_peer or TIE) < TIE, _is_old(m.age))


_HOST = (
    *map(Column, ("GPU", "op", "shape", "call")), Column("us", number=True), Column("baseline"),
    *(Column(name, number=True) for name in ("its us", "ratio", "limit us")),
)  # fmt: skip


def _host_lines(results: Path) -> Iterator[Line]:
    for gpu, _, rows in host_files(results):
        for r in rows:
            text = (gpu.upper(), r["op"], r["shape"], r["direction"])
            share = figure(r["us"] / r["baseline_us"], 2, ratio)
            cells = [*map(Cell, text), figure(r["us"], 3), Cell(r["baseline"]), figure(r["baseline_us"], 3), share]
            yield Line([*cells, figure(r["limit_us"], 3)], r["us"] > r["limit_us"])


_ROOFS = (("copy GB/s", "roof_copy_gbs"), ("read GB/s", "roof_read_gbs"), ("bf16 TFLOP/s", "roof_tflops"))
_RUNS = ("GPU", "driver", "PyTorch", "Triton", "commit", "date", *(name for name, _ in _ROOFS), "measured")


def _runs(found: Sequence[Measured]) -> list[list[str]]:
    """A line for each machine, versions, commit and day, with the roofs of its runs and the suites that it measured."""
    runs: dict[tuple[str, ...], list[Measured]] = {}
    for m in found:
        versions = (str(m.meta[name]) for name in ("gpu", "driver", "torch", "triton"))
        runs.setdefault((*versions, _commit(m.meta), str(m.meta["date"])[:10]), []).append(m)
    lines = []
    for run, some in sorted(runs.items()):
        known = [[v for m in some if (v := m.meta[name])] for _, name in _ROOFS]
        roofs = ["–".join(dict.fromkeys(number(f(v), 4) for f in (min, max))) if v else "–" for v in known]
        lines.append([*run, *roofs, ", ".join(dict.fromkeys(m.suite for m in some))])
    return lines


def _commit(meta: Mapping[str, Any]) -> str:
    return commit_of(meta).removeprefix("commit ").replace("`", "")


def _figures(results: Path) -> Iterator[tuple[str, str]]:
    """Title and SVG of each chart."""
    with tempfile.TemporaryDirectory() as folder:
        for line in roofline.lines(results):
            path = Path(folder) / "roofline.svg"
            roofline.draw(line, [path])
            yield f"Roofline of {line.name}", _inline(path)
        for chart in charts.charts(results, Path(folder)):
            chart.draw()
            yield f"{chart.title}: fraction of the roof by size", _inline(chart.path)


def _inline(path: Path) -> str:
    """The SVG element of a file, without what precedes it and without its metadata."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def html(results: Path) -> str:
    """The page.

    Raises:
        ValueError: there are no results.
        ImportError: jinja2 or matplotlib is not installed.
    """
    import jinja2
    from markupsafe import Markup

    found = list(read(results))
    if not found:
        raise ValueError(
            f"{results} has no results, expected <gpu>/<suite>/<name>.json as `rooftile bench` writes them"
        )
    ops = [line for m in found if not m.of_model and (line := _op_line(m))]
    models = [line for m in found if m.of_model for line in _model_lines(m)]
    host = list(_host_lines(results))
    tables = [
        Table("ops", "Ops", "Device time of one call; errors are against float64.", _OPS, ops),
        Table("models", "Whole models", "A step of decoding or training, or a prompt.", _MODELS, models),
        Table("host", "Host", "Time to issue one call; a row over its limit is in the colour of rows that lose.",
              _HOST, host),
    ]  # fmt: skip
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((pkgutil.get_data(__package__, "page.html.j2") or b"").decode())
    return template.render(
        pages=charts.PAGES,
        tie=TIE,
        files=len({m.path for m in found}),
        total=len(ops) + len(models),
        older=sum(line.older for line in (*ops, *models)),
        run_columns=_RUNS,
        runs=_runs(found),
        figures=[(title, Markup(svg)) for title, svg in _figures(results)],
        tables=[table for table in tables if table.lines],
    )


def run(results: Path, out: Path, console: Console) -> None:
    """Write the page. Raises what `html` raises."""
    text = html(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    console.print(f"{out}: {len(text) / 1e6:.1f} MB", markup=False, highlight=False, soft_wrap=True)


def check(results: Path, console: Console) -> int:
    """List the files whose rows are older than their kernels, or whose commit is not known. Returns 1 if any is."""
    reasons: dict[str, dict[str, int]] = {}
    every = 0
    for m in read(results):
        every += len(m.rows)
        if (age := m.age).state != "current":
            by_place = reasons.setdefault(age.reason, {})
            place = f"{short(str(m.meta['gpu']))} {m.suite} {m.rows[0].op}"
            by_place[place] = by_place.get(place, 0) + len(m.rows)
    for reason, places in reasons.items():
        for place, count in places.items():
            console.print(f"{place}: {count} rows: {reason}", markup=False, highlight=False, soft_wrap=True)
    old = sum(count for places in reasons.values() for count in places.values())
    console.print(f"{every - old} of {every} rows are as old as their kernels", highlight=False)
    return int(old > 0)
