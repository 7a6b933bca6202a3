"""`rooftile bench training convergence`: small models of every family trained on real text, three ways from one seed.

The ways are plain PyTorch ("eager"), `torch.compile`, and a patched model with `rooftile.optim.AdamW` ("rooftile"). All
start from the same weights and see the same batches. Each model and dtype is a process of its own (`trajectory.py`),
several at a time.

Losses of all steps, log-probabilities on held-out text and weights are compared with eager's. torch.compile's run
differs from eager's by rounding alone, and training amplifies rounding. Adam divides a gradient by its own size, so
that one which is nothing but rounding (a key's bias has none in exact arithmetic) moves its parameter as far as any
other.

    float32     each run is within 1e-4. T5, whose scores are not scaled, is so sensitive that eager and torch.compile
                come to differ by more; there, twice what these differ by is the bound.
    bfloat16    of two runs that round as much either is further off in half of the models, so that once what
                torch.compile's is off by can bound no single run: each is within `BOUNDS["bf16"]` times that, or times
                what torch.compile's are off by over the families in the geometric mean if that is more. Over the
                families the geometric mean of the two's ratio, which is 1 for runs that round as much, is at most
                `most_of_mean`. Of the losses the median over the steps is judged: late in a run one step may amplify
                all rounding before it, in one run and not in the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rooftile import runtime
from rooftile.bench import report
from rooftile.bench.charts import COLOURS, page
from rooftile.bench.info import check_results, machine, may_join, version
from rooftile.bench.rows import OURS, gpu_slug, write_whole
from rooftile.bench.training.children import result_of
from rooftile.bench.training.trajectory import COMPILE, EAGER, TITLES, WAYS, Job

MEDIAN = "loss_median"
QUANTITIES = ("loss", MEDIAN, "logprobs", "weights")
# The largest difference of all losses in float32; in bfloat16 two correct runs have largest ones that vary too much.
JUDGED = {"fp32": ("loss", "logprobs", "weights"), "bf16": (MEDIAN, "logprobs", "weights")}
LEARNS = 20  # steps after which a loss is lower
FLOAT32 = 1e-4
# The standard deviations of the logarithm of ours over torch.compile's in bfloat16, of the 23 models in results/ of an
# H100: of the runs that they judge. Logprobs have 0.43 without Llama and Mistral, whose ratios of 6.9 and 6.2 are not
# explained.
SPREAD = {MEDIAN: 0.31, "logprobs": 0.67, "weights": 0.40}
# In multiples of what torch.compile's run is off by; in bfloat16 three standard deviations.
BOUNDS = {
    "fp32": dict.fromkeys(JUDGED["fp32"], 2.0),
    "bf16": {name: round(math.exp(3 * spread), 1) for name, spread in SPREAD.items()},
}
# The most that the median error of rounding to bfloat16 can be. These models' own code rounds the loss so: most losses
# of their compiled runs are eager's then, bit for bit. Ours are float32.
ROUNDED_LOSS = 2.0**-9
ROUND_THE_LOSS = ("t5", "bert", "roberta")
FAMILIES = 8  # of which such a mean is judged
REAL = "llama-3.2-1b"
FOLDER = "training/convergence"  # a folder of its own: its file has no rows of times
LIMIT_S = 500  # of one process
_SLOW = ("deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe", "t5")  # they start first

Launch = Callable[[Job], dict[str, Any]]


def jobs_of(names: Sequence[str], measures: bool) -> list[Job]:
    """The jobs of those names, or of all; in the interpreter a few steps of tiny models, by default of one."""
    if unknown := sorted(set(names) - {*TITLES, REAL}):
        raise ValueError(f"unknown family {', '.join(unknown)}; known families: {', '.join((*TITLES, REAL))}")
    wanted = names or ((*TITLES, REAL) if measures else ("llama",))
    size: dict[str, Any] = {"width": 4, "depth": 2, "batch": 4, "tokens": 256, "steps": 100} if measures else {}
    found = [Job(REAL, "bf16", tokens=2048, steps=100, lr=3e-4)] if REAL in wanted and measures else []
    families = sorted((name for name in TITLES if name in wanted), key=lambda name: name not in _SLOW)
    return found + [Job(name, dtype, **size) for name in families for dtype in ("fp32", "bf16")]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_child(job: Job) -> dict[str, Any]:
    """What the job's process prints; if it prints nothing, an error."""
    command = [sys.executable, "-m", "rooftile.bench.training.trajectory", json.dumps(dataclasses.asdict(job))]
    # The processes share the cores: none starts a pool of compilers of its own.
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", **os.environ}
    failed = {**dataclasses.asdict(job), "losses": [], "seconds": {}, "runs": {}}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
    found = result_of(process, "", LIMIT_S)
    return {**failed, "message": found} if isinstance(found, str) else found


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def off(found: Mapping[str, Any], way: str, name: str) -> float | None:
    """How far that way's run is from eager's, in the quantity of that name; None if it was not made."""
    run = found["runs"].get(way, {})
    if name == MEDIAN and (steps := run.get("difference")) is not None:
        return math.nan if any(map(math.isnan, steps)) else statistics.median(map(abs, steps))
    value: float | None = run.get(name)
    return value


