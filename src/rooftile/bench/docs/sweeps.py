"""The documentation's charts: each sweep, and each GPU's roofline. `make docs` draws those that are stale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from rooftile.bench import charts, load_charts, roofline
from rooftile.bench.docs import headline
from rooftile.bench.docs.tables import NO_RESULTS

FROM_PAGES = Path("../images/charts")  # the folder, from the pages that show them
CAPTION = (
    "Each panel shows the fraction of the roof that an implementation reaches, by size: the median over the other "
    "sizes and options. The dashed line is the roof."
)


def sweep(results: Path, name: str) -> str:
    """The chart of one sweep for each GPU."""
    wanted = [s for s in charts.SWEEPS if s.name == name]
    found = charts.charts(results, FROM_PAGES, wanted)
    images = [f"![{c.title}: fraction of the roof by size]({c.path.as_posix()})" for c in found]
    return "\n\n".join([*images, CAPTION]) if images else NO_RESULTS


def rooflines(results: Path) -> str:
    """The roofline of each GPU."""
    found = roofline.lines(results)
    images = [f"![Roofline of {line.name}]({_roofline(FROM_PAGES, line.gpu).as_posix()})" for line in found]
    return "\n\n".join(images) or NO_RESULTS


def _roofline(folder: Path, gpu: str) -> Path:
    return folder / f"{gpu}-roofline.svg"


def stale(results: Path) -> list[tuple[Path, Callable[[], None]]]:
    """The charts in docs/ beside the results that do not show these, and what draws each; none where docs/ is not."""
    root = results.parent
    if not (root / "docs").is_dir():
        return []
    folder, first = root / charts.FOLDER, root / headline.CHART
    found: list[tuple[Path, Callable[[], None]]] = []
    if charts.is_stale(first, headline.chart_data(results)):
        found.append((first, functools.partial(headline.draw, results, first)))
    every = [*charts.charts(results, folder), *load_charts.of_results(results, folder)]
    found += [(chart.path, chart.draw) for chart in every if chart.stale]
    for line in roofline.lines(results):
        path = _roofline(folder, line.gpu)
        if charts.is_stale(path, line.data):
            found.append((path, functools.partial(roofline.draw, line, [path])))
    return found


def unused(results: Path, texts: Sequence[str]) -> list[str]:
    """Charts that none of those pages shows."""
    files = (results.parent / charts.FOLDER).glob("*.svg")
    return [path.name for path in sorted(files) if not any(path.name in text for text in texts)]
