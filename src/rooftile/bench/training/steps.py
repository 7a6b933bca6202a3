"""Whole training steps of Hugging Face models: plain, compiled, with Liger's kernels and with Rooftile's.

A step is forward, backward, and AdamW over all parameters, in bfloat16 without gradient checkpointing. Each
implementation has a process of its own (`worker.py`). Weights and tokens are random, and the same for all: the losses
of two passes over the batches must agree with the plain model's. Those of the second show what the first has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rooftile import runtime
from rooftile.bench import report
from rooftile.bench.info import check_results
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import OURS, Row, compare, gpu_slug, is_ours, spread, write_json
from rooftile.bench.training.children import result_of
from rooftile.bench.training.worker import (
    BATCHES,
    COMPILE,
    EAGER,
    LIGER,
    OURS_ALL,
    OURS_ALL_LORA,
    OURS_ATTENTION,
    OURS_COMPILE,
    OURS_LORA,
    Job,
)
from rooftile.bench.workloads import TRAINED

STEP, BATCH = "train_step", "train_batch"
IMPLS = (EAGER, COMPILE, LIGER, OURS, OURS_ATTENTION, OURS_ALL, OURS_COMPILE, OURS_LORA, OURS_ALL_LORA)
DEFAULT = (EAGER, COMPILE, LIGER, OURS, OURS_ALL)
DEFAULT_LORA = (*DEFAULT, OURS_LORA, OURS_ALL_LORA)  # of adapters
SHOWN = 80  # characters of a message in a table
ADDED_FIRST = (COMPILE, OURS_COMPILE, OURS_LORA, OURS_ALL_LORA)  # see `adapted` of `fill`
COMPARED = 2 * BATCHES  # steps whose losses are compared: two passes over the batches
CEILING = 1e-2  # of the relative difference of losses: bfloat16 rounds at 4e-3, in each layer
# Of a second pass's difference, as a share of what eager's losses have fallen by since the first. Random batches have
# nothing in common, so that the first pass's losses do not depend on the updates: with gradients of zero they were
# 1.8e-5 off. The second's do: gradients of zero are off by the whole fall, and negated ones by twice that. Correct runs
# of Llama-3.2-1B on an H100 were off by 0.4% of it, and of adapters on a tiny model by 2%.
MISSED = 0.1
LIMIT_S = 400  # of one process, or for each cap: torch.compile takes a minute or two
GIB = 1 << 30
CAPS = (16, 24, None)  # GiB of memory in which the largest batch is looked for, increasing; None: all
FIT_TOKENS = 1024  # of a sequence of the largest batch: fine enough steps where little memory is left

Launch = Callable[[Job], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model of `workloads.TRAINED`, and what a step of it trains."""

    name: str
    model: str
    batch: int
    tokens: int = 4096
    lora: bool = False

    def place(self, batch: int, tokens: int) -> str:
        return f"{self.name} B{batch} T{tokens}"


WORKLOADS = {
    w.name: w
    for w in (
        Workload("llama-3.2-1b", "llama-3.2-1b", 4),
        Workload("qwen3-0.6b", "qwen3-0.6b", 4),
        Workload("gemma-3-1b", "gemma-3-1b", 2),
        Workload("llama-3-8b-lora", "llama-3-8b", 1, lora=True),
        Workload("tiny", "tiny", 2, 16),
        Workload("tiny-lora", "tiny", 2, 16, lora=True),
    )
}


class Workers:
    """Does each job in a process of its own, and starts the next process ahead: it imports while the last one works."""

    def __init__(self) -> None:
        self._next = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rooftile.bench.training.worker"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        with self._next:
            self._next.kill()

    def __call__(self, job: Job) -> dict[str, Any]:
        """The job's result; of a process that gives none, an error."""
        worker, self._next = self._next, self._start()
        found = result_of(worker, json.dumps(dataclasses.asdict(job)), LIMIT_S * max(1, len(job.caps)))
        return {"status": "error", "message": found} if isinstance(found, str) else found


def fall(losses: Sequence[float]) -> float:
    """What the mean loss falls by from the first pass over the batches to as many steps of the second as there are."""
    second = losses[BATCHES:COMPARED]
    return sum(a - b for a, b in zip(losses, second, strict=False)) / len(second) if second else 0.0


