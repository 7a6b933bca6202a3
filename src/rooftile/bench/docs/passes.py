"""The documentation's table of memory passes before and after fusion, from the cases and results/<gpu>/profile/."""

from __future__ import annotations

import json
from pathlib import Path

from rooftile.bench.docs.headline import short
from rooftile.bench.docs.tables import markdown
from rooftile.bench.report import number
from rooftile.bench.traffic import all_traffic
from rooftile.cases import all_cases

Key = tuple[str, str, str, str]  # op, direction, the point with its options, dtype


def measured(results: Path) -> dict[Key, str]:
    """Megabytes that a profiler saw a call read from and write to DRAM, with the GPU. A row of results/<gpu>/profile/
    has an op, a direction, a shape, options, a dtype, `dram_read_bytes` and `dram_write_bytes`."""
    found: dict[Key, str] = {}
    for path in sorted(results.glob("*/profile/*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for row in data.get("rows", ()):
            if row.get("impl", "rooftile") == "rooftile" and "dram_read_bytes" in row:
                options = " ".join(f"{k}={v}" for k, v in row.get("options", {}).items())
                key = (row["op"], row["direction"], f"{row['shape']} {options}".rstrip(), row["dtype"])
                moved = row["dram_read_bytes"] + row["dram_write_bytes"]
                found[key] = f"{number(moved / 1e6)} ({short(str(data['meta']['gpu']))})"
    return found


def table(results: Path) -> str:
    """A line for each op and direction, those that save most first."""
    columns = (
        "op", "direction", "shape", "dtype", "PyTorch's kernels>", "MB they move>", "least MB>", "measured MB>",
        "passes before>", "after>", "times fewer>",
    )  # fmt: skip
    seen = measured(results)
    lines = []
    for case, point, dtype, direction, t in all_traffic(tuple(all_cases().values())):
        before, after = t.passes
        said = seen.get((case.name, direction, str(point), dtype), "–")
        bytes_of = [number(t.moved / 1e6), number(t.least / 1e6), said]
        cells = [f"`{case.name}`", direction, str(point), dtype, str(t.kernels), *bytes_of]
        lines.append((before / after, [*cells, f"{before:.1f}", f"{after:.1f}", number(before / after)]))
    return markdown(columns, (cells for _, cells in sorted(lines, key=lambda line: -line[0])))
