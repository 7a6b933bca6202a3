"""Shared parts of the documentation's tables: Markdown, the files of a suite by GPU, sentences about ratios."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rooftile.bench import sources
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import OURS, Row, best_peer, geometric_mean, groups, read_json

NO_RESULTS = "*Not measured yet: results/ holds nothing for this table.*"
LARGE = (
    128 << 20
)  # bytes; smaller rows are not compared with the roof, since starting and ending a kernel takes much of their time
TIE = 0.98  # of the best baseline's speed


def markdown(columns: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; a column whose name ends with ">" is aligned to the right."""
    table = Table(box=box.MARKDOWN)
    for name in columns:
        right = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if right else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(c.replace("|", "\\|")) for c in row))
    out = io.StringIO()
    Console(file=out, width=10_000, color_system=None).print(table)
    lines = [line.strip() for line in out.getvalue().strip().splitlines()]
    # Markdown wants the alignment in the second line, which rich draws without.
    rules = ["---:" if name.endswith(">") else "---" for name in columns]
    return "\n".join([lines[0], f"| {' | '.join(rules)} |", *lines[2:]])


def machine(meta: Mapping[str, Any]) -> str:
    """Where, by what and when a table was measured."""
    return f"{where(meta)}, {when(meta)}"


def where(meta: Mapping[str, Any]) -> str:
    return f"**{meta['gpu']}** (driver {meta['driver']}, PyTorch {meta['torch']}, Triton {meta['triton']})"


def when(meta: Mapping[str, Any]) -> str:
    return f"{commit_of(meta)}, {str(meta['date'])[:10]}"


def commit_of(meta: Mapping[str, Any]) -> str:
    """The commit that was measured, in ten digits."""
    commit = str(meta["commit"])
    if commit == sources.UNKNOWN:
        return "commit not recorded"
    changed = " with changes" if commit.endswith(sources.DIRTY) else ""
    return f"commit `{commit.removesuffix(sources.DIRTY)[:10]}`{changed}"


AGED = re.compile(r" Older than (?:its kernel|their kernels): [^.\n]*\.")  # what `aged` says


def aged(ops: Mapping[str, bool]) -> str:
    """A sentence that names the ops that are older than their kernels, or "" if none is."""
    names = [name for name, older in ops.items() if older]
    listed = "all" if len(names) == len(ops) else ", ".join(names)
    return f" Older than their kernels: {listed}." if names else ""


def is_older(op: str, meta: Mapping[str, Any], suite: str = "", direction: str = "") -> bool:
    """Whether the op's kernel has changed since those rows were measured, as far as can be told."""
    return sources.age(op, meta, suite, direction).state == "older"


def folded(ages: Mapping[str, Mapping[str, bool]]) -> dict[str, bool]:
    """Whether ops are older than their kernels, by the op and by its directions: for `aged`, by the directions only
    where they differ."""
    found: dict[str, bool] = {}
    for name, by_direction in ages.items():
        differ = len({*by_direction.values()}) > 1
        found |= {f"{name} {d}" if differ else name: older for d, older in by_direction.items()}
    return found


def machine_line(meta: Mapping[str, Any]) -> str:
    """The same, and the roofs of the run."""
    roofs = (
        f"copy {number(meta['roof_copy_gbs'], 4)} GB/s, read {number(meta['roof_read_gbs'], 4)} GB/s, "
        f"bf16 GEMM {number(meta['roof_tflops'])} TFLOP/s"
    )
    return f"{machine(meta)}. Roofs: {roofs}."


def by_gpu(results: Path, suite: str) -> dict[str, list[tuple[dict[str, Any], list[Row]]]]:
    found: dict[str, list[tuple[dict[str, Any], list[Row]]]] = {}
    for path in sorted(results.glob(f"*/{suite}/*.json")):
        found.setdefault(path.parts[-3], []).append(read_json(path))
    return found


