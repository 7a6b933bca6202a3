"""The documentation's table of attention kernels by the text that they generate: results/<gpu>/quality/."""

from __future__ import annotations

import json
from pathlib import Path

from rooftile.bench.docs.tables import NO_RESULTS, aged, is_older, machine, markdown
from rooftile.bench.quality.report import COLUMNS, caption, cells
from rooftile.bench.quality.rows import Row, rows_of


def table(results: Path) -> str:
    """Every kernel, also those that are absent or fail, and a caption for the columns."""
    parts = []
    for path in sorted(results.glob("*/quality/*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        meta, rows = data["meta"], rows_of(data)
        parts += [
            machine(meta) + "." + aged({"": is_older("attention", meta)}),
            "",
            markdown(COLUMNS, map(cells, rows)),
            "",
            caption(meta, rows),
            "",
        ]
        parts += [line for row in rows if row.message for line in (_why(row), "")]
    return "\n".join(parts).strip() or NO_RESULTS


def _why(row: Row) -> str:
    return f"{row.title}: {row.status}: {row.message.rstrip('.')}."
