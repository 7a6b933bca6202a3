"""The tables of README.md and docs/, made from results/ and from the cases.

    python -m rooftile.bench.docs README.md docs/*.md            # writes what stands between the markers anew
    python -m rooftile.bench.docs --check README.md docs/*.md    # exit code 1 where that would change a file

A table stands between `<!-- rooftile:table NAME -->` and `<!-- /rooftile:table -->`, each on a line of its own.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rooftile.bench.report import number, ratio
from rooftile.bench.rows import OURS, Row, best_peer, geometric_mean, groups, read_json
from rooftile.cases import Direction, all_cases
from rooftile.cases.check import NAMES, tolerance_rows

NO_RESULTS = "*Not measured yet: results/ holds nothing for this table.*"
_MARKED = re.compile(r"(<!-- rooftile:table (?P<name>\S+) -->\n)(?P<body>.*?)(<!-- /rooftile:table -->)", re.DOTALL)


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


def machine_line(meta: dict[str, Any]) -> str:
    """Where and when a table was measured."""
    roofs = (
        f"copy {number(meta['roof_copy_gbs'], 4)} GB/s, read {number(meta['roof_read_gbs'], 4)} GB/s, "
        f"bf16 product {number(meta['roof_tflops'])} TFLOP/s"
    )
    versions = f"driver {meta['driver']}, PyTorch {meta['torch']}, Triton {meta['triton']}"
    when = f"commit `{str(meta['commit'])[:10]}`, {str(meta['date'])[:10]}"
    return f"**{meta['gpu']}** ({versions}), {when}. Roofs: {roofs}."


def _by_gpu(results: Path, suite: str) -> dict[str, list[tuple[dict[str, Any], list[Row]]]]:
    found: dict[str, list[tuple[dict[str, Any], list[Row]]]] = {}
    for path in sorted(results.glob(f"*/{suite}/*.json")):
        found.setdefault(path.parts[-3], []).append(read_json(path))
    return found


def ops(results: Path) -> str:
    """Every op: its formula, its dtypes, what gets gradients, its peers."""
    columns = ("op", "computes", "dtypes", "gradients", "peers")
    return markdown(
        columns,
        (
            (
                f"`{c.name}`",
                c.formula,
                ", ".join(NAMES[d] for d in c.dtypes),
                ", ".join(c.grads),
                ", ".join(("eager", "compile", *(p.name for p in c.peers))),
            )
            for c in all_cases().values()
        ),
    )


def tolerances(results: Path) -> str:
    """The ceiling of every check, and why it is what it is."""
    rows = ((f"`{op}`", what, dtype, f"{ceiling:.1e}", why) for op, what, dtype, ceiling, why in tolerance_rows())
    return markdown(("op", "of", "dtype", "at most>", "because"), rows)


def _speed_cells(group: list[Row]) -> list[str]:
    head = [f"`{group[0].op}`", group[0].place, group[0].dtype]
    ours = next(r for r in group if r.impl == OURS)
    if ours.us is None:
        return [*head, ours.status, *["–"] * 6]
    best = best_peer(group)
    figures = [number(ours.us, 4), number(ours.gbs, 4), ratio(ours.roof_fraction), ratio(ours.speedup_vs_eager)]
    peer = ["–", "–"] if best is None else [best.impl, number(best.us, 4)]
    return [*head, *figures, *peer, ratio(ours.ratio_to_best_peer)]


def speed(results: Path, direction: Direction) -> str:
    """Every row of the rowwise suite in one direction, those that lose too."""
    columns = ("op", "shape", "dtype", "us>", "GB/s>", "of the roof>", "over eager>", "best peer", "its us>", "ratio>")
    parts = []
    for files in _by_gpu(results, "rowwise").values():
        found = groups(row for _, rows in files for row in rows if row.direction == direction)
        if not found:
            continue
        ratios = [r.ratio_to_best_peer for g in found for r in g if r.impl == OURS and r.ratio_to_best_peer]
        parts += [machine_line(files[0][0]), "", markdown(columns, map(_speed_cells, found)), ""]
        if ratios:
            mean = f"geometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}"
            parts += [f"Ratio to the best peer (over 1 is faster), {len(ratios)} rows: {mean}.", ""]
    return "\n".join(parts).strip() or NO_RESULTS


def host(results: Path) -> str:
    """The host's time for one call beside Triton's own launcher of the same kernels; what the first call costs."""
    columns = (
        "op", "shape", "dtype", "Triton's launcher, us>", "op, us>", "beyond it>", "with autograd, us>", "beyond it>",
        "first forward, ms>", "first backward, ms>",
    )  # fmt: skip
    parts = []
    for files in _by_gpu(results, "rowwise").values():
        cells = []
        for meta, _ in files:
            for op, h in meta.get("host", {}).items():
                launcher, first = h["launcher_us"], meta.get("first_call_ms", {}).get(op, {})
                figures = (launcher, h["op_us"], h["op_us"] - launcher, h["op_grad_us"], h["op_grad_us"] - launcher)
                times = [f"{f:.1f}" for f in figures] + [number(first.get(d)) for d in ("forward", "backward")]
                cells.append([f"`{op}`", h["shape"], h["dtype"], *times])
        if cells:
            parts += [machine_line(files[0][0]), "", markdown(columns, cells), ""]
    return "\n".join(parts).strip() or NO_RESULTS


def _prefill_cells(row: Row) -> list[str]:
    head = [row.op.replace("_", " "), row.shape, row.dtype, row.impl]
    if row.us is None or row.us_p20 is None or row.us_p80 is None:
        return [*head, row.status, *["–"] * 4, row.message]
    times = [number(row.us / 1e3, 4), f"{number(row.us_p20 / 1e3, 4)}–{number(row.us_p80 / 1e3, 4)}"]
    peak = "–" if row.peak_bytes is None else number(row.peak_bytes / 2**20)
    return [*head, *times, ratio(row.speedup_vs_eager), ratio(row.ratio_to_best_peer), peak, row.message]


def prefill(results: Path) -> str:
    """Whole models over a prompt, and their norms, RoPE and SwiGLU alone."""
    columns = (
        "what", "model and tokens", "dtype", "implementation", "ms>", "p20–p80>", "over eager>", "over its twin>",
        "peak MiB>", "note",
    )  # fmt: skip
    parts = []
    for files in _by_gpu(results, "prefill").values():
        for meta, rows in files:
            parts += [machine_line(meta), "", markdown(columns, map(_prefill_cells, rows)), ""]
            parts += [str(meta["caption"]), ""] if "caption" in meta else []
    return "\n".join(parts).strip() or NO_RESULTS


TABLES: dict[str, Callable[[Path], str]] = {
    "ops": ops,
    "tolerances": tolerances,
    "rowwise-forward": functools.partial(speed, direction="forward"),
    "rowwise-backward": functools.partial(speed, direction="backward"),
    "prefill": prefill,
    "host": host,
}


def regenerate(text: str, results: Path) -> str:
    """The text with every marked table made anew.

    Raises:
        ValueError: a marker names no table, or is not closed.
    """
    opened, closed = text.count("<!-- rooftile:table "), text.count("<!-- /rooftile:table -->")
    if opened != closed or opened != len(_MARKED.findall(text)):
        raise ValueError(f"{opened} tables begin and {closed} end; expected each between its two markers")

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise ValueError(f"unknown table {name}; known tables: {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[name](results)}\n\n{match[4]}"

    return _MARKED.sub(replace, text)


def main(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Markdown files with markers.")],
    results: Annotated[Path, typer.Option(file_okay=False, help="Where results are kept.")] = Path("results"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 where a file is stale.")] = False,
) -> None:
    """Make the tables of the documentation anew."""
    stale = []
    for path in files:
        old = path.read_text(encoding="utf-8")
        try:
            new = regenerate(old, results)
        except ValueError as error:
            raise typer.BadParameter(f"{path}: {error}") from None
        if new != old:
            stale.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        typer.echo(f"{path}: {'stale' if check else 'written'}")
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