def host_files(results: Path) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """What `rooftile bench --host` measured on each GPU: the name of its folder, the run's machine, the rows."""
    for path in sorted(results.glob("*/host/host.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        yield path.parts[-3], found["meta"], found["rows"]


def groups_of(files: Iterable[tuple[dict[str, Any], list[Row]]]) -> list[list[Row]]:
    """The rows of each file by op, direction, dtype and point. Each file is a run; runs are never mixed."""
    return [group for _, rows in files for group in groups(rows)]


def titled(op: str, name: str = "") -> str:
    """An op, with the name of its suite if another suite has the same op."""
    return f"`{op}` ({name})" if name else f"`{op}`"


def machines(
    files: Iterable[tuple[dict[str, Any], list[Row]]], names: Iterable[str] = itertools.repeat("")
) -> list[str]:
    """A line for each run that the files come from, with the ops that it measured, and an empty line after each.

    `names` are the names of the files' suites.
    """
    runs: dict[str, dict[str, dict[str, bool]]] = {}
    for (meta, rows), name in zip(files, names, strict=False):
        ages = runs.setdefault(machine_line(meta), {})
        for op, direction in dict.fromkeys((row.op, row.direction) for row in rows):
            ages.setdefault(titled(op, name), {})[direction] = is_older(op, meta, direction=direction)
    return [
        part for line, ages in runs.items() if ages for part in (f"{', '.join(ages)}: {line}{aged(folded(ages))}", "")
    ]


def ours_of(found: Iterable[list[Row]]) -> list[Row]:
    return [next(r for r in group if r.impl == OURS) for group in found]


def counted(found: Iterable[list[Row]]) -> list[list[Row]]:
    """The points that count where an op is summed up.

    Attention's eager form writes all scores. Where it is the only baseline of some points, those that win don't count,
    unless there are no others: they would make the mean.
    """
    found = list(found)

    def counts(group: list[Row]) -> bool:
        loses = any((r.ratio_to_best_peer or TIE) < TIE for r in ours_of([group]))
        return "attention" not in group[0].op or loses or best_peer(r for r in group if r.impl != "eager") is not None

    return [group for group in found if counts(group)] or found


def ratios_of(found: Iterable[list[Row]]) -> tuple[float, Row, list[float]] | None:
    """The geometric mean of our ratios to the best baselines, the row with the least, and all ratios; None if none.

    Of points that count, see `counted`.
    """
    rows = [r for r in ours_of(counted(found)) if r.ratio_to_best_peer]
    if not rows:
        return None
    ratios = [r.ratio_to_best_peer or 0.0 for r in rows]
    return geometric_mean(ratios), rows[ratios.index(min(ratios))], ratios


def closing(found: Sequence[list[Row]]) -> str:
    ratios = ratios_of(found)
    if ratios is None:
        return f"{len(found)} rows, none with a baseline"
    mean, row, all_of_them = ratios
    least = f"least {row.ratio_to_best_peer:.3f} ({row.place}, {row.dtype})"
    rows = f"{len(all_of_them)} row{'s' if len(all_of_them) > 1 else ''}"
    left_out = len(found) - len(counted(found))
    note = f", without {left_out} that have `eager` alone" if left_out else ""
    return f"{rows}{note}: geometric mean {mean:.3f}, {least}"


def bound(row: Row) -> str:
    """Which roof bounds the row."""
    if not (row.roof_gbs and row.roof_tflops and row.gbs and row.tflops):
        return "–"
    return "memory" if row.gbs / row.roof_gbs >= row.tflops / row.roof_tflops else "GEMM"


def impls_of(found: Sequence[list[Row]]) -> list[str]:
    """The other implementations, in the order of their rows."""
    return list(dict.fromkeys(r.impl for group in found for r in group if r.impl != OURS))


_AGAINST = ("over eager>", "ratio>", "best baseline")
FIGURES = ("us>", "GB/s>", "TFLOP/s>", "of the roof>", "roof", *_AGAINST)
COPY_FIGURES = ("us>", "GB/s>", "of the roof>", *_AGAINST)  # of an op whose roof is a copy


def against(group: Sequence[Row]) -> list[str]:
    """Our speedup over composed eager PyTorch, and that over the best baseline and its name. Three digits: the second
    is where a tie ends."""
    ours, best = next(r for r in group if r.impl == OURS), best_peer(group)
    peer = "–" if best is None else best.impl
    return [ratio(ours.speedup_vs_eager), ratio(ours.ratio_to_best_peer, 3), peer]


def figures_of(group: list[Row], peers: Sequence[str], columns: Sequence[str] = FIGURES) -> list[str]:
    """Our figures under those columns, and the times of those baselines."""
    ours = ours_of([group])[0]
    times = {r.impl: number(r.us, 4) if r.us is not None else r.status for r in group}
    figures = {
        "us>": times[OURS],
        "GB/s>": number(ours.gbs, 4),
        "TFLOP/s>": number(ours.tflops),
        "of the roof>": ratio(ours.roof_fraction, 3),
        "roof": bound(ours),
        **dict(zip(_AGAINST, against(group), strict=True)),
    }
    return [*(figures[name] for name in columns), *(times.get(name, "–") for name in peers)]


def speed_table(found: Sequence[list[Row]]) -> str:
    """A line for each shape: our figures, the best baseline, and the times of all baselines."""
    peers = impls_of(found)
    figures = COPY_FIGURES if found[0][0].roof == "copy" else FIGURES
    columns = ("shape", *figures, *(f"{name}, us>" for name in peers))
    return markdown(columns, ([group[0].place, *figures_of(group, peers, figures)] for group in found))


def every_row(results: Path, suite: str, leave_out: Sequence[str] = (), name: str = "") -> str:
    """Every row of a suite, slower ones included: a table for each op and direction, bf16 first, the other dtypes
    folded away. `name` is the suite's name if another suite has the same ops."""
    parts = []
    for files in by_gpu(results, suite).values():
        files = [(meta, [r for r in rows if r.op not in leave_out]) for meta, rows in files]
        by_op: dict[tuple[str, str], dict[str, list[list[Row]]]] = {}
        for group in groups_of(files):
            by_op.setdefault((group[0].op, group[0].direction), {}).setdefault(group[0].dtype, []).append(group)
        if by_op:
            parts += machines(files, itertools.repeat(name))
        for (op, direction), by_dtype in by_op.items():
            first, *others = sorted(by_dtype, key=lambda dtype: dtype != "bf16")
            what = f"{titled(op, name)} {direction}"
            parts += [f"**{what}, {first}**", "", speed_table(by_dtype[first]), ""]
            for dtype in others:
                parts += ['<details markdown="1">', f"<summary>{dtype}: {closing(by_dtype[dtype])}</summary>", ""]
                parts += [speed_table(by_dtype[dtype]), "", "</details>", ""]
            every = [group for found in by_dtype.values() for group in found]
            parts += [f"{what}, speedup over the best baseline (above 1 is faster), {closing(every)}.", ""]
    return "\n".join(parts).strip() or NO_RESULTS
