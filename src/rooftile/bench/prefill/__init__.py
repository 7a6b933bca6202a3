"""`rooftile bench prefill`: one forward of a whole model over a prompt, plain and patched, eager and compiled.

The times are a user's: from the first launch on an idle GPU to the end of the last kernel, batch 1, no cache, logits of
every token as Hugging Face returns them by default. The rows named `layer_ops` time the norms, RoPE and SwiGLU of all
layers in the same way and nothing else, so that their share of the forward can be read off.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from rooftile import runtime
from rooftile.bench import report as reports
from rooftile.bench.info import check_results, machine
from rooftile.bench.prefill.model import layer_ops, load_config, make_model, twin
from rooftile.bench.prefill.report import CAPTION, COMPILE, EAGER, IMPLS, OURS_COMPILE, PEER, plot, show
from rooftile.bench.roof import Roofs, measure_roofs
from rooftile.bench.rows import OURS, Row, gpu_slug, spread, write_json
from rooftile.bench.timer import Call, Clock, clock
from rooftile.bench.workloads import RANDOM
from rooftile.cases.check import NAMES, relative_error
from rooftile.huggingface import patch

SPREAD_OUT = 5  # rounds: the implementations take turns, each some forwards at a time


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure; None lets the mode choose a model or lengths. `weights`: random, or a checkpoint's folder, whose
    model it then is."""

    model: str | None = None
    weights: str = RANDOM
    tokens: Sequence[int] | None = None
    dtype: torch.dtype = torch.bfloat16
    layers: int | None = None
    impls: Sequence[str] | None = None
    warmup: int = 5
    iters: int = 40
    per_length: bool = False
    json: Path | None = None
    plot: Path | None = None
    results: Path | None = None


class Latency:
    """Times whole calls on an idle device, from the prompt to its logits."""

    def __init__(self, device: torch.device, measures: bool) -> None:
        self.device, self.measures = device, measures
        self.module: Any = torch.get_device_module(device.type) if measures else None

    def once(self, call: Call) -> tuple[float, float]:
        """Seconds until the device has finished, and until the host has."""
        if not self.measures:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start,) * 2
        begin, end = self.module.Event(enable_timing=True), self.module.Event(enable_timing=True)
        self.module.synchronize(self.device)
        start = time.perf_counter()
        begin.record()
        call()
        end.record()
        host = time.perf_counter() - start
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, host

    def interleaved(self, calls: Mapping[str, Call], warmup: int, iters: int) -> dict[str, list[tuple[float, float]]]:
        """Samples of each call. Calls take turns in rounds of random order; the first sample of a turn is dropped."""
        order = random.Random(0)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for call in calls.values():
            for _ in range(warmup):
                call()
        rounds = min(SPREAD_OUT, iters)
        for i in range(rounds):
            for name in order.sample(list(calls), len(calls)):
                due = iters * (i + 1) // rounds - iters * i // rounds
                if self.measures:
                    calls[name]()
                taken[name] += [self.once(calls[name]) for _ in range(due)]
        return taken


