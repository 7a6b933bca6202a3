"""The documentation's table of the commands that measure the published suites."""

from __future__ import annotations

from pathlib import Path

from rooftile.bench import published
from rooftile.bench.docs.tables import markdown


def table(results: Path) -> str:
    """A line for each suite; they do not depend on the results."""
    suites = published.SUITES.items()
    cells = [[f"`{name}`", "<br>".join(f"`rooftile {line}`" for line in lines)] for name, lines in suites]
    return markdown(("suite", "commands"), cells)
