"""The results file of one model at one batch size, to which a run of other implementations adds its rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftile.bench.e2e.paths import IMPLS
from rooftile.bench.e2e.report import E2ERow
from rooftile.bench.info import may_join
from rooftile.bench.rows import to_json

# What two runs must have in common, that their rows may stand in one file.
SAME = ("transformers", "suite", "model", "config", "weights", "quantize", "tuning")
NOT_REACHED = "not reached"  # the message of a row until its turn comes
SO_FAR = "so far: "  # what the message of a row begins with that is measured, but not to the end
FILES = "*-b*-p*-n*.json"  # what `Batch` calls them
OF_A_RUN = ("roof_copy_gbs", "roof_read_gbs", "roof_tflops", "seconds")


@dataclasses.dataclass(frozen=True)
class Results:
    meta: Mapping[str, Any]
    rows: Sequence[E2ERow]


def read_rows(folder: Path) -> list[E2ERow]:
    """The rows of all result files in a folder."""
    return [row for path in sorted(folder.glob(FILES)) for row in read_results(path).rows]


def read_results(path: Path) -> Results:
    """A file's meta data and rows."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Results(data["meta"], _rows(data["rows"]))


def _rows(rows: Iterable[Mapping[str, Any]]) -> list[E2ERow]:
    names = {f.name for f in dataclasses.fields(E2ERow)}
    return [E2ERow(**{k: v for k, v in row.items() if k in names}) for row in rows]


def over(row: E2ERow | None, other: E2ERow | None) -> float | None:
    """The other's time over the row's, if one run has measured both to the end; else None."""
    if row is None or other is None or row.run != other.run:
        return None
    # What is measured only so far has none: in a run that is cut off it would stay.
    ended = all(r.status == "ok" and not r.message.startswith(SO_FAR) for r in (row, other))
    return other.us / row.us if ended and row.us and other.us else None


def earlier(path: Path, meta: Mapping[str, Any]) -> Results | None:
    """The file's contents, if a run with this metadata may add to it: same machine, versions, commit and model."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        before, rows = data["meta"], _rows(data["rows"])
        meta = json.loads(to_json(meta, ()))["meta"]  # rounded as in a file
        same = may_join(meta, before, SAME)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none, or it is no such file
        return None
    return Results(before, rows) if same and all(row.run in before.get("runs", {}) for row in rows) else None


def added(before: Results | None, meta: Mapping[str, Any], rows: Sequence[E2ERow], done: bool) -> Results:
    """The rows of a run, and those of before that it does not measure again. Ratios stay what they were in their run.

    Until the run is done, a row of before gives way to one that is as complete: a run that is cut off takes none away.
    """

    def complete(row: E2ERow) -> int:
        """2 for a row with a time, or with the reason for none; 1 for a time so far."""
        if row.us is None:
            return 2 if row.status != "ok" and row.message != NOT_REACHED else 0
        return 1 if row.message.startswith(SO_FAR) else 2

    before = before or Results({}, ())
    was = {(row.op, row.impl): row for row in before.rows}
    now = {(row.op, row.impl): row for row in rows}
    found = was | {
        key: row for key, row in now.items() if done or key not in was or complete(row) >= complete(was[key])
    }
    in_order = sorted(found.values(), key=lambda row: (row.op, IMPLS.index(row.impl)))
    runs = {**before.meta.get("runs", {}), meta["date"]: {name: meta[name] for name in OF_A_RUN}}
    used = {row.run for row in in_order}
    return Results(
        {
            **before.meta,
            **meta,
            "implementations": {**before.meta.get("implementations", {}), **meta["implementations"]},
            "runs": {date: run for date, run in runs.items() if date in used},
        },
        in_order,
    )
