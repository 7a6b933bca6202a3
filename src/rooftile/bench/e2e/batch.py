"""The rows of one model at one batch size: implementations are built, checked and probed, then timed in turns.

Results are written at once: each implementation's probe, as soon as its check has passed, and after each turn its times
so far, which are marked as such until its last turn. Ratios only use measurements that were completed.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rooftile.bench.e2e.check import STEPS, Expected, lost_in_eager, verdict
from rooftile.bench.e2e.hf import Models
from rooftile.bench.e2e.implementations import build
from rooftile.bench.e2e.model import Model
from rooftile.bench.e2e.paths import CUDA_FP8, HF_EAGER, OF_OWN_WEIGHTS, OWN, PEERS, Absent, Path
from rooftile.bench.e2e.report import E2ERow, label
from rooftile.bench.e2e.results import NOT_REACHED, SO_FAR, added, earlier, over
from rooftile.bench.e2e.turns import LEAST_STEPS, SAMPLES, Samples, Stopwatch, TurnPlan, plan_turns
from rooftile.bench.rows import gpu_slug, percentile, spread, write_json
from rooftile.bench.run import brief
from rooftile.bench.workloads import step_bytes
from rooftile.cases.check import NAMES

if TYPE_CHECKING:
    from rooftile.bench.e2e import E2E


class Batch:
    """The rows of one model at one batch size."""

    def __init__(self, run: E2E, model: Model, batch: int, source: Models) -> None:
        self.run, self.model, self.batch, self.source = run, model, batch, source
        self.title = f"{model.title} {NAMES[model.dtype]} B{batch} P{run.prompt} N{run.new}"
        device = model.device
        numbers = torch.Generator(device).manual_seed(batch)
        self.ids = torch.randint(model.config.vocab, (batch, run.prompt), device=device, generator=numbers)
        names = list(dict.fromkeys(run.settings.impls))
        self.decode = {name: self.row("decode", name) for name in names}
        self.prefill = {name: self.row("prefill", name) for name in names}
        self.paths: dict[str, Path] = {}
        self.looks: dict[str, Samples] = {}
        self.stopwatch = Stopwatch(run.clock, run.latency)
        self.rows = [*self.decode.values(), *self.prefill.values()]
        run.rows += self.rows
        title = f"{model.title}-{NAMES[model.dtype]}"
        title += "".join(f"-{word}" for word in (model.quantize, None if run.settings.tuned else "untuned") if word)
        name = f"{title}-b{batch}-p{run.prompt}-n{run.new}.json"
        results = run.settings.results
        self.file = None if results is None else results / gpu_slug(str(run.meta["gpu"])) / "e2e" / name
        self.before = None if self.file is None else earlier(self.file, self.meta)
        if self.file is not None and self.file.exists() and self.before is None:
            run.say(f"{self.file} is of another machine, version, commit or model: it is written anew")

    @property
    def meta(self) -> dict[str, Any]:
        return {**self.run.meta, "model": self.model.title, "config": self.model.hf}

    def row(self, op: str, name: str) -> E2ERow:
        s = self.run.settings
        options: dict[str, Any] = {}
        if name in OF_OWN_WEIGHTS and s.quantize:
            options["quantize"] = s.quantize
        if name in OWN and not s.tuned:
            options["tuning"] = "off"
        dims = {"batch": self.batch, "prompt": self.run.prompt, "new": self.run.new, "layers": self.model.config.layers}
        run = str(self.run.meta["date"])
        row = E2ERow(op, "forward", self.title, NAMES[s.dtype], name, options=options, dims=dims, run=run)
        row.roof = "read" if op == "decode" else "gemm"
        row.status, row.message = "error", NOT_REACHED  # until it is: what is written on the way says so
        return row

    def measure(self) -> None:
        self.steps = min(STEPS, self.run.new)
        self.expected = Expected(self.model)
        since = time.perf_counter()
        self.lost = lost_in_eager(self.model, self.ids, self.steps, self.run.clock, self.expected)
        took = time.perf_counter() - since
        lost = "could not be run, for a bound" if self.lost is None else f"loses {self.lost:.1e} of the logits"
        self.run.say(f"{self.title}: eager PyTorch {lost}, {took:.1f} s to find out")
        for name in self.decode:
            self.prepare(name)
            self.write()
            if name in self.paths and self.run.clock.measures:
                self.look(name)
        del self.expected
        since = time.perf_counter()
        self.take_turns()
        self.run.say(f"{self.title}: {time.perf_counter() - since:.1f} s for all rounds")
        self.write(done=True)
        for path in self.paths.values():
            path.reset()

    def prepare(self, name: str) -> None:
        """Build it, compile it, check it."""
        rows = (self.decode[name], self.prefill[name])
        since = time.perf_counter()
        status, message, error, note = "ok", "", None, ""
        try:
            path = build(name, self.model, self.ids, self.run.new, self.run.clock, self.source)
            path.prepare()
            self.run.clock.synchronize()
            rows[0].first_call_s = time.perf_counter() - since
            error, message = verdict(
                self.model, path, self.ids, self.steps, name in OF_OWN_WEIGHTS, self.lost, self.expected,
                exact_row=name != CUDA_FP8,
            )  # fmt: skip
            status, note = ("FAIL" if message else "ok"), path.note
            if status == "ok":
                self.paths[name] = path
        except Absent as absent:
            status, message = "absent", str(absent)
        except Exception as raised:
            status, message = "error", brief(raised)
            del raised
            gc.collect()
        for row in rows:
            row.status, row.message, row.max_error, row.note = status, message, error, note
        if self.source.patched:
            self.run.meta["patched"] = self.source.patched.splitlines()
        took = time.perf_counter() - since
        ready = f"ready in {rows[0].first_call_s:.1f} s, " if rows[0].first_call_s is not None else ""
        figure = "" if error is None else f"logits differ by {error:.1e}, "
        self.run.say(f"{self.title} {name}: {status}, {figure}{ready}{took:.1f} s in all {message} {note}".rstrip())

    # Timing.

    def look(self, name: str) -> None:
        """Probe the implementation, to know how much of it fits into the seconds."""
        steps = min(LEAST_STEPS, self.run.new - 1)
        try:
            self.looks[name] = self.stopwatch.turn(self.paths[name], steps)
        except Exception as error:
            self.out(name, brief(error))
        else:
            self.fill(name, self.looks[name], steps, f"a first look, {steps} steps")
            self.show(name)

    def plan(self, name: str) -> TurnPlan:
        whole = self.run.new - 1
        if name not in self.looks:
            return TurnPlan(1, whole, 0)
        least = SAMPLES if self.run.clock.measures else 1
        return plan_turns(self.looks[name], whole, self.run.settings.seconds, least)

    def take_turns(self) -> None:
        """Generations and prompts in rounds, in a new random order each; an implementation that raises is dropped."""
        order = random.Random(0)
        plans = {name: self.plan(name) for name in self.paths}
        taken = {name: Samples() for name in plans}
        for i in range(max((p.rounds for p in plans.values()), default=0)):
            for name in order.sample(list(plans), len(plans)):
                p = plans[name]
                if name not in self.paths or i >= p.rounds:
                    continue
                try:
                    taken[name].add(self.stopwatch.turn(self.paths[name], p.steps, p.prompts))
                except Exception as error:
                    self.out(name, brief(error))
                    continue
                last = i + 1 == p.rounds
                self.fill(name, taken[name], p.steps, "" if last else f"{i + 1} of {p.rounds} rounds")
                if last:
                    self.show(name)

    def fill(self, name: str, samples: Samples, steps: int, so_far: str = "") -> None:
        """Write its rows, the ratios to them, and the files."""
        self.fill_decode(name, samples.steps, steps)
        self.fill_prefill(name, samples.prompts, samples.host)
        for rows in (self.decode, self.prefill):
            if so_far:
                rows[name].message = SO_FAR + so_far
            self.compare(rows)
        self.write()

    def show(self, name: str) -> None:
        if not self.run.clock.measures:
            return
        for row in (self.decode[name], self.prefill[name]):
            message = f" ({row.message})" if row.message else ""
            self.run.say(f"{self.title} {label(row)} {row.op}: {(row.us or 0.0) / 1e3:.3f} ms{message}")

    def out(self, name: str, message: str) -> None:
        """Drop an implementation that has raised: its rows have no times."""
        for rows in (self.decode, self.prefill):
            row, new = rows[name], self.row(rows[name].op, name)
            new.status, new.message = "error", message
            new.max_error, new.note, new.first_call_s = row.max_error, row.note, row.first_call_s
            vars(row).update(vars(new))
            self.compare(rows)
        del self.paths[name]
        self.run.say(f"{self.title} {name}: error, {message}")
        self.write()

    def fill_decode(self, name: str, seconds: Sequence[float], steps: int) -> None:
        row, model, run = self.decode[name], self.model, self.run
        row.us, row.us_p20, row.us_p80 = (1e6 * s for s in spread(seconds))
        row.us_p99 = 1e6 * percentile(seconds, 0.99)
        row.samples, row.calls = len(seconds), 1
        row.tokens_per_s = self.batch * len(seconds) / sum(seconds)
        whole = run.new - 1
        row.message = f"cut to {steps} of {whole} steps by --seconds" if steps < whole else ""
        weights = model.own if name in OF_OWN_WEIGHTS else model.dense
        midway = [run.prompt + (steps + 1) / 2] * self.batch
        row.nbytes = int(step_bytes(model.config, weights, midway, model.dtype))
        row.method = "events between steps" if run.clock.measures else "host clock"
        if run.roofs is not None:
            row.roof_gbs = run.roofs.read_gbs
            row.gbs = row.nbytes / row.us / 1e3
            row.roof_fraction = row.gbs / run.roofs.read_gbs

    def fill_prefill(self, name: str, seconds: Sequence[float], host: Sequence[float]) -> None:
        row, model, run = self.prefill[name], self.model, self.run
        row.us, row.us_p20, row.us_p80 = (1e6 * s for s in spread(seconds))
        row.us_p99 = 1e6 * percentile(seconds, 0.99)
        row.samples, row.calls, row.message = len(seconds), 1, ""
        row.tokens_per_s = self.batch * run.prompt / (row.us / 1e6)
        row.nbytes = (model.own if name in OF_OWN_WEIGHTS else model.dense).nbytes
        row.method = "events, idle device" if run.clock.measures else "host clock"
        if run.roofs is not None:
            row.host_us = 1e6 * spread(host)[0]
            flops = model.prefill_flops(self.batch, run.prompt)
            row.tflops, row.gbs = flops / row.us / 1e6, row.nbytes / row.us / 1e3
            row.roof_gbs, row.roof_tflops = run.roofs.read_gbs, run.roofs.gemms.get(row.dtype, run.roofs.tflops)
            row.roof_fraction = 1e6 * run.roofs.gemm_floor_seconds(row.nbytes, flops, row.dtype) / row.us

    def compare(self, rows: Mapping[str, E2ERow]) -> None:
        if not self.run.clock.measures:
            return
        for name, row in rows.items():
            ratios = (over(row, rows.get(peer)) for peer in PEERS.get(name, ()))
            row.ratio_to_best_peer = min((r for r in ratios if r is not None), default=None)
            row.speedup_vs_eager = over(row, rows.get(HF_EAGER))

    def write(self, done: bool = False) -> None:
        """Write what is known so far: an interrupted run leaves what it has measured."""
        s = self.run.settings
        if s.json is not None:
            write_json(s.json, self.run.meta, self.run.rows)
        if self.file is not None:
            whole = added(self.before, self.meta, self.rows, done)
            write_json(self.file, whole.meta, whole.rows)