class Prefill:
    """One run: a model, its patched twin, and the rows so far."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self.device = runtime.default_device()
        self.clock: Clock = clock(self.device)
        measures = self.clock.measures
        check_results(settings.results, measures)
        named = None if settings.weights == RANDOM else settings.weights
        self.settings = dataclasses.replace(
            settings,
            model=settings.model or named or ("qwen2.5-7b" if measures else "tiny"),
            tokens=settings.tokens or ((128, 256, 512, 1024, 2048) if measures else (16, 32)),
            impls=settings.impls or (IMPLS if measures else (EAGER, OURS)),
            warmup=settings.warmup if measures else 0,
            iters=settings.iters if measures else 2,
        )
        self.console = console
        self.latency = Latency(self.device, measures)
        self.meta: dict[str, Any] = machine()
        self.roofs: Roofs | None = measure_roofs(self.clock, self.device) if measures else None
        for name in ("copy_gbs", "read_gbs", "tflops"):
            self.meta[f"roof_{name}"] = getattr(self.roofs, name, None)
        if not measures:
            self.meta["note"] = reports.NO_MEASUREMENT
        assert self.settings.model is not None
        self.title, self.config = load_config(self.settings.model, settings.layers)
        self.clock.release()
        self.plain = make_model(self.config, settings.weights, settings.dtype, self.device)
        self.ours = twin(self.plain)
        self.handle = patch(self.ours)
        self.meta.update(
            suite="prefill",
            caption=CAPTION,
            model=self.title,
            weights=settings.weights,
            parameters=sum(p.numel() for p in self.plain.parameters()),
            replaced=self.handle.replaced,
            left=[str(left) for left in self.handle.left],
            compiled="for each length" if settings.per_length else "once for all lengths",
        )
        self.rows: list[Row] = []

    def forwards(self) -> dict[str, Callable[..., Any]]:
        make: dict[str, Callable[[], Callable[..., Any]]] = {
            EAGER: lambda: self.plain,
            OURS: lambda: self.ours,
            COMPILE: lambda: torch.compile(self.plain, fullgraph=True),
            OURS_COMPILE: lambda: torch.compile(self.ours, fullgraph=True),
        }
        assert self.settings.impls is not None
        return {name: make[name]() for name in dict.fromkeys((EAGER, *self.settings.impls))}

    def run(self) -> None:
        """Measure every length. Compiled code serves all of them, or is compiled again for each."""
        assert self.settings.tokens is not None
        forwards = self.forwards()
        for tokens in sorted(self.settings.tokens):
            if self.settings.per_length:
                torch._dynamo.reset()
                forwards = self.forwards()
            generator = torch.Generator(self.device).manual_seed(tokens)
            vocabulary = self.config.get_text_config().vocab_size
            ids = torch.randint(vocabulary, (1, tokens), device=self.device, generator=generator)
            if not self.settings.per_length:
                torch._dynamo.mark_dynamic(ids, 1)
            with torch.inference_mode():
                self.rows += self.measure(tokens, ids, forwards)
                self.rows += self.measure_ops(tokens, ids)

    def row(self, op: str, tokens: int, impl: str) -> Row:
        return Row(op, "forward", f"{self.title} B1 T{tokens}", NAMES[self.settings.dtype], impl)

    def bound(self) -> float:
        """The bound of the relative error between two forwards: about six roundings a layer, each off by one unit."""
        layers = self.config.get_text_config().num_hidden_layers
        return torch.finfo(self.settings.dtype).eps * math.sqrt(6 * layers)

    def measure(self, tokens: int, ids: Tensor, forwards: Mapping[str, Callable[..., Any]]) -> list[Row]:
        """Check each implementation's logits against the plain model's, then time those that are right."""
        rows = {name: self.row("prefill", tokens, name) for name in forwards}
        expected: Tensor | None = None
        for name, forward in forwards.items():
            self.console.print(f"{rows[name].shape}: checking {name}", markup=False, highlight=False)
            try:
                since = time.perf_counter()
                logits = forward(ids, use_cache=False).logits
                expected = logits if expected is None else expected
                rows[name].max_error = relative_error(logits, expected) if logits is not expected else None
                first = time.perf_counter() - since
                self.meta.setdefault("first_call_s", {})[f"{name} T{tokens}"] = round(first, 2)
            except Exception as error:
                rows[name].status, rows[name].message = "error", f"{type(error).__name__}: {error}"[:200]
                continue
            if not (rows[name].max_error or 0.0) <= self.bound():
                rows[name].status = "FAIL"
                rows[name].message = f"logits differ by {rows[name].max_error:.2e}, over {self.bound():.2e}"
        del expected, logits
        right = [name for name, row in rows.items() if row.status == "ok"]
        calls = {name: functools.partial(forwards[name], ids, use_cache=False) for name in right}
        for name in right:
            rows[name].peak_bytes = self.clock.peak_bytes(calls[name]) if self.clock.measures else None
        self.fill(rows, calls)
        nbytes, flops = self.least_work(tokens)
        for row in rows.values():
            row.nbytes = nbytes
            if row.us and self.roofs is not None:
                row.gbs, row.tflops = nbytes / row.us / 1e3, flops / row.us / 1e6
                row.roof_fraction = 1e6 * self.roofs.floor_seconds(nbytes, flops) / row.us
        return list(rows.values())

    def measure_ops(self, tokens: int, ids: Tensor) -> list[Row]:
        """The rows `layer_ops`, each with its share of the forward of the same name."""
        rows = {name: self.row("layer_ops", tokens, name) for name in (EAGER, OURS)}
        try:
            plain, ours = layer_ops(self.plain, self.handle, ids)
        except ValueError as error:
            for row in rows.values():
                row.status, row.message = "unsupported", str(error)
            return list(rows.values())
        self.fill(rows, {EAGER: plain, OURS: ours})
        whole = {r.impl: r.us for r in self.rows if r.op == "prefill" and r.shape == rows[EAGER].shape}
        shares = self.meta.setdefault("layer_ops_share", {})
        for name, row in rows.items():
            if row.us and (forward := whole.get(name)):
                row.message = f"{row.us / forward:.1%} of the forward"
                shares.setdefault(f"T{tokens}", {})[name] = round(row.us / forward, 4)
        return list(rows.values())

    def fill(self, rows: Mapping[str, Row], calls: Mapping[str, Call]) -> None:
        """Time the calls, and write times and ratios into their rows."""
        for name, samples in self.latency.interleaved(calls, self.settings.warmup, self.settings.iters).items():
            row = rows[name]
            row.us, row.us_p20, row.us_p80 = (1e6 * s for s in spread([s for s, _ in samples]))
            row.samples, row.calls = len(samples), 1
            row.method = "events, idle device" if self.latency.measures else "host clock"
            if self.latency.measures:
                row.host_us = 1e6 * spread([host for _, host in samples])[0]
        for name, row in rows.items():
            if row.us and self.latency.measures:
                eager, peer = rows[EAGER].us, rows[PEER[name]].us if PEER.get(name) in rows else None
                row.speedup_vs_eager = eager / row.us if eager else None
                row.ratio_to_best_peer = peer / row.us if peer else None

    def least_work(self, tokens: int) -> tuple[int, int]:
        """The bytes of the weights, read once, and the FLOPs of the GEMMs and of causal attention."""
        weights = [m.weight for m in self.plain.modules() if isinstance(m, nn.Linear)]
        config = self.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = 2 * tokens**2 * config.num_attention_heads * head_dim * config.num_hidden_layers
        return sum(w.nbytes for w in weights), sum(2 * tokens * w.numel() for w in weights) + attention


def run(settings: Settings, console: Console) -> int:
    """Measure, show and write. 1 where a patched model's logits are wrong or it raised, else 0.

    Raises:
        ValueError: the model is not known, or results are asked of the interpreter.
        RuntimeError: there is no GPU, and the process is not in the interpreter.
    """
    prefill = Prefill(settings, console)
    console.print(f"{prefill.title}: {prefill.handle}", markup=False, highlight=False, soft_wrap=True)
    prefill.run()
    measured = prefill.clock.measures
    show(console, prefill.rows, measured)
    gpu = str(prefill.meta["gpu"])
    if settings.json is not None:
        write_json(settings.json, prefill.meta, prefill.rows)
    if settings.plot is not None:
        plot(settings.plot / f"prefill-{prefill.title}.png", prefill.rows, gpu, measured)
    if settings.results is not None:
        folder = settings.results / gpu_slug(gpu) / "prefill"
        name = f"{prefill.title}-{NAMES[settings.dtype]}"
        write_json(folder / f"{name}.json", prefill.meta, prefill.rows)
        plot(folder / f"{name}.png", prefill.rows, gpu, measured)
    return int(any(r.impl in PEER and r.status in ("FAIL", "error") for r in prefill.rows))
