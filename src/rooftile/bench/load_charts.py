"""The charts of `rooftile bench serve`: what users wait for over the rate, and the speed over the clients."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftile.bench import charts, report

FOLDER = "e2e/serve"  # of the results; one of its own, because its files have no rows of times
# Over each kind of load: the figure, its label, and the factor to the label's unit.
PANELS = {
    "rate": (
        ("first_p99", "first token, ms, p99", 1e3),
        ("each_p99", "a token, ms, p99", 1e3),
        ("good_per_s", "good requests/s", 1.0),
    ),
    "clients": (("tokens_per_s", "tokens/s", 1.0), ("longest_gap", "longest gap, ms", 1e3)),
}
SIZES = {"rate": "requests/s", "clients": "clients"}


@dataclasses.dataclass(frozen=True)
class Chart(charts.Chart):
    """A chart of one file of rows."""

    def draw(self) -> None:
        """An SVG is for a page, and anything else stands beside the results."""
        across = min(3, len(self.panels))
        down = math.ceil(len(self.panels) / across)
        with charts.page() as plt:
            figure, axes = plt.subplots(
                down, across, figsize=(3.5 * across, 2.8 * down + 0.5), squeeze=False, layout="constrained"
            )
            for ax in axes.flat[len(self.panels) :]:
                ax.set_visible(False)
            handles: dict[str, Any] = {}
            for ax, panel in zip(axes.flat, self.panels, strict=False):
                for impl, points in panel.lines.items():
                    (handles[impl],) = ax.plot(*zip(*points, strict=True), **charts.style(impl))
                if panel.size == SIZES["clients"]:
                    ax.set_xscale("log", base=2)
                    loads = sorted({x for points in panel.lines.values() for x, _ in points})
                    ax.set_xticks(loads, [f"{x:g}" for x in loads])
                    ax.set_xticks([], minor=True)
                highest = max(y for points in panel.lines.values() for _, y in points)
                ax.set_ylim(0, 1.08 * highest or 1.0)
                ax.set_xlabel(panel.size)
                ax.set_ylabel(panel.title)
            figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
            figure.suptitle(self.title, fontsize=11)
            if self.path.suffix == ".svg":
                charts.save(figure, self.path, self.data)
            else:
                figure.savefig(self.path, dpi=110)
            plt.close(figure)


def panels(rows: Sequence[Mapping[str, Any]], least: int = 1) -> list[charts.Panel]:
    """Those of each kind of load of which there are at least so many."""
    found = []
    for kind, figures in PANELS.items():
        own = [row for row in rows if row.get(kind) and "seconds" in row]
        if len({row[kind] for row in own}) < least:
            continue
        for name, label, factor in figures:
            lines: charts.Lines = {}
            for row in own:
                lines.setdefault(row["impl"], []).append((row[kind], factor * row[name]))
            found.append(charts.Panel(label, SIZES[kind], {i: sorted(points) for i, points in lines.items()}))
    return found


def chart(file: Path, path: Path, least: int = 1) -> Chart | None:
    """Of a file of rows, to be drawn at `path`; None where it has too few loads."""
    data = json.loads(file.read_text(encoding="utf-8"))
    drawn, meta = panels(data["rows"], least), data["meta"]
    return Chart(path, f"{meta['model']}, {meta['gpu'] or report.NO_MEASUREMENT}", drawn) if drawn else None


def of_page(file: Path, folder: Path) -> Chart | None:
    """Of a file of results, for a page: fewer than three loads make no line, and a table has them."""
    return chart(file, folder / f"{file.parents[2].name}-serving-{file.stem}.svg", least=3)


def of_results(results: Path, folder: Path) -> list[Chart]:
    files = sorted(results.glob(f"*/{FOLDER}/*.json"))
    return [found for file in files if (found := of_page(file, folder)) is not None]


def draw(file: Path) -> Path | None:
    """Beside a file of rows."""
    if (found := chart(file, file.with_suffix(".png"))) is None:
        return None
    found.draw()
    return found.path