def _largest(values: Sequence[float]) -> float:
    """The largest; NaN if one is NaN."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def fill(
    row: Row, found: dict[str, Any], expected: Sequence[float] | None, roof_tflops: float | None, adapted: bool = False
) -> None:
    """The figures of a row of steps.

    Args:
        expected: the losses to compare with.
        adapted: what adapters add is added before a layer's result is rounded, as `lora_linear` does and torch.compile,
            which makes an addmm of it. The comparison of losses is then of the first pass, and in the second they may
            fall further: a 16-bit layer's rounding takes most of what young adapters add.
    """
    row.status, row.message = found["status"], found.get("message", "")
    if row.status != "ok":
        return
    losses = found["losses"][:COMPARED]
    wanted = losses if expected is None else list(expected[:COMPARED])
    if not fall(wanted) > 0:
        row.status, row.message = "FAIL", f"losses {wanted} do not fall from one pass over the batches to the next"
        return
    if expected is not None:
        far = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
        relative = [d / abs(b) for d, b in zip(far, wanted, strict=True)]
        row.max_error = _largest(relative[:BATCHES] if adapted else relative)
        missed = (fall(wanted) - fall(losses) if adapted else _largest(far[BATCHES:])) / fall(wanted)
        if not (row.max_error <= CEILING and missed <= MISSED):
            off = f"by {row.max_error:.1e}, and in the second pass by {missed:.0%} of their fall"
            row.status, row.message = "FAIL", f"losses differ {off}: {_line(losses)}, expected {_line(wanted)}"
            return
    row.us, row.us_p20, row.us_p80 = spread(found["us"])
    row.samples, row.calls, row.method = len(found["us"]), 1, "events" if "peak_bytes" in found else "host clock"
    row.peak_bytes = found.get("peak_bytes")
    row.tokens_per_s = 1e6 * row.dims["batch"] * row.dims["tokens"] / row.us
    row.tflops = found["flops"] / row.us / 1e6
    if roof_tflops:
        row.roof_tflops, row.roof_fraction = roof_tflops, row.tflops / roof_tflops


class Steps:
    """One run over one model: its rows, and its file in `folder`, which is written after each row."""

    def __init__(
        self, workload: Workload, meta: dict[str, Any], console: Console, folder: Path | None, launch: Launch
    ) -> None:
        self.workload, self.console, self.folder, self.launch = workload, console, folder, launch
        self.meta = {**meta, "suite": "training", "model": workload.name, "config": dict(TRAINED[workload.model])}
        self.rows: list[Row] = []

    def job(self, impl: str, **more: Any) -> Job:
        w = self.workload
        return Job(impl, dict(TRAINED[w.model]), w.lora, **{"batch": w.batch, "tokens": w.tokens, **more})

    def measure(self, impls: Sequence[str], batch: int, tokens: int, dtype: str, timeline: bool) -> None:
        """The rows of the implementations at one batch."""
        dims = {"batch": batch, "tokens": tokens}
        place = (STEP, "step", self.workload.place(batch, tokens), "bf16" if dtype == "bfloat16" else "fp32")
        group: list[Row] = []
        expected: list[float] | None = None
        for impl in impls:
            row = Row(*place, impl, roof="gemm", dims=dims)
            short = {} if runtime.MODE is runtime.Mode.GPU else {"warmup": BATCHES, "steps": 1}
            asked = timeline and impl != COMPILE
            found = self.launch(self.job(impl, batch=batch, tokens=tokens, dtype=dtype, timeline=asked, **short))
            adapted = self.workload.lora and impl in ADDED_FIRST
            fill(row, found, expected, self.meta["roof_tflops"], adapted)
            if expected is None and row.status == "ok":
                expected = found["losses"]
            for key in ("losses", "first_step_s", "left", "reserved_bytes", "parameters"):
                if key in found:
                    self.meta.setdefault(key, {})[impl] = _line(found[key])
            if "timeline" in found:
                self.meta.setdefault("timeline", {})[impl] = {k: _line(v) for k, v in found["timeline"].items()}
            group.append(row)
            if self.meta["gpu"]:
                compare(group)
            self._add(row, _said(row))

    def largest_batches(self, impls: Sequence[str], caps: Sequence[int | None], tokens: int) -> None:
        """A row for each implementation and memory, with the largest batch in `dims`."""
        for impl in impls:
            sizes = [math.inf if cap is None else cap * GIB for cap in caps]
            found = self.launch(self.job(impl, tokens=tokens, caps=sizes))
            for cap, batch in zip(caps, found.get("batches", [0] * len(caps)), strict=True):
                shape = f"{self.workload.name} T{tokens} " + ("all memory" if cap is None else f"{cap} GiB")
                row = Row(BATCH, "step", shape, "bf16", impl, status=found["status"], message=found.get("message", ""))
                row.dims = {"tokens": tokens, "gib": cap or 0, "batch": batch}
                self._add(row, f"{shape} {impl}: {batch} sequences {row.message}")

    def _add(self, row: Row, said: str) -> None:
        self.rows.append(row)
        self.console.print(said, markup=False, highlight=False, soft_wrap=True)
        if self.folder is not None:
            write_json(self.folder / f"{row.op}-{self.workload.name}.json", self.meta, self.rows)


def _line(value: Any) -> Any:
    """Long lists as text: a file of results has one value on each line."""
    if isinstance(value, list) and value and isinstance(value[0], float):
        return " ".join(f"{v:.5g}" for v in value)
    return value


def _said(row: Row) -> str:
    if row.us is None:
        return f"{row.shape} {row.impl}: {row.status} {row.message}"
    peak = "" if row.peak_bytes is None else f", {row.peak_bytes / GIB:.1f} GiB"
    difference = "" if row.max_error is None else f", losses within {row.max_error:.1e}"
    return f"{row.shape} {row.impl}: {row.us / 1e3:.1f} ms, {row.tokens_per_s:.0f} tokens/s{peak}{difference}"


COLUMNS = (
    "model", "implementation", "ms a step>", "tokens/s>", "over eager>", "over Liger>", "GiB>", "of the GEMM roof>",
    "losses within>", "",
)  # fmt: skip


def cells(row: Row, group: Sequence[Row]) -> list[str]:
    """A row under `COLUMNS`."""
    liger = next((r.us for r in group if r.impl == LIGER and r.us), None)
    if row.us is None:
        return [row.shape, row.impl, row.status, *["–"] * 6, textwrap.shorten(row.message, SHOWN, placeholder=" …")]
    speeds = [ratio(row.speedup_vs_eager), ratio(liger / row.us if liger else None)]
    memory = "–" if row.peak_bytes is None else number(row.peak_bytes / GIB)
    error = "–" if row.max_error is None else f"{row.max_error:.1e}"
    times = [number(row.us / 1e3, 4), number(row.tokens_per_s, 4)]
    return [row.shape, row.impl, *times, *speeds, memory, ratio(row.roof_fraction), error, row.message]


def show(console: Console, rows: Sequence[Row], measured: bool) -> None:
    title = "training steps" + ("" if measured else f" ({report.NO_MEASUREMENT})")
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in COLUMNS:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left")
    for row in rows:
        if row.op == STEP:
            table.add_row(*cells(row, [r for r in rows if r.place == row.place]))
    out = console if console.is_terminal else Console(file=console.file, width=report.WIDTH)
    out.print(report.without_dashes(table))


def run(
    models: Sequence[str], impls: Sequence[str], console: Console, results: Path | None = None, *,
    batch: int | None = None, tokens: int | None = None, dtype: str = "bfloat16", fit: bool = False,
    timeline: bool = False, launch: Launch | None = None,
) -> int:  # fmt: skip
    """Measure the steps of those models, or of the first; in the interpreter, of a tiny one.

    `fit`: look for the largest batches instead. `timeline`: record the memory of a step too.
    With `results`, write `<gpu>/training/train_step-<model>.json` there, and for `fit` `train_batch-<model>.json`.

    Returns 1 if a row of ours is wrong or raised, else 0.

    Raises:
        ValueError: a model or an implementation is not known, or results are requested in the interpreter.
        RuntimeError: the roofs could not be measured.
    """
    measures = runtime.MODE is runtime.Mode.GPU
    check_results(results, measures)
    for what, given, known in (("model", models, WORKLOADS), ("implementation", impls, IMPLS)):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")
    with contextlib.ExitStack() as stack:
        launch = launch or stack.enter_context(Workers())
        meta = launch(Job("machine"))
        if "status" in meta:
            raise RuntimeError(f"the machine was not measured: {meta['message']}")
        every: list[Row] = []
        for name in models or (next(iter(WORKLOADS)) if measures else "tiny",):
            folder = None if results is None else results / gpu_slug(str(meta["gpu"])) / "training"
            steps = Steps(WORKLOADS[name], meta, console, folder, launch)
            default = DEFAULT_LORA if steps.workload.lora else DEFAULT
            chosen = impls or (default if measures else (EAGER, OURS))
            if fit:
                # Each batch would be compiled again.
                fitted = [impl for impl in chosen if impl not in (COMPILE, OURS_COMPILE)]
                steps.largest_batches(fitted, CAPS, tokens or FIT_TOKENS)
            else:
                w = steps.workload
                steps.measure(chosen, batch or w.batch, tokens or w.tokens, dtype, timeline)
            every += steps.rows
    if not fit:
        show(console, every, measures)
    return int(any(is_ours(row.impl) and row.status != "ok" for row in every))
