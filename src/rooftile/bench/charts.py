"""What all charts share, and the charts of the published sweeps, which the documentation shows.

A chart of a page is an SVG without a background, in colours that are readable on white and on dark grey. Its
description has a hash of its data, by which a stale chart is found whatever version of matplotlib drew it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftile.bench.rows import EACH, OURS, TOGETHER, Row, is_ours, read_json

FOLDER = Path("docs/images/charts")  # in the repository

# Most are Okabe and Ito's, distinguishable for colour-blind readers; all have a contrast of 3 or more to `PAGES`.
COLOURS = {
    "rooftile": "#D55E00",
    "eager": "#888888",
    "naive": "#888888",
    "compile": "#0072B2",
    "torch": "#3D8FC9",
    "flash": "#3D8FC9",
    "liger": "#009E73",
    "liger-cutedsl": "#5B8C3A",
    "quack": "#C26A9D",
    "cudnn": "#7A6FD0",
    "fa4": "#B07D00",
    "flashinfer": "#5B8C3A",
    "flex": "#C94F4F",
    "cuda": "#7A6FD0",
    "cublas": "#7A6FD0",
}
OTHER_OURS = "#B07D00"  # Rooftile run in another way, or by a kernel other than the chosen one
TEXT = "#808080"
PAGES = ("#FFFFFF", "#1E2129", "#0D1117")  # of the documentation, light and dark, and of GitHub's dark pages
LARGEST = 150_000  # bytes of a chart that is committed


def pyplot() -> Any:
    """matplotlib's, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def colour(impl: str) -> str:
    """Its colour, or that of a word of its name: "torch int4pack" has that of torch."""
    if is_ours(impl) and impl != OURS:
        return OTHER_OURS
    words = re.split("[ +]", impl)
    return next((COLOURS[word] for word in (impl, *words) if word in COLOURS), COLOURS["torch"])


def style(impl: str) -> dict[str, Any]:
    """How an implementation's line is drawn."""
    ours = impl == OURS
    return {
        "color": colour(impl), "label": impl, "marker": "o" if ours else "s", "markersize": 7 if ours else 5,
        "linewidth": 2.4 if ours else 1.3, "zorder": 3 if ours else 2, "linestyle": "--" if " " in impl else "-",
    }  # fmt: skip


@contextlib.contextmanager
def page() -> Iterator[Any]:
    """pyplot, in the style of the documentation's charts."""
    plt = pyplot()
    grey = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT)
    shape = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": TEXT,
        "grid.alpha": 0.25,
        "axes.axisbelow": True,
    }
    text = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "rooftile", "font.family": "DejaVu Sans"}
    with plt.rc_context({**grey, **shape, **text, "axes.grid": True, "legend.frameon": False}):
        yield plt


def digest(data: Any) -> str:
    return "data " + hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


_MARKERS = re.compile(r'(<g clip-path="[^"]*")>((?:\s*<use [^>]*/>)+)')
_STYLE = re.compile(r' style="([^"]*)"')


def _share_style(markers: re.Match[str]) -> str:
    """The markers of one line, with their style given once."""
    styles = set(_STYLE.findall(markers[2]))
    return f'{markers[1]} style="{styles.pop()}">{_STYLE.sub("", markers[2])}' if len(styles) == 1 else markers[0]


def save(figure: Any, path: Path, data: Any) -> None:
    """Write a chart of a page, with coordinates in hundredths of a point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Creator": None, "Description": digest(data)}
    figure.savefig(path, format="svg", transparent=True, metadata=metadata)
    text = re.sub(r'(\.\d\d)\d+(?=[ \n",)])', r"\1", path.read_text(encoding="utf-8"))
    text = _MARKERS.sub(_share_style, text)
    text = text.replace("'DejaVu Sans'", "sans-serif")  # by whose widths the text was laid out; few others are wider
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def is_stale(path: Path, data: Any) -> bool:
    return not path.exists() or digest(data) not in path.read_text(encoding="utf-8")


# The published sweeps


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Suites, or some ops of them, that have one chart."""

    name: str
    title: str
    suites: str
    only: str = ""
    without: str = ""
    directions: Sequence[str] = (*EACH, TOGETHER)

    def has(self, row: Row) -> bool:
        left_out = bool(self.without) and row.op.startswith(self.without)
        return row.op.startswith(self.only) and not left_out and row.direction in self.directions


SWEEPS = (
    Sweep("rowwise-forward", "row-wise ops, forward", "rowwise", directions=EACH[:1]),
    Sweep("rowwise-backward", "row-wise ops, backward", "rowwise", directions=EACH[1:]),
    Sweep("products", "GEMMs", "matmul", without="rms_norm"),
    Sweep("norm-linear", "a norm and a GEMM in one kernel", "matmul", only="rms_norm"),
    Sweep("twins", "Triton and CUDA C++", "twins"),
    Sweep("attention", "attention", "attention*"),
    Sweep("attention-memory", "attention and the naive form, to long sequences", "attention-memory"),
    Sweep("attention-sweep", "attention and the naive form, short sequences", "attention-sweep"),
    Sweep("training", "losses and optimizers, forward and backward", "training", without="train"),
)
# The size that a panel is drawn over, by the first of these that varies; else the bytes that move.
SIZES = {
    "seq_len": "tokens", "tokens": "tokens", "m": "rows", "rows": "rows", "vocabulary": "vocabulary", "cols": "columns",
}  # fmt: skip
BY_BYTES = "MB moved"

Lines = dict[str, list[tuple[float, float]]]


