"""The README's figures: whole models, the ops that users ask for and every op that loses, and a chart of the models."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rooftile.bench import charts, load_charts, training, vllm
from rooftile.bench.docs import attention as docs_attention
from rooftile.bench.docs import products
from rooftile.bench.docs.e2e import SUITE as GENERATION
from rooftile.bench.docs.tables import (
    NO_RESULTS,
    TIE,
    aged,
    counted,
    folded,
    is_older,
    markdown,
    ratios_of,
    when,
    where,
)
from rooftile.bench.e2e.paths import CUDA, HF
from rooftile.bench.e2e.results import FILES, over, read_results
from rooftile.bench.published import OFFLINE
from rooftile.bench.report import number, ratio, without_dashes
from rooftile.bench.rows import OURS, Row, best_peer, groups, is_ours, read_json
from rooftile.bench.training.steps import STEP, WORKLOADS
from rooftile.bench.training.worker import COMPILE, EAGER, LIGER, OURS_ALL
from rooftile.runtime import TARGETS

MODEL, TRAINED = "llama-3-8b", "llama-3.2-1b"
PROMPT, NEW = 512, 256  # tokens of one sequence, and tokens after them
CLIENTS = (64, 128, 256)  # of the closed loops that are throughput; the page on serving has those of fewer clients
COLUMNS = ("work, bf16", "implementation", "tokens/s>", "speedup × baseline>", "peak memory>", "GPU")
NOTE = (
    "A speedup is tokens/s over those of the baseline that it names, in bf16 and in the same run on that GPU; "
    'quantized weights have runs of their own. –: a baseline, or a run without one. "Older than their kernels": '
    "measured before a kernel of theirs was last changed."
)
WEIGHTS = ("", "bf16", "fp8", "int8", "int4")  # their order; baselines have no entry of their own
# The published sweeps against the best baselines.
SUITES = ("rowwise", products.SUITE, products.BACKWARD, *docs_attention.SUITES, training.SUITE)
# Shown whether they win or lose; every other op is shown if its mean or its median is below a tie.
OPS = (
    "rms_norm", "cross_entropy", "linear_cross_entropy", "adamw", "linear", "fp8_linear", "attention",
    "decode_attention",
)  # fmt: skip
PICKED = (
    f"Always shown: {', '.join(f'`{op}`' for op in OPS)}; of other ops those whose mean or median is below {TIE}, less "
    "than a tie. An op is shown for the GPU where it was measured last, and for another one if it has more rows there. "
    "Rows of attention with `eager` alone, which writes all scores, count only where they lose."
)
# What the tables call the baselines of ops, and what they are.
BASELINES = {
    "eager": "PyTorch's ops as Hugging Face models call them, with cuBLAS",
    "compile": "`torch.compile` of `eager`",
    "torch": "PyTorch's own fused call",
    "torch fused": "`torch.optim.AdamW(fused=True)`",
    "cudnn": "SDPA with cuDNN",
    "sdpa cudnn": "SDPA with cuDNN",
    "flash": "SDPA with FlashAttention",
    "sdpa flash": "SDPA with FlashAttention",
    "fa4": "FlashAttention-4",
    "flashinfer": "FlashInfer",
    "liger": "Liger-Kernel",
    "quack": "Dao-AILab's quack",
    "gather + sdpa": "pages gathered, then SDPA",
    "rms_norm+cublas": "Rooftile's norm, then cuBLAS",
    "dense": "Rooftile's own `attention_varlen` over contiguous keys and values",
}
NAMES = {
    HF: "Hugging Face, `torch.compile`, static cache",
    CUDA: "PyTorch with cuBLAS, SDPA, `torch.compile`, CUDA graphs",
    EAGER: "Hugging Face",
    COMPILE: "Hugging Face, `torch.compile`",
    LIGER: "Hugging Face, Liger-Kernel",
}
SHORT = {vllm.IMPL: "vLLM", CUDA: "PyTorch", EAGER: "Hugging Face", COMPILE: "`torch.compile`", LIGER: "Liger"}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One implementation of a whole model.

    `speedup` is that of tokens/s over `baseline`, the fastest one measured in the same run.
    """

    work: str
    impl: str
    weights: str
    tokens_per_s: float
    speedup: float | None
    baseline: str
    peak_bytes: int | None
    meta: Mapping[str, Any]
    command: str

    @property
    def gpu(self) -> str:
        return short(str(self.meta["gpu"]))

    @property
    def is_older(self) -> bool:
        of_engine = {CUDA: GENERATION, vllm.IMPL: "serve"}
        op, suite = ("decode", of_engine[self.baseline]) if self.baseline in of_engine else (STEP, training.SUITE)
        return is_older(op, self.meta, suite)

    @property
    def name(self) -> str:
        ours, *switches = self.impl.split()
        name = "**Rooftile**" if ours == OURS else NAMES[self.impl]
        said = f"`{', '.join(f'{switch}=True' for switch in switches)}`" if ours == OURS and switches else ""
        return ", ".join(filter(None, (name, said, self.weights)))


