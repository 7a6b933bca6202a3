"""What `rooftile bench prefill` shows and draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rooftile.bench import report
from rooftile.bench.charts import OTHER_OURS, colour, page
from rooftile.bench.rows import OURS, Row

EAGER, COMPILE, OURS_COMPILE = "eager", "compile", "rooftile+compile"
IMPLS = (EAGER, OURS, COMPILE, OURS_COMPILE)
# The baseline of a row's ratio_to_best_peer: the plain model run in the same way.
PEER = {OURS: EAGER, OURS_COMPILE: COMPILE}
CAPTION = (
    "Milliseconds of one forward at batch 1, median (20th–80th percentile), from the first launch on an idle GPU to "
    "the last kernel's end; logits of every token, no cache, attention by scaled_dot_product_attention. "
    "Ratio: plain over patched, run in the same way. Compiled once for all lengths, unless asked for each length. "
    "layer_ops: the norms, RoPE and SwiGLU of all layers alone. rooftile+compile holds no Rooftile kernel: in a graph "
    "compiled without gradients the patch keeps the model's own code, which Inductor fuses with its surroundings, "
    "so its ratio shows that the patch costs a compiled model nothing."
)


def show(console: Console, rows: Sequence[Row], measured: bool) -> None:
    """One line for each length, an implementation in each column."""
    impls = list(dict.fromkeys(r.impl for r in rows))
    title = "prefill, milliseconds" + ("" if measured else f" ({report.NO_MEASUREMENT})")
    table = Table(title=title, title_justify="left", caption=CAPTION, caption_justify="left")
    table.add_column("shape", no_wrap=True)
    table.add_column("op", no_wrap=True)
    for name in impls:
        table.add_column(name, justify="right", no_wrap=True)
        if name in PEER:
            table.add_column("ratio", justify="right", no_wrap=True)
    for shape, op in dict.fromkeys((r.shape, r.op) for r in rows):
        found = {r.impl: r for r in rows if (r.shape, r.op) == (shape, op)}
        cells: list[str] = []
        for name in impls:
            row = found.get(name)
            cells.append("" if row is None else _cell(row))
            if name in PEER:
                cells.append("" if row is None else report.ratio(row.ratio_to_best_peer))
        table.add_row(shape, op, *cells, end_section=op != "prefill")
    wide = console if console.is_terminal else Console(file=console.file, width=report.WIDTH)
    wide.print(report.without_dashes(table))
    for row in rows:
        if row.message:
            wide.print(f"{row.shape} {row.op} {row.impl}: {row.message}", markup=False, highlight=False)


def _cell(row: Row) -> str:
    if row.us is None or row.us_p20 is None or row.us_p80 is None:
        return row.status
    return f"{row.us / 1e3:.2f} ({row.us_p20 / 1e3:.2f}–{row.us_p80 / 1e3:.2f})"


def plot(path: Path, rows: Sequence[Row], machine: str, measured: bool) -> None:
    """Bars of latency by length, each with its ratio to the plain model run in the same way."""
    with page() as plt:
        rows = [r for r in rows if r.op == "prefill" and r.us]
        shapes = list(dict.fromkeys(r.shape for r in rows))
        impls = list(dict.fromkeys(r.impl for r in rows))
        figure, axes = plt.subplots(figsize=(1.5 + 1.7 * len(shapes), 4.6), layout="constrained")
        for i, name in enumerate(impls):
            for at, shape in enumerate(shapes):
                row = next((r for r in rows if r.impl == name and r.shape == shape), None)
                if row is None or row.us is None:
                    continue
                label = name if at == 0 else None
                drawn = OTHER_OURS if name == OURS_COMPILE else colour(name)
                (bar,) = axes.bar(at + 0.2 * (i - 1.5), row.us / 1e3, 0.19, color=drawn, label=label)
                if row.ratio_to_best_peer:
                    axes.annotate(
                        f"{row.ratio_to_best_peer:.2f}×",
                        (bar.get_x() + bar.get_width() / 2, bar.get_height()),
                        ha="center",
                        va="bottom",
                        fontsize=7,
                    )
        axes.set_xticks(range(len(shapes)), [s.rpartition(" ")[2] for s in shapes])
        axes.set_ylabel("milliseconds for one forward")
        axes.grid(axis="x", visible=False)
        model = shapes[0].partition(" ")[0] if shapes else ""
        axes.set_title(f"{model} prefill, batch 1, {machine if measured else report.NO_MEASUREMENT}", fontsize=11)
        axes.legend(fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        plt.close(figure)