@dataclasses.dataclass(frozen=True)
class Panel:
    """The fraction of the roof by size, the median over the other sizes and options, for each implementation; of
    serving, the figure that `title` names by load."""

    title: str
    size: str
    lines: Lines


def _size(rows: Sequence[Row]) -> str:
    found = (n for n in SIZES if all(n in r.dims for r in rows) and len({r.dims[n] for r in rows}) > 2)
    return next(found, BY_BYTES)


def panel_of(rows: Sequence[Row]) -> Panel | None:
    """The panel of one op in one direction and dtype; None if fewer than two sizes were measured."""
    timed = [r for r in rows if r.roof_fraction and r.nbytes]
    size = _size(timed) if timed else BY_BYTES
    lines: Lines = {}
    for impl in dict.fromkeys(r.impl for r in timed):
        by_size: dict[float, list[float]] = {}
        for r in timed:
            if r.impl == impl:
                at = r.dims[size] if size in r.dims else float(f"{r.nbytes / 1e6:.2g}")
                by_size.setdefault(at, []).append(r.roof_fraction or 0.0)
        lines[impl] = [(float(at), round(statistics.median(values), 3)) for at, values in sorted(by_size.items())]
    if max((len(points) for points in lines.values()), default=0) < 2:
        return None
    op, direction, dtype = rows[0].op, rows[0].direction, rows[0].dtype
    return Panel(f"{op} {direction}, {dtype}" if direction == EACH[1] else f"{op}, {dtype}", size, lines)


def panels(results: Path, gpu: str, sweep: Sweep) -> list[Panel]:
    """A panel for each op and direction, in bf16 or else the first dtype that was measured."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for path in sorted(results.glob(f"{gpu}/{sweep.suites}/*.json")):
        try:
            _, rows = read_json(path)
        except ValueError:
            continue
        for row in rows:
            if sweep.has(row):
                found.setdefault((row.op, row.direction), {}).setdefault(row.dtype, []).append(row)
    drawn = (panel_of(by.get("bf16") or next(iter(by.values()))) for by in found.values())
    return [panel for panel in drawn if panel is not None]


def draw(path: Path, title: str, drawn: Sequence[Panel], data: Any) -> None:
    """Small multiples: the panels of one sweep, in rows of three."""
    across = min(3, len(drawn))
    down = math.ceil(len(drawn) / across)
    with page() as plt:
        size = (2.9 * across + 0.6, 1.9 * down + 1.0)
        figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, sharey=True, layout="constrained")
        for ax in axes.flat[len(drawn) :]:
            ax.set_visible(False)
        handles: dict[str, Any] = {}
        for ax, panel in zip(axes.flat, drawn, strict=False):
            for impl, points in panel.lines.items():
                look = {**style(impl), "markersize": 4 if impl == OURS else 2.5}
                (handles[impl],) = ax.plot([x for x, _ in points], [y for _, y in points], **look)
            ax.axhline(1.0, color=TEXT, linestyle="--", linewidth=1)
            ax.set_xscale("log")
            ticks = _ticks([x for points in panel.lines.values() for x, _ in points])
            ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
            ax.set_xticks([], minor=True)
            ax.set_title(panel.title, fontsize=9)
            ax.set_xlabel(SIZES.get(panel.size, panel.size), fontsize=8)
            ax.set_yticks([0, 0.5, 1])
            ax.set_ylim(0, max(1.08, *(y for points in panel.lines.values() for _, y in points)))
            ax.grid(axis="x", visible=False)
            ax.tick_params(labelsize=7, labelleft=True, length=2)
        figure.supylabel("fraction of the roof", fontsize=9, color=TEXT)
        order = sorted(handles, key=lambda impl: not is_ours(impl))
        columns = min(len(order), 3 * across)
        figure.legend([handles[i] for i in order], order, loc="outside lower center", ncols=columns, fontsize=8)
        figure.suptitle(title, fontsize=11)
        save(figure, path, data)
        plt.close(figure)


def _ticks(sizes: Sequence[float]) -> list[float]:
    """The least and the largest size, and one near their geometric mean."""
    found = sorted(set(sizes))
    middle = math.sqrt(found[0] * found[-1])
    near = min(found, key=lambda x: abs(math.log(x / middle)))
    apart = all(max(near / x, x / near) > 3 for x in (found[0], found[-1]))
    return [found[0], *([near] if apart else []), *found[-1:]]


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of a sweep on one GPU: its file, its title and what it shows."""

    path: Path
    title: str
    panels: Sequence[Panel]

    @property
    def data(self) -> list[Any]:
        return [dataclasses.asdict(panel) for panel in self.panels]

    @property
    def stale(self) -> bool:
        return is_stale(self.path, self.data)

    def draw(self) -> None:
        draw(self.path, self.title, self.panels, self.data)


def charts(results: Path, folder: Path, sweeps: Sequence[Sweep] = SWEEPS) -> list[Chart]:
    """A chart for each sweep that a GPU has results of."""
    made = []
    for gpu in sorted(path.name for path in results.glob("*") if path.is_dir()):
        for sweep in sweeps:
            drawn = panels(results, gpu, sweep)
            if drawn:
                made.append(Chart(folder / f"{gpu}-{sweep.name}.svg", f"{sweep.title}, {gpu.upper()}", drawn))
    return made


def machine_rows(results: Path, gpu: str) -> Iterator[tuple[Path, Mapping[str, Any], list[Row]]]:
    """The files of one GPU whose rows are measurements of ops."""
    for path in sorted(results.glob(f"{gpu}/*/*.json")):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            meta, rows = read_json(path)
            yield path, meta, rows
