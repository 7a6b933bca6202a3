"""The documentation's table of results/<gpu>/sanitizer/."""

from __future__ import annotations

import json
from pathlib import Path

from rooftile.bench.docs.tables import NO_RESULTS, machine, markdown
from rooftile.bench.sanitize import SUITE


def table(results: Path) -> str:
    """How many ops each tool passed, and every op that it did not."""
    parts = []
    for path in sorted(results.glob(f"*/{SUITE}/checks.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = data["rows"]
        counts = []
        for tool in dict.fromkeys(row["tool"] for row in rows):
            own = [row["status"] for row in rows if row["tool"] == tool]
            counts.append((tool, str(len(own)), *(str(own.count(s)) for s in ("ok", "errors", "failed", "timeout"))))
        columns = ("tool", "ops>", "ok>", "errors found>", "tool failed>", "timed out>")
        parts += [machine(data["meta"]) + ".", "", markdown(columns, counts), ""]
        others = [(f"`{r['op']}`", r["tool"], r["status"], r["message"]) for r in rows if r["status"] != "ok"]
        parts += [markdown(("op", "tool", "outcome", "message"), others), ""] if others else []
    return "\n".join(parts).strip() or NO_RESULTS
