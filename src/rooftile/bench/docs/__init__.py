"""The tables of README.md and docs/, made from results/ and from the cases.

    python -m rooftile.bench.docs README.md docs/*.md docs/*/*.md            # regenerates the text between the markers
    python -m rooftile.bench.docs --check README.md docs/*.md docs/*/*.md    # exit code 1 if that would change a file

A table is the text between `<!-- rooftile:table NAME -->` and `<!-- /rooftile:table -->`, each on its own line.
"""

from __future__ import annotations

import functools
import inspect
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

import rooftile
from rooftile.bench import charts
from rooftile.bench.docs import attention as docs_attention
from rooftile.bench.docs import e2e as docs_e2e
from rooftile.bench.docs import engine as docs_engine
from rooftile.bench.docs import environment as docs_environment
from rooftile.bench.docs import gaps as docs_gaps
from rooftile.bench.docs import gpus as docs_gpus
from rooftile.bench.docs import headline as docs_headline
from rooftile.bench.docs import passes as docs_passes
from rooftile.bench.docs import products as docs_products
from rooftile.bench.docs import published as docs_published
from rooftile.bench.docs import quality as docs_quality
from rooftile.bench.docs import sanitizer as docs_sanitizer
from rooftile.bench.docs import schedules as docs_schedules
from rooftile.bench.docs import serving as docs_serving
from rooftile.bench.docs import sweeps as docs_sweeps
from rooftile.bench.docs import training as docs_training
from rooftile.bench.docs import twins as docs_twins
from rooftile.bench.docs import walkthrough as docs_walkthrough
from rooftile.bench.docs.tables import (
    AGED,
    LARGE,
    NO_RESULTS,
    TIE,
    aged,
    by_gpu,
    closing,
    host_files,
    is_older,
    machine,
    machine_line,
    machines,
    markdown,
    ours_of,
    ratios_of,
    speed_table,
)
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import Row, groups
from rooftile.cases import Direction, all_cases
from rooftile.cases.check import NAMES, tolerance_rows

_MARKED = re.compile(r"(<!-- rooftile:table (?P<name>\S+) -->\n)(?P<body>.*?)(<!-- /rooftile:table -->)", re.DOTALL)


def ops(results: Path) -> str:
    """Every op: its formula, its dtypes, the inputs with gradients, its baselines."""
    columns = ("op", "computes", "dtypes", "gradients", "baselines")
    return markdown(
        columns,
        (
            (
                op_and_call(c.name),
                c.formula,
                ", ".join(NAMES[d] for d in c.dtypes),
                ", ".join(c.grads),
                ", ".join(("eager", "compile", *(p.name for p in c.peers))),
            )
            for _, c in sorted(all_cases().items())
        ),
    )


def op_and_call(name: str) -> str:
    """The op's name in commands and tables; if no function has it, also the function and its argument."""
    if hasattr(rooftile, name):
        return f"`{name}`"
    function = name.removesuffix("_quantized")
    arguments = inspect.signature(getattr(rooftile, function)).parameters
    argument = next(a for a in ("weight_scale", "quantize") if a in arguments)
    return f"`{name}`: `{function}` with `{argument}=`"


def tolerances(results: Path) -> str:
    """The ceiling of every check, and its reason. Ops with the same ceilings share a row."""
    ops: dict[tuple[str, ...], list[str]] = {}
    for op, what, dtype, ceiling, why in tolerance_rows():
        ops.setdefault((what, dtype, f"{ceiling:.1e}", why), []).append(f"`{op}`")
    rows = sorted((", ".join(names), *key) for key, names in ops.items())
    return markdown(("ops", "of", "dtype", "at most>", "because"), rows)


def speed(results: Path, direction: Direction) -> str:
    """Every row of the rowwise suite in one direction, slower ones included: a table for each op, bf16 first, and the
    other dtypes folded away."""
    parts = []
    for files in by_gpu(results, "rowwise").values():
        by_op: dict[str, dict[str, list[list[Row]]]] = {}
        for group in groups(row for _, rows in files for row in rows if row.direction == direction):
            by_op.setdefault(group[0].op, {}).setdefault(group[0].dtype, []).append(group)
        if by_op:
            parts += machines(files)
        for op, by_dtype in by_op.items():
            first, *others = sorted(by_dtype, key=lambda dtype: dtype != "bf16")
            parts += [f"**`{op}` {direction}, {first}**", "", speed_table(by_dtype[first]), ""]
            for dtype in others:
                # GitHub renders Markdown between empty lines; the attribute is for Python-Markdown.
                parts += ['<details markdown="1">', f"<summary>{dtype}: {closing(by_dtype[dtype])}</summary>", ""]
                parts += [speed_table(by_dtype[dtype]), "", "</details>", ""]
            every = [group for found in by_dtype.values() for group in found]
            parts += [f"`{op}` {direction}, speedup over the best baseline (above 1 is faster), {closing(every)}.", ""]
    return "\n".join(parts).strip() or NO_RESULTS