def short(gpu: str) -> str:
    """ "H100" of "NVIDIA H100 80GB HBM3"."""
    return gpu.removeprefix("NVIDIA ").split(" ")[0]


def generation(results: Path, new: int = NEW) -> list[Figure]:
    """Decoding one sequence in bfloat16: the baselines, and the engine with each kind of weights."""
    found = []
    for path in sorted(results.glob(f"*/{GENERATION}/{FILES}")):
        whole = read_results(path)
        rows = {r.impl: r for r in whole.rows if r.op == "decode" and r.status == "ok"}
        ours = rows.get(OURS)
        if ours is None or whole.meta["model"] != MODEL or whole.meta["tuning"] == "off" or ours.dtype != "bf16":
            continue
        if (ours.dims["batch"], ours.dims["prompt"], ours.dims["new"]) != (1, PROMPT, new):
            continue
        quantize = whole.meta["quantize"]
        work = f"generate with {MODEL}, one sequence"
        command = f"rooftile bench e2e --model {MODEL} --batch 1 --prompt {PROMPT} --new {new}"
        for impl in (OURS,) if quantize else (HF, CUDA, OURS):
            row = rows.get(impl)
            if row is None or row.tokens_per_s is None:
                continue
            base = rows.get(CUDA)
            # Not `over` itself, which is of median steps: tokens/s, beside which it stands, are of all steps.
            rate = base.tokens_per_s if impl == OURS and base and over(row, base) else None
            speedup = row.tokens_per_s / rate if rate else None
            weights = quantize or ours.dtype if impl == OURS else ""
            said = command + (f" --quantize {quantize}" if quantize else "")
            place = (work, impl, weights, row.tokens_per_s, speedup, CUDA)
            found.append(Figure(*place, None, {**whole.meta, "date": row.run}, said))
    return sorted(found, key=lambda f: (f.gpu, WEIGHTS.index(f.weights)))


def training_steps(results: Path) -> list[Figure]:
    """Every implementation of `TRAINED`, and of each other model the fastest of ours."""
    found = []
    order = {f"{STEP}-{name}": i for i, name in enumerate(WORKLOADS)}
    paths = (path for path in results.glob(f"*/{training.SUITE}/{STEP}-*.json") if path.stem in order)
    for path in sorted(paths, key=lambda path: (order[path.stem], str(path))):
        meta, rows = read_json(path)
        model = path.stem.removeprefix(f"{STEP}-")
        rows = [r for r in rows if r.op == STEP and r.status == "ok" and r.us and r.tokens_per_s]
        best = min((r for r in rows if not is_ours(r.impl)), key=lambda r: r.us or 0.0, default=None)
        if model == TRAINED:
            rows = [r for impl in (EAGER, COMPILE, LIGER, OURS, OURS_ALL) for r in rows if r.impl == impl]
        else:
            rows = sorted((r for r in rows if is_ours(r.impl)), key=lambda r: r.us or 0.0)[:1]
        for row in rows:
            speedup = best.us / row.us if best and is_ours(row.impl) else None  # type: ignore[operator]
            work = f"train {model}, {row.dims['batch']} x {row.dims['tokens']} tokens"
            command = f"rooftile bench training steps --model {model}"
            place = (work, row.impl, "", float(row.tokens_per_s or 0), speedup, best.impl if best else "")
            found.append(Figure(*place, row.peak_bytes, meta, command))
    return found


