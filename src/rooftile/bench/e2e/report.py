"""What `rooftile bench e2e` shows and draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rooftile.bench import report
from rooftile.bench.charts import COLOURS, OTHER_OURS, page
from rooftile.bench.rows import OURS, Row

CAPTION = (
    "decode: milliseconds of one step (a token of each sequence), from the previous step's end to its own, by "
    "events on the device; greedy, and the host reads nothing. GB/s and roof: the weights, keys and values that a"
    " step must read, over its time, against a streaming read of the same run. prefill: milliseconds of all "
    "prompts, from the first launch on an idle GPU to the first tokens, with logits of each prompt's last token. "
    "Ratio: the time of the best baseline that runs in the same way, over this row's."
)


@dataclasses.dataclass
class E2ERow(Row):
    """A row of decoding (`us` is a step of the whole batch) or of a prefill (`us` is that of all prompts).

    Attributes:
        us_p99: the 99th percentile over the samples.
        tokens_per_s: tokens of the whole batch, over all samples' time.
        first_call_s: seconds until it could be timed: built, compiled, recorded, run for the first time.
        note: what it chose by itself.
        run: the date of its run, whose other rows its ratios are to; the file's meta data have more of it under `runs`.
    """

    us_p99: float | None = None
    tokens_per_s: float | None = None
    first_call_s: float | None = None
    note: str = ""
    run: str = ""


def label(row: Row) -> str:
    """The implementation, with what distinguishes its row."""
    words = [f"tuning {v}" if k == "tuning" else str(v) for k, v in row.options.items()]
    return f"{row.impl} ({', '.join(words)})" if words else row.impl


_FIGURES = (
    "median", "p20–p80", "p99", "tokens/s", "GB/s", "TFLOP/s", "of roof", "ratio", "max error", "ready s",
)  # fmt: skip


def _ms(us: float | None) -> str:
    return "–" if us is None else f"{us / 1e3:.3f}"


def show(console: Console, rows: Sequence[E2ERow], measured: bool) -> None:
    """A table of decoding and one of prefills, an implementation on each line."""
    out = console if console.is_terminal else Console(file=console.file, width=report.WIDTH)
    for op in dict.fromkeys(r.op for r in rows):
        title = f"{op}, milliseconds" + ("" if measured else f" ({report.NO_MEASUREMENT})")
        table = Table(title=title, title_justify="left")
        table.add_column("model", no_wrap=True)
        table.add_column("impl", no_wrap=True)
        for name in _FIGURES:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("status", no_wrap=True)
        found = [r for r in rows if r.op == op]
        for i, row in enumerate(found):
            last = i + 1 == len(found) or found[i + 1].shape != row.shape
            first = i == 0 or found[i - 1].shape != row.shape
            cells = (
                row.shape if first else "",
                label(row),
                _ms(row.us),
                "–" if row.us is None else f"{_ms(row.us_p20)}–{_ms(row.us_p80)}",
                _ms(row.us_p99),
                report.number(row.tokens_per_s, 4),
                report.number(row.gbs, 4),
                report.number(row.tflops),
                report.ratio(row.roof_fraction, 3),
                report.ratio(row.ratio_to_best_peer, 3),
                "–" if row.max_error is None else f"{row.max_error:.1e}",
                "–" if row.first_call_s is None else f"{row.first_call_s:.1f}",
                row.status,
            )
            style = "red" if row.status in ("FAIL", "error") else "bold" if row.impl == OURS else ""
            table.add_row(*(Text(cell) for cell in cells), style=style, end_section=last)
        out.print(report.without_dashes(table))
        for row in found:
            if row.message:
                out.print(f"{row.shape} {label(row)}: {row.message}", markup=False, highlight=False, soft_wrap=True)
    out.print(CAPTION, markup=False, highlight=False)


_COLOURS = {
    OURS: COLOURS[OURS],
    "cuda_kernels": COLOURS["compile"],
    "hf_static_compile": COLOURS["liger"],
    "hf_patched": OTHER_OURS,
    "hf_eager": COLOURS["eager"],
}


def _style(impl: str) -> dict[str, Any]:
    """An implementation without graphs has the colour of the one with graphs, dashed."""
    plain = impl.partition(" ")[0]
    base = plain.removesuffix("_eager").removesuffix("_untuned")
    colour = _COLOURS.get(plain) or _COLOURS.get(base) or _COLOURS["hf_eager"]
    dashed = plain != base and plain != "hf_eager"
    ours = plain == OURS
    return {
        "color": colour, "linestyle": "--" if dashed else ":" if "(" in impl else "-", "marker": "o" if ours else "s",
        "linewidth": 2.4 if ours else 1.3, "markersize": 7 if ours else 5, "zorder": 3 if ours else 2,
    }  # fmt: skip


def plot(folder: Path, rows: Sequence[E2ERow], machine: str, measured: bool) -> list[Path]:
    """Draw a chart for each model: milliseconds a step by batch size, and the time at the roof. Returns their paths."""
    with page() as plt:
        charts: dict[tuple[str, int, int], list[E2ERow]] = {}
        for row in rows:
            if row.op == "decode" and row.us:
                key = (" ".join(row.shape.split()[:-3]), row.dims["prompt"], row.dims["new"])
                charts.setdefault(key, []).append(row)
        paths = []
        for (model, prompt, new), found in charts.items():
            batches = sorted({r.dims["batch"] for r in found})
            figure, axes = plt.subplots(figsize=(8.5, 5.2), layout="constrained")
            for name in dict.fromkeys(label(r) for r in found):
                by_batch = {r.dims["batch"]: r for r in found if label(r) == name}  # of the same the later row
                places = [i for i, b in enumerate(batches) if b in by_batch]
                values = [(by_batch[batches[i]].us or 0.0) / 1e3 for i in places]
                axes.plot(places, values, label=name, **_style(name))
            for quantized in (False, True):
                floors = {
                    r.dims["batch"]: r.nbytes / r.roof_gbs / 1e6
                    for r in found
                    if r.roof_gbs and quantized == ("quantize" in r.options)
                }
                if floors:
                    places = [i for i, b in enumerate(batches) if b in floors]
                    text = "roof: the bytes at a streaming read" + (", quantized" if quantized else "")
                    axes.plot(
                        places, [floors[batches[i]] for i in places], "k-" if quantized else "k--", lw=1, label=text
                    )
            axes.set_xticks(range(len(batches)), [str(b) for b in batches])
            axes.set_xlabel("batch")
            axes.set_ylabel("milliseconds a step")
            axes.set_yscale("log")
            axes.grid(axis="x", visible=False)
            axes.grid(axis="y", which="both")
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
            where = machine if measured else report.NO_MEASUREMENT
            axes.set_title(f"{model}, prompt {prompt}, {new} new tokens, {where}", fontsize=11)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{model.replace(' ', '-')}-p{prompt}-n{new}.png"
            figure.savefig(path, dpi=130)
            plt.close(figure)
            paths.append(path)
        return paths