def _summary_cells(found: Sequence[list[Row]]) -> list[str]:
    ours, ratios = ours_of(found), ratios_of(found)
    fractions = [r.roof_fraction for r in ours if r.roof_fraction and r.nbytes >= LARGE]
    roof = f"{statistics.median(fractions):.3f} ({len(fractions)})" if fractions else "–"
    head = [f"`{ours[0].op}`", ours[0].direction, ", ".join(dict.fromkeys(r.dtype for r in ours)), str(len(ours))]
    if ratios is None:
        return [*head, "–", "–", "–", roof]
    mean, row, all_of_them = ratios
    least = f"{row.ratio_to_best_peer:.3f} ({row.place}, {row.dtype})"
    return [*head, f"{mean:.3f}", least, f"{sum(r >= TIE for r in all_of_them)} of {len(all_of_them)}", roof]


def summary(results: Path) -> str:
    """A line for each op and direction: its ratios to the best baseline of each row, and to the roof.

    An op that no suite has measured yet has a line that says so.
    """
    columns = (
        "op", "direction", "dtypes", "rows>", "ratio, geometric mean>", "least>", f"at {TIE} or more>",
        "of the roof, median (rows)>",
    )  # fmt: skip
    parts = []
    for files in by_gpu(results, "rowwise").values():
        found: dict[tuple[str, str], list[list[Row]]] = {}
        for group in groups(row for _, rows in files for row in rows):
            found.setdefault((group[0].op, group[0].direction), []).append(group)
        if found:
            cells = [*map(_summary_cells, found.values())]
            rowwise = [name for name, case in all_cases().items() if case.roof == "copy"]
            elsewhere = {path.stem for path in results.glob("*/*/*.json")}
            unmeasured = [name for name in rowwise if name not in {op for op, _ in found} | elsewhere]
            cells += [[f"`{name}`", "not measured yet", *["–"] * (len(columns) - 2)] for name in unmeasured]
            parts += [*machines(files), markdown(columns, sorted(cells, key=lambda c: c[0].strip("`"))), ""]
    return "\n".join(parts).strip() or NO_RESULTS


def host(results: Path) -> str:
    """The host's time to issue one call, beside the PyTorch op that it replaces (`rooftile bench --host`)."""
    columns = ("op", "shape", "call", "us>", "baseline", "its us>", "ratio>", "limit us>", "over")
    parts = []
    for _, meta, rows in host_files(results):
        cells = [
            [
                f"`{row['op']}`", row["shape"], row["direction"], number(row["us"]), row["baseline"],
                number(row["baseline_us"]), ratio(row["us"] / row["baseline_us"]), number(row["limit_us"]),
                "over" if row["us"] > row["limit_us"] else "",
            ]
            for row in rows
        ]  # fmt: skip
        parts += [machine(meta) + ".", "", markdown(columns, cells), ""]
        if first := meta.get("first_calls"):
            first_cells = [
                [f["call"], f["cache"], number(f["seconds"]), number(f["limit_s"]),
                 "over" if f["seconds"] > f["limit_s"] else ""]
                for f in first
            ]  # fmt: skip
            parts += [
                markdown(("first call of a process", "Triton's cache", "s>", "limit s>", "over"), first_cells),
                "",
            ]
    return "\n".join(parts).strip() or NO_RESULTS


def _prefill_cells(row: Row) -> list[str]:
    head = [row.op.replace("_", " "), row.shape, row.dtype, row.impl]
    if row.us is None or row.us_p20 is None or row.us_p80 is None:
        return [*head, row.status, *["–"] * 4, row.message]
    times = [number(row.us / 1e3, 4), f"{number(row.us_p20 / 1e3, 4)}–{number(row.us_p80 / 1e3, 4)}"]
    peak = "–" if row.peak_bytes is None else number(row.peak_bytes / 2**20)
    return [*head, *times, ratio(row.speedup_vs_eager), ratio(row.ratio_to_best_peer), peak, row.message]