def served(results: Path) -> list[Figure]:
    """The engine under the published closed loops, where vLLM was measured beside it."""
    found = []
    for path in sorted(results.glob(f"*/{load_charts.FOLDER}/{MODEL}-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        asked = data["meta"]["workload"]
        lengths = f"--fixed --prompt {asked['prompt']} --new {asked['new']} "
        rows = [r for r in data["rows"] if r["impl"] == OURS and "ratio_to_best_peer" in r]
        rows = [r for r in rows if r.get("clients") in CLIENTS]
        if not asked["fixed"] or asked.get("prefix") or lengths not in f"{OFFLINE} ":
            continue
        clients = ",".join(str(row["clients"]) for row in rows)
        command = f"rooftile {OFFLINE} --clients {clients} --peers {vllm.IMPL}"
        for row in rows:
            work = f"serve {MODEL}, {row['clients']} clients"
            place = (work, OURS, "", row["tokens_per_s"], row["ratio_to_best_peer"], vllm.IMPL)
            found.append(Figure(*place, None, data["meta"], command))
    return found


def figures(results: Path, new: int = NEW) -> list[Figure]:
    """Training, then generation, then serving.

    Of the GPUs that a work was measured on, one whose rows are no older than their kernels, and of those the one that
    was measured last.
    """
    works: dict[str, dict[str, list[Figure]]] = {}
    for f in [*training_steps(results), *generation(results, new), *served(results)]:
        works.setdefault(f.work, {}).setdefault(f.gpu, []).append(f)

    def order(own: Sequence[Figure]) -> tuple[bool, str]:
        return not any(f.is_older for f in own), max(str(f.meta["date"]) for f in own)

    return [f for gpus in works.values() for f in max(gpus.values(), key=order)]


def _cells(f: Figure) -> list[str]:
    memory = "–" if f.peak_bytes is None else f"{number(f.peak_bytes / 2**30)} GiB"
    base = SHORT[f.baseline] if f.weights in WEIGHTS[:2] else f"{SHORT[f.baseline]} in bf16"
    faster = "–" if f.speedup is None else f"{ratio(f.speedup)} × {base}"
    return [f.work, f.name, number(f.tokens_per_s, 4), faster, memory, f.gpu]


def _sources(found: Iterable[tuple[Mapping[str, Any], str, str, bool]]) -> list[str]:
    """A line for each machine, with what each commit measured, and whether the kernels have changed since.

    `found` has the metadata of a run, what it measured, in which direction, and whether it is older than its kernel.
    """
    machines: dict[str, dict[str, dict[str, dict[str, bool]]]] = {}
    for meta, name, direction, older in found:
        ages = machines.setdefault(where(meta), {}).setdefault(when(meta), {}).setdefault(f"`{name}`", {})
        ages[direction] = older or ages.get(direction, False)
    return [
        " ".join([f"{line}.", *(f"{', '.join(ages)}: {commit}.{aged(folded(ages))}" for commit, ages in by.items())])
        for line, by in machines.items()
    ]


def table(results: Path) -> str:
    """Tokens a second of whole models, beside what users run today: a chart and a table."""
    found = figures(results)
    chart = f"![Tokens a second: {'; '.join(_compared(results))}]({CHART})"
    sources = _sources((f.meta, f.command, "", f.is_older) for f in found)
    parts = chart, "", markdown(COLUMNS, map(_cells, found)), "", NOTE, "", *sources
    return "\n".join(parts) if found else NO_RESULTS


def show(found: Sequence[Figure], console: Console) -> None:
    """The same as `table`, on a terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in COLUMNS:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left")
    for f in found:
        table.add_row(*(re.sub(r"[*`]", "", cell) for cell in _cells(f)))
    console.print(without_dashes(table))


@dataclasses.dataclass(frozen=True)
class _Point:
    """The rows of an op at a point, the run that they are of, and whether they are older than the kernel."""

    rows: list[Row]
    meta: Mapping[str, Any]
    older: bool


@dataclasses.dataclass
class _Measured:
    """An op on a GPU, in one direction."""

    every: list[_Point] = dataclasses.field(default_factory=list)

    @property
    def last(self) -> str:
        """The date of the newest."""
        return max(str(p.meta["date"]) for p in self.every)

    @property
    def points(self) -> list[_Point]:
        """Those that count: points that are older than the kernel do where there are few others."""
        current = [p for p in self.every if not p.older]
        return self.every if len(self.every) > 3 * len(current) else current


def ops(results: Path) -> str:
    """A line for each of `OPS`, and for every op whose mean or median is below a tie; then what the names of baselines
    mean, how the ops were picked, and the commits that were measured.

    Of the GPUs that an op was measured on, the one of the newest rows, and one that has more points. Points that are
    older than the kernel count where they are more than twice as many as others.
    """
    found: dict[tuple[str, str], dict[str, _Measured]] = {}
    for suite in SUITES:
        for path in sorted(results.glob(f"*/{suite}/*.json")):
            meta, rows = read_json(path)
            for group in groups(r for r in rows if r.op != STEP):
                if any(r.impl == OURS for r in group):
                    op, direction = group[0].op, group[0].direction
                    own = found.setdefault((op, direction), {}).setdefault(short(str(meta["gpu"])), _Measured())
                    own.every.append(_Point(group, meta, is_older(op, meta, suite, direction)))
    lines = []
    for (op, direction), gpus in found.items():
        newest = max(gpus.values(), key=lambda own: own.last)
        for gpu, own in gpus.items():
            points = counted(p.rows for p in own.points)
            ratios = ratios_of(points)
            if own is not newest and len(points) <= len(counted(p.rows for p in newest.points)):
                continue
            if ratios is None:
                continue
            mean, row, all_of_them = ratios
            # A mean alone hides losses behind a few points whose baseline is slow.
            median = statistics.median(all_of_them)
            if op not in OPS and min(mean, median) >= TIE:
                continue
            names = collections.Counter(peer.impl for group in points if (peer := best_peer(group)))
            best = [name for name, _ in names.most_common(2)]
            least = f"{row.ratio_to_best_peer:.2f}: {row.place}"
            cells = [
                f"`{op}`",
                direction,
                str(len(all_of_them)),
                f"{median:.2f}",
                f"{mean:.2f}",
                least,
                ", ".join(best),
                gpu,
            ]
            lines.append((median, cells, best, [(p.meta, op, direction, p.older) for p in own.points]))
    if not lines:
        return NO_RESULTS
    columns = ("op", "direction", "rows>", "speedup, median>", "geometric mean>", "least", "best baselines", "GPU")
    lines.sort(key=lambda line: -line[0])
    shown = {name for _, _, best, _ in lines for name in best}
    named: dict[str, list[str]] = {}
    for name in (name for name in BASELINES if name in shown):
        named.setdefault(BASELINES[name], []).append(f"`{name}`")
    baselines = "; ".join(f"{', '.join(names)} ({what})" for what, names in named.items())
    sources = _sources(run for *_, runs in lines for run in runs)
    table = markdown(columns, [cells for _, cells, *_ in lines])
    return "\n".join([table, "", f"{PICKED} Baselines: {baselines}.", "", *sources])


def targets(results: Path) -> str:
    """Which GPUs were measured, which are compiled for, and which were never tried."""
    rows: collections.Counter[str] = collections.Counter()
    for path in sorted(results.glob("*/*/*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        timed = (r for r in data.get("rows", ()) if r.get("impl", OURS) == OURS and r.get("us"))
        rows[short(str(data["meta"].get("gpu", "")))] += sum(1 for _ in timed)
    run = ", ".join(f"{gpu} ({count} measurements)" for gpu, count in sorted(rows.items()) if gpu and count)
    others = ", ".join(f"{t.gpu} (`{t.arch}`)" for t in TARGETS.values() if t.gpu not in rows)
    cells = [
        ("tested and measured", run or "none"),
        ("every op compiled in CI with its configurations for it, never run", others),
        ("never tried", "every other GPU; ROCm and XPU builds of PyTorch"),
    ]
    return markdown(("state", "GPUs"), cells)


CHART = Path("docs/images/headline.svg")  # in the repository


def _compared(results: Path) -> dict[str, list[Figure]]:
    """The figures of each work that has more than one, by GPU."""
    works: dict[str, list[Figure]] = {}
    for f in figures(results):
        works.setdefault(f"{f.work} ({f.gpu})", []).append(f)
    return {work: found for work, found in works.items() if len(found) > 1}


def chart_data(results: Path) -> list[Any]:
    found = (f for figures in _compared(results).values() for f in figures)
    return [[f.work, f.impl, f.weights, f.gpu, number(f.tokens_per_s, 4)] for f in found]


def draw(results: Path, chart: Path = CHART) -> None:
    """Bars of tokens a second, one panel for each work."""
    works = _compared(results)
    heights = [len(found) for found in works.values()]
    with charts.page() as plt:
        fig, axes = plt.subplots(
            len(works), 1, figsize=(8.4, 0.36 * sum(heights) + 0.5 * len(works)), squeeze=False,
            gridspec_kw={"height_ratios": heights}, layout="constrained",
        )  # fmt: skip
        for ax, (work, found) in zip(axes[:, 0], works.items(), strict=True):
            names = [re.sub(r"[*`]", "", f.name) for f in found]
            colours = [charts.COLOURS["rooftile" if is_ours(f.impl) else "eager"] for f in found]
            bars = ax.barh(names, [f.tokens_per_s for f in found], height=0.72, color=colours)
            ax.bar_label(bars, [f"{f.tokens_per_s:,.0f}" for f in found], padding=4)
            ax.invert_yaxis()
            ax.set_title(f"{work.partition(',')[0]}: tokens/s, {found[0].gpu}", loc="left", fontweight="bold")
            ax.margins(x=0.1)
            ax.set_xticks([])
            ax.grid(False)
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
        charts.save(fig, chart, chart_data(results))
        plt.close(fig)