def typical(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What torch.compile's bfloat16 runs are off by: the geometric mean over the families, if there are enough."""
    most = {}
    for name in JUDGED["bf16"]:
        offs = [value for each in found if each["dtype"] == "bf16" and (value := off(each, COMPILE, name))]
        if len(offs) >= FAMILIES:
            most[name] = _mean(offs)
    return most


def units(found: Mapping[str, Any], usual: Mapping[str, float]) -> dict[str, float | None]:
    """Of each judged quantity, what eager and torch.compile differ by; in float32 1e-4 if that is more. None if nothing
    says.

    `usual` is what `typical` found, and the least in bfloat16: one run of torch.compile is one draw.
    """

    def unit(name: str) -> float | None:
        value = off(found, COMPILE, name)
        if found["dtype"] == "fp32":
            return max(FLOAT32, value or 0.0)
        if value is None:
            return None
        if not value and name == MEDIAN and found["name"] in ROUND_THE_LOSS:
            value = ROUNDED_LOSS
        return max(value, usual.get(name, 0.0)) or None

    return {name: unit(name) for name in JUDGED[found["dtype"]]}


def bounds(found: Mapping[str, Any], usual: Mapping[str, float]) -> dict[str, float | None]:
    """The largest difference of each judged quantity that a correct run may have; `usual` as in `units`."""
    dtype = found["dtype"]
    return {
        name: None if unit is None else unit if (dtype, unit) == ("fp32", FLOAT32) else BOUNDS[dtype][name] * unit
        for name, unit in units(found, usual).items()
    }


def _ratios(found: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    pairs = [(off(each, OURS, name), off(each, COMPILE, name)) for each in found if each["dtype"] == "bf16"]
    return [ours / plain for ours, plain in pairs if ours and plain]


def mean_ratios(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the bfloat16 runs, the geometric mean of what ours is off by over what torch.compile's is off by."""
    ratios = {name: _ratios(found, name) for name in JUDGED["bf16"]}
    return {name: _mean(each) for name, each in ratios.items() if len(each) >= FAMILIES}


def verdict(found: Mapping[str, Any], usual: Mapping[str, float]) -> str:
    """ "ok", or why our run of a job is not what it should be; `usual` as in `bounds`."""
    if not found["losses"]:
        return f"error: {found.get('message', '')}"
    if found["steps"] >= LEARNS and not found["losses"][-1] < found["losses"][0]:
        return f"FAIL: eager's loss goes from {found['losses'][0]:.4g} to {found['losses'][-1]:.4g}"
    ours = found["runs"].get(OURS, {"status": "error", "message": "not run"})
    if ours["status"] != "ok":
        return f"error: {ours['message']}"
    for name, bound in bounds(found, usual).items():
        if bound is None:
            return f"FAIL: torch.compile gave no bound: {found['runs'].get(COMPILE, {}).get('message', 'not run')}"
        value = off(found, OURS, name)
        value = math.nan if value is None else value
        if not value <= bound:
            return f"FAIL: {name} differs by {value:.1e}, at most {bound:.1e} expected"
    return "ok"


COLUMNS = (
    "family", "dtype", "parameters>", "steps>", "loss, first>", "last>",
    *(f"{what}{which}>" for what in QUANTITIES for which in (", compile", ", rooftile")),
    *(f"{what}, ratio>" for what in ("loss", "logprobs", "weights")), "same best>", "",
)  # fmt: skip


def cells(found: Mapping[str, Any], usual: Mapping[str, float]) -> list[str]:
    """A job under `COLUMNS`; `usual` as in `bounds`."""
    runs, losses = found["runs"], found["losses"]
    offs = [off(found, way, name) for name in QUANTITIES for way in (COMPILE, OURS)]
    shown = ["–" if value is None else f"{value:.1e}" for value in offs]
    for name in JUDGED[found["dtype"]]:
        ours, plain = off(found, OURS, name), off(found, COMPILE, name)
        if found["dtype"] == "fp32":
            plain = max(FLOAT32, plain or 0.0)
        shown.append(f"{ours / plain:.2f}" if ours is not None and plain else "–")
    same = runs.get(OURS, {}).get("same_best")
    return [
        TITLES.get(found["name"], found["name"]),
        found["dtype"],
        f"{found['parameters'] / 1e6:,.1f}M" if "parameters" in found else "–",
        str(found["steps"]),
        *([f"{losses[0]:.3f}", f"{losses[-1]:.3f}"] if losses else ["–", "–"]),
        *shown,
        "–" if same is None else f"{same:.1%}",
        verdict(found, usual).partition(":")[0],
    ]


# What the columns of ratios are, and the bounds.
RATIOS = (
    "Ratios are Rooftile's differences over torch.compile's of the same model, in fp32 over 1e-4 where that is more. "
    "Of the losses, fp32 has the ratio of loss and bf16 that of loss_median. Accepted are in fp32 1, or "
    f"{BOUNDS['fp32']['loss']:g} where torch.compile's differs by more than 1e-4; in bf16 "
    + ", ".join(f"{bound:g} of {name}" for name, bound in BOUNDS["bf16"].items())
    + ", also times torch.compile's geometric mean over the families where that is more."
)


def most_of_mean(name: str, n: int) -> float:
    """The largest mean ratio of n models that round as much as torch.compile's: three standard errors."""
    return math.exp(3 * SPREAD[name] / math.sqrt(n))


def means_of(found: Sequence[Mapping[str, Any]]) -> str:
    """The means of the bfloat16 runs' ratios, and how many are 1 or less; empty if there are too few."""

    def shown(name: str) -> str:
        each = _ratios(found, name)
        within = (
            f"at most {most_of_mean(name, len(each)):.2f}; {sum(r <= 1 for r in each)} of {len(each)} are 1 or less"
        )
        return f"{name} {_mean(each):.2f} ({within})"

    return ", ".join(map(shown, mean_ratios(found)))


def show(console: Console, found: Sequence[Mapping[str, Any]], measures: bool) -> None:
    """The table, and why a job failed."""
    table = Table(
        title="training on real text, against plain eager" + ("" if measures else f" ({report.NO_MEASUREMENT})"),
        title_justify="left",
        caption="Losses in nats a byte (of masked models, a masked byte). Relative differences from eager: loss, the "
        "largest of all steps; loss_median, their median; logprobs, of the ten likeliest tokens at each place of "
        "held-out text, and weights, after the last step. " + RATIOS,
        caption_justify="left",
    )
    for name in COLUMNS:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", no_wrap=name == "family")
    usual = typical(found)
    for each in found:
        table.add_row(*cells(each, usual), style="" if verdict(each, usual) == "ok" else "red")
    out = console if console.is_terminal else Console(file=console.file, width=report.WIDTH)
    out.print(report.without_dashes(table))
    for each in found:
        for way, run in each["runs"].items():
            if run["status"] != "ok":
                out.print(f"{each['name']} {each['dtype']} {way}: {run['message']}", markup=False, highlight=False)
        if (why := verdict(each, usual)) != "ok":
            out.print(f"{each['name']} {each['dtype']}: {why}", markup=False, highlight=False, soft_wrap=True)


def _short(value: Any, digits: int = 3) -> Any:
    """The value with few digits: a file of all runs is to stay small."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {k: _short(v, 5 if k == "losses" else digits) for k, v in value.items()}
    return [_short(v, digits) for v in value] if isinstance(value, list) else value


def write(path: Path, meta: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write the runs, a line for each, and those that the file has of this machine and commit; all that it has then."""
    every = {(each["name"], each["dtype"]): _short(each) for each in found}
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if may_join(meta, before["meta"], ("transformers",)):
            every = {(each["name"], each["dtype"]): each for each in before["runs"]} | every
    order = {name: i for i, name in enumerate((*TITLES, REAL))}
    runs = sorted(every.values(), key=lambda each: (order[each["name"]], each["dtype"]))
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in runs)
    write_whole(path, f'{{"meta": {json.dumps(meta, indent=1)},\n"runs": [\n{lines}\n]}}\n')
    return runs


def draw(path: Path) -> list[Path]:
    """Charts of a file of runs, beside it: of the families in each dtype, and of each model of a real shape."""
    with page() as plt:
        data = json.loads(path.read_text(encoding="utf-8"))
        groups: dict[str, list[Any]] = {}
        for each in data["runs"]:
            if each["losses"]:
                groups.setdefault(
                    each["dtype"] if each["name"] in TITLES else f"{each['name']}-{each['dtype']}", []
                ).append(each)
        drawn = []
        for name, runs in groups.items():
            columns = min(5, len(runs))
            rows = -(-len(runs) // columns)
            size = (3.3 * columns, 2.3 * rows + 0.8) if len(runs) > 1 else (9.0, 5.0)
            figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
            for axes in panels.flat[len(runs) :]:
                axes.axis("off")
            for axes, each in zip(panels.flat, runs, strict=False):
                _panel(axes, each)
            lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
            figure.legend(
                list(lines.values()), list(map(str, lines)), loc="outside lower center", ncols=len(lines), fontsize=9
            )
            title = f"Loss on Python's standard library, {name}, {data['meta']['gpu'] or report.NO_MEASUREMENT}"
            figure.suptitle(title, fontsize=11)
            drawn.append(path.with_name(f"{path.stem}-{name}.png"))
            figure.savefig(drawn[-1], dpi=75)
            plt.close(figure)
        return drawn


def _panel(axes: Any, found: Mapping[str, Any]) -> None:
    """A job's losses, on top of each other, and on the right axis how far they are from eager's."""
    losses = found["losses"]
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=COLOURS[EAGER], linewidth=4.0, label=EAGER)
    right = axes.twinx()
    for way, style in ((COMPILE, (0, (4, 3))), (OURS, (4, (4, 3)))):
        if (differences := found["runs"].get(way, {}).get("difference")) is None:
            continue
        curve = [loss * (1 + d) for loss, d in zip(losses, differences, strict=True)]
        axes.plot(steps, curve, color=COLOURS[way], linewidth=1.4, linestyle=style, label=way)
        off = [abs(d) or float("nan") for d in differences]
        right.plot(steps, off, color=COLOURS[way], linewidth=0.7, alpha=0.7, label=f"{way}: difference (right)")
    right.set_yscale("log")
    right.tick_params(labelsize=7)
    axes.tick_params(labelsize=7)
    axes.set_title(f"{TITLES.get(found['name'], found['name'])}, {found['parameters'] / 1e6:,.1f}M", fontsize=9)


def run(
    names: Sequence[str], console: Console, results: Path | None = None, jobs: int | None = None,
    launch: Launch = in_child,
) -> int:  # fmt: skip
    """Train the models of those names, or all, `jobs` processes at a time. With `results`, write
    `<gpu>/training/convergence/` there.

    Returns 1 if a run of ours is not what it should be, else 0.

    Raises:
        ValueError: a family is not known, or results are requested in the interpreter.
    """
    measures = runtime.MODE is runtime.Mode.GPU
    check_results(results, measures)
    wanted = jobs_of(names, measures)
    workers = jobs or max(1, min(14, len(wanted), _cores() - 2))
    console.print(f"{len(wanted)} models to train, {workers} at a time ...", highlight=False)
    since = time.perf_counter()
    done: dict[Job, dict[str, Any]] = {}
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(launch, job): job for job in wanted}
        for future in as_completed(running):
            job = running[future]
            done[job] = future.result()
            ended = "trained" if done[job]["losses"] else f"error: {done[job].get('message', '')}"
            took = f"{time.perf_counter() - since:.0f} s"
            console.print(f"{job.title} {job.dtype}: {ended}, after {took}", markup=False, highlight=False)
    found = [done[job] for job in wanted]
    show(console, found, measures)
    if shown := means_of(found):
        console.print(f"bf16: off from eager, over torch.compile's, geometric means: {shown}", highlight=False)
    if results is not None:
        meta = {**machine(), "transformers": version("transformers"), "ways": WAYS}
        path = results / gpu_slug(str(meta["gpu"])) / FOLDER / "convergence.json"
        write(path, meta, found)
        for chart in draw(path):
            console.print(str(chart), highlight=False, soft_wrap=True)
    usual = typical(found)
    return int(
        any(verdict(each, usual) != "ok" for each in found)
        or any(not ratio <= most_of_mean(name, len(_ratios(found, name))) for name, ratio in mean_ratios(found).items())
    )