def prefill(results: Path) -> str:
    """Whole models on a prompt, and their norms, RoPE and SwiGLU alone."""
    columns = (
        "what", "model and tokens", "dtype", "implementation", "ms>", "p20–p80>", "over eager>", "over its baseline>",
        "peak MiB>", "note",
    )  # fmt: skip
    parts = []
    for files in by_gpu(results, "prefill").values():
        for meta, rows in files:
            older = aged({"": is_older("prefill", meta, "prefill")})
            parts += [machine_line(meta) + older, "", markdown(columns, map(_prefill_cells, rows)), ""]
            parts += [str(meta["caption"]), ""] if "caption" in meta else []
    return "\n".join(parts).strip() or NO_RESULTS


TABLES: dict[str, Callable[[Path], str]] = {
    "ops": ops,
    "tolerances": tolerances,
    "summary": summary,
    "rowwise-forward": functools.partial(speed, direction="forward"),
    "rowwise-backward": functools.partial(speed, direction="backward"),
    "prefill": prefill,
    "host": host,
    "matmul": docs_products.matmul,
    "matmul-summary": docs_products.summary,
    "rms_norm_linear": docs_products.rms_norm_linear,
    "tuning": docs_products.tuning_table,
    **{
        f"schedules-{name}": functools.partial(docs_schedules.table, name=name)
        for name in ("linear", "gemv", "int8_linear", "int4_linear")
    },
    "attention": docs_attention.rows,
    "attention-summary": docs_attention.summary,
    "attention-memory": docs_attention.memory,
    "attention-sweep": docs_attention.sweep,
    "decode-step": docs_engine.decode_step,
    "e2e": docs_e2e.every_row,
    "e2e-summary": docs_e2e.summary,
    "e2e-layer": docs_e2e.layers,
    "serving": docs_serving.under_load,
    "speculation": docs_serving.speculated,
    "speculation-text": functools.partial(docs_serving.speculated, text=True),
    "quality": docs_quality.table,
    "training": docs_training.table,
    "training-steps": docs_training.steps,
    "training-convergence": docs_training.convergence,
    "training-from-scratch": docs_training.from_scratch,
    **{f"chart-{s.name}": functools.partial(docs_sweeps.sweep, name=s.name) for s in charts.SWEEPS},
    "passes": docs_passes.table,
    "rooflines": docs_sweeps.rooflines,
    "twins": docs_twins.table,
    "walkthrough-least": docs_walkthrough.least,
    **{f"walkthrough-{op}": functools.partial(docs_walkthrough.measured, op=op) for op in docs_walkthrough.KERNELS},
    "walkthrough-counters": docs_walkthrough.counters,
    "headline": docs_headline.table,
    "headline-ops": docs_headline.ops,
    "targets": docs_headline.targets,
    "gaps": docs_gaps.gaps,
    "two-gpus": docs_gpus.table,
    "sanitizer": docs_sanitizer.table,
    "published": docs_published.table,
    "versions": docs_environment.versions,
    "gpus": docs_environment.gpus,
}


def regenerate(text: str, results: Path) -> str:
    """The text with every marked table regenerated.

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


def differ(old: str, new: str) -> bool:
    """Whether two texts differ in more than the ages of rows, which change with each kernel and are not known where
    git's history is not."""
    return AGED.sub("", old) != AGED.sub("", new)


def main(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Markdown files with markers.")],
    results: Annotated[Path, typer.Option(file_okay=False, help="Where results are kept.")] = Path("results"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with code 1 if a file is stale.")] = False,
) -> None:
    """Regenerate the tables and charts of the documentation."""
    stale = []
    for path, draw in docs_sweeps.stale(results):
        stale.append(path)
        if not check:
            draw()
    for path in files:
        old = path.read_text(encoding="utf-8")
        try:
            new = regenerate(old, results)
        except ValueError as error:
            raise typer.BadParameter(f"{path}: {error}") from None
        if differ(old, new) if check else new != old:
            stale.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        typer.echo(f"{path}: {'stale' if check else 'written'}")
    if check and stale:
        raise typer.Exit(1)
