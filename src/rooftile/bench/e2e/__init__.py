"""`rooftile bench e2e`: prompts and the tokens after them, by the engine, by CUDA's kernels and by Hugging Face.

All implementations have the same weights and prompts. Each is checked (`check`) before it is timed. Then they take
turns in rounds, in a new random order each: a generation each, with an event on the device after every step. The host
queues work as early as it can and does not read the tokens; an engine reads them while the next step runs. Rows are
written as they are measured, so an interrupted run keeps them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rooftile import runtime, tuning
from rooftile.bench import report as reports
from rooftile.bench.e2e import report as shown
from rooftile.bench.e2e.batch import Batch
from rooftile.bench.e2e.hf import Models
from rooftile.bench.e2e.model import check_context, load
from rooftile.bench.e2e.paths import (
    CUDA_EAGER,
    CUDA_FP8,
    HF_EAGER,
    IMPLS,
    NOTES,
    OWN,
    PATCHED,
    PATCHED_EAGER,
    UNASKED,
)
from rooftile.bench.e2e.report import E2ERow
from rooftile.bench.e2e.results import read_rows
from rooftile.bench.info import check_results, machine, version
from rooftile.bench.prefill import Latency
from rooftile.bench.roof import Roofs, measure_roofs
from rooftile.bench.rows import OURS, gpu_slug
from rooftile.bench.timer import Clock, clock
from rooftile.bench.workloads import RANDOM


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure; None lets the mode choose. `seconds` is the device time for the steps of each implementation at
    each batch size; its prompts get a quarter as much."""

    models: Sequence[str] = ()
    batches: Sequence[int] = ()
    prompt: int | None = None
    new: int | None = None
    dtype: torch.dtype = torch.bfloat16
    quantize: str | None = None
    impls: Sequence[str] = ()
    layers: int | None = None
    tuned: bool = True
    weights: str = RANDOM
    seconds: float = 4.0
    layer: bool = False
    json: Path | None = None
    plot: Path | None = None
    results: Path | None = None

    def filled(self, measures: bool) -> Settings:
        """With the mode's choices instead of None."""
        named = self.models or (() if self.weights == RANDOM else (self.weights,))
        every = tuple(n for n in IMPLS if n not in UNASKED and (n != CUDA_FP8 or self.quantize == "fp8"))
        prompt, new = (44 if self.layer else 512, 256) if measures else (6, 3)
        return dataclasses.replace(
            self,
            models=named or (("llama-3-8b",) if measures else ("tiny",)),
            batches=self.batches or ((1,) if self.layer else (1, 2, 8, 32) if measures else (2,)),
            prompt=self.prompt or prompt,
            new=self.new or new,
            impls=self.impls or (every if measures else (OURS, CUDA_EAGER, HF_EAGER)),
        )


class E2E:
    """One run: its clock, its roofs, and the rows so far."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self.device = runtime.default_device()
        self.clock: Clock = clock(self.device)
        measures = self.clock.measures
        check_results(settings.results, measures)
        self.settings = settings.filled(measures)
        assert self.settings.prompt is not None
        assert self.settings.new is not None
        self.prompt, self.new = self.settings.prompt, self.settings.new
        if self.new < 2:
            raise ValueError(f"new is {self.new}, expected 2 tokens or more: the prompt itself brings the first")
        for name in self.settings.models:  # a wrong one is no reason to measure the others first
            check_context(name, self.prompt, self.new)
        self.console = console
        self.latency = Latency(self.device, measures)
        since = time.perf_counter()
        self.roofs: Roofs | None = measure_roofs(self.clock, self.device) if measures else None
        self.clock.release()
        if self.roofs is not None:
            self.say(f"a read of {self.roofs.read_gbs:.0f} GB/s, {time.perf_counter() - since:.1f} s for the roofs")
        self.meta: dict[str, Any] = machine()
        for name in ("copy_gbs", "read_gbs", "tflops"):
            self.meta[f"roof_{name}"] = getattr(self.roofs, name, None)
        if not measures:
            self.meta["note"] = reports.NO_MEASUREMENT
        s = self.settings
        self.meta.update(
            suite="e2e", caption=shown.CAPTION, implementations={n: NOTES[n] for n in s.impls}, quantize=s.quantize,
            tuning="on" if s.tuned else "off", weights=s.weights, seconds=s.seconds,
            transformers=version("transformers"),
        )  # fmt: skip
        self.rows: list[E2ERow] = []

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def run(self) -> None:
        s = self.settings
        for name in s.models:
            since = time.perf_counter()
            model = load(
                name, dtype=s.dtype, device=self.device, quantize=s.quantize, layers=s.layers, weights=s.weights
            )  # fmt: skip
            gib = model.own.nbytes / 2**30
            self.say(f"{model.title}: {gib:.2f} GiB read by a step, {time.perf_counter() - since:.1f} s to make them")
            source = Models(model)
            for batch in s.batches:
                with torch.no_grad():
                    Batch(self, model, batch, source).measure()
                torch._dynamo.reset()  # else the next batch size is compiled for all sizes
                gc.collect()
                self.clock.release()
            del model, source  # before the next takes its memory


def run(settings: Settings, console: Console) -> int:
    """Measure, show and write. Returns 1 if one of Rooftile's implementations is wrong or has raised, else 0.

    Raises:
        ValueError: a model is not known or made for fewer tokens, or results are asked of the interpreter.
        RuntimeError: there is no GPU, and the process is not in the interpreter.
    """
    with contextlib.nullcontext() if settings.tuned else tuning.off():
        if settings.layer:
            from rooftile.bench.e2e.layer import run_layer

            return run_layer(settings, console)
        e2e = E2E(settings, console)
        e2e.run()
    measured, gpu = e2e.clock.measures, str(e2e.meta["gpu"])
    shown.show(console, e2e.rows, measured)
    for folder in (settings.plot, settings.results and settings.results / gpu_slug(gpu) / "e2e"):
        if folder is not None:
            rows = e2e.rows if folder == settings.plot else [*read_rows(folder), *e2e.rows]
            shown.plot(folder, rows, gpu, measured)
    ours = (*OWN, PATCHED, PATCHED_EAGER)
    return int(any(r.impl in ours and r.status in ("FAIL", "error") for r in e2e.rows))
