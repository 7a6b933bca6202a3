"""Charts of the rows under results/<gpu>/training/: losses over the vocabulary, steps, largest batches, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftile.bench import report
from rooftile.bench.charts import colour, page
from rooftile.bench.rows import Row, read_json
from rooftile.bench.training.steps import BATCH, GIB, STEP
from rooftile.cases import all_cases


def draw(path: Path) -> list[Path]:
    """The charts of one file of results, beside it."""
    meta, rows = read_json(path)
    gpu = str(meta["gpu"])
    case = all_cases().get(path.stem)
    if case is not None:
        return report.plot_over(path.parent, rows, case.over, gpu) if case.over else []
    steps, batches = ([r for r in rows if r.op == op] for op in (STEP, BATCH))
    drawn = []
    if any(r.us for r in steps):
        panels = {
            "tokens/s": lambda r: r.tokens_per_s,
            "GiB allocated, at most": lambda r: r.peak_bytes and r.peak_bytes / GIB,
        }
        drawn.append(_bars(path.with_suffix(".png"), steps, panels, gpu))
    if batches:
        drawn.append(_bars(path.with_suffix(".png"), batches, {"sequences": lambda r: r.dims["batch"]}, gpu))
    if meta.get("timeline"):
        drawn.append(_timelines(path.with_name(f"{path.stem}-memory.png"), meta["timeline"], f"{meta['model']}, {gpu}"))
    return drawn


def _label(height: float) -> str:
    return str(height) if isinstance(height, int) and height else report.number(height) if height else "none"


def _bars(path: Path, rows: Sequence[Row], panels: Mapping[str, Any], gpu: str) -> Path:
    """A panel for each figure, a group of bars for each shape."""
    with page() as plt:
        shapes, impls = (list(dict.fromkeys(names)) for names in ([r.shape for r in rows], [r.impl for r in rows]))
        size = (1 + 1.1 * len(shapes) * max(3, len(impls)) * len(panels) / 2, 4.2)
        figure, every = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
        for axes, (label, value) in zip(every[0], panels.items(), strict=True):
            for i, impl in enumerate(impls):
                found = {r.shape: value(r) for r in rows if r.impl == impl and r.status == "ok"}
                heights = [found.get(shape) or 0 for shape in shapes]
                bars = axes.bar([at + i / (len(impls) + 1) for at in range(len(shapes))], heights,
                                1 / (len(impls) + 1), color=colour(impl), label=impl)  # fmt: skip
                axes.bar_label(bars, [_label(h) for h in heights], fontsize=7)
            middle = (len(impls) - 1) / (len(impls) + 1) / 2
            axes.set_xticks([at + middle for at in range(len(shapes))], shapes, fontsize=8)
            axes.set_ylabel(label)
            axes.grid(axis="x", visible=False)
        figure.legend(
            *every[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(impls), fontsize=8
        )
        figure.suptitle(f"{rows[0].op}, {rows[0].dtype}, {gpu}", fontsize=11)
        figure.savefig(path, dpi=110)
        plt.close(figure)
        return path


def _timelines(path: Path, timelines: Mapping[str, Mapping[str, Any]], title: str) -> Path:
    """The memory over one step, a line for each implementation; a tick where a phase ends."""
    with page() as plt:
        figure, axes = plt.subplots(figsize=(10.0, 4.4), layout="constrained")
        for impl, line in timelines.items():
            ms, mib = ([float(v) for v in line[key].split()] for key in ("ms", "mib"))
            (drawn,) = axes.step(ms, [v / 1024 for v in mib], where="post", color=colour(impl), label=impl)
            for phase, at in line["phases"].items():
                axes.axvline(at, color=drawn.get_color(), linewidth=0.6, linestyle=":")
                axes.text(
                    at,
                    0.1,
                    f"end of {phase}",
                    fontsize=6,
                    rotation=90,
                    color=drawn.get_color(),
                    va="bottom",
                    ha="right",
                )
        axes.set_xlabel("milliseconds of one step")
        axes.set_ylabel("GiB allocated")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        axes.set_title(f"memory of a training step, {title}", fontsize=11)
        figure.savefig(path, dpi=110)
        plt.close(figure)
        return path
