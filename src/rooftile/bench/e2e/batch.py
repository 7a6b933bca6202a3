"""The rows of one model at one batch size: every implementation built and checked, then timed in turns."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rooftile.bench.e2e.check import STEPS, lost_in_eager, verdict
from rooftile.bench.e2e.hf import Models
from rooftile.bench.e2e.model import Model
from rooftile.bench.e2e.paths import HF_EAGER, OWN, PEERS, Absent, Path, build
from rooftile.bench.e2e.report import E2ERow
from rooftile.bench.e2e.results import NOT_REACHED, added, earlier
from rooftile.bench.rows import gpu_slug, percentile, spread, write_json
from rooftile.bench.run import brief
from rooftile.bench.workloads import step_bytes
from rooftile.cases.check import NAMES
from rooftile.graphs import uncollected

if TYPE_CHECKING:
    from rooftile.bench.e2e import E2E

ROUNDS = 5
LEAST_STEPS = 16  # of a generation that --seconds would cut shorter
MOST_PREFILLS = 20


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
        if name in OWN and s.quantize:
            options["quantize"] = s.quantize
        if name in OWN and not s.tuned:
            options["tuning"] = "off"
        dims = {"batch": self.batch, "prompt": self.run.prompt, "new": self.run.new, "layers": self.model.config.layers}
        run = str(self.run.meta["date"])
        row = E2ERow(op, "forward", self.title, NAMES[s.dtype], name, options=options, dims=dims, run=run)
        row.roof = "read" if op == "decode" else "product"
        row.status, row.message = "error", NOT_REACHED  # until it is: what is written on the way says so
        return row

    def measure(self) -> None:
        self.steps = min(STEPS, self.run.new)
        self.lost = lost_in_eager(self.model, self.ids, self.steps, self.run.clock)
        for name in self.decode:
            self.prepare(name)
            self.write()
        self.time_steps()
        self.write()
        self.time_prefills()
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
            own = name in OWN
            error, message = verdict(self.model, path, self.ids, self.steps, own, self.lost)
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

    # Decoding.

    def generation(self, path: Path, steps: int) -> list[float]:
        """Seconds of each step, from the end of the one before to its own."""
        path.reset()
        if not self.run.clock.measures:
            path.prefill()
            times = [time.perf_counter()]
            for _ in range(steps):
                path.step()
                times.append(time.perf_counter())
            return [b - a for a, b in itertools.pairwise(times)]
        events = [self.run.latency.module.Event(enable_timing=True) for _ in range(steps + 1)]
        with uncollected():
            path.prefill()  # the first steps are queued while it runs
            events[0].record()
            for event in events[1:]:
                path.step()
                event.record()
            self.run.clock.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]

    def time_steps(self) -> None:
        """Generations in turns, as many as fit into the seconds."""
        whole = self.run.new - 1
        plan: dict[str, tuple[int, int]] = {}  # rounds, and the steps of each

        def size(name: str) -> list[float]:
            seconds = spread(self.generation(self.paths[name], min(LEAST_STEPS, whole)))[0]
            steps = max(min(LEAST_STEPS, whole), min(whole, int(self.run.settings.seconds / seconds)))
            plan[name] = max(1, min(ROUNDS, int(self.run.settings.seconds / seconds / steps))), steps
            return []

        if self.run.clock.measures:
            self.in_turns(self.decode, dict.fromkeys(self.paths, 1), size)
        else:
            plan = dict.fromkeys(self.paths, (1, whole))
        samples = self.in_turns(
            self.decode,
            {name: rounds for name, (rounds, _) in plan.items()},
            lambda name: self.generation(self.paths[name], plan[name][1]),
        )
        for name, seconds in samples.items():
            self.fill_decode(name, seconds, plan[name][1])
        self.compare(self.decode)

    def in_turns(
        self, rows: Mapping[str, E2ERow], rounds: Mapping[str, int], once: Callable[[str], list[float]]
    ) -> dict[str, list[float]]:
        """Samples of each, in rounds; who raises is out."""
        order = random.Random(0)
        taken: dict[str, list[float]] = {name: [] for name in rounds}
        for i in range(max(rounds.values(), default=0)):
            for name in order.sample(list(rounds), len(rounds)):
                if name not in taken or i >= rounds[name]:
                    continue
                try:
                    taken[name] += once(name)
                except Exception as error:
                    rows[name].status, rows[name].message = "error", brief(error)
                    del taken[name], self.paths[name]
        return taken

    def fill_decode(self, name: str, seconds: Sequence[float], steps: int) -> None:
        row, model, run = self.decode[name], self.model, self.run
        row.us, row.us_p20, row.us_p80 = (1e6 * s for s in spread(seconds))
        row.us_p99 = 1e6 * percentile(seconds, 0.99)
        row.samples, row.calls = len(seconds), 1
        row.tokens_per_s = self.batch * len(seconds) / sum(seconds)
        if steps < run.new - 1:
            row.message = f"cut to {steps} of {run.new - 1} steps by --seconds"
        weights = model.own if name in OWN else model.dense
        midway = [run.prompt + (steps + 1) / 2] * self.batch
        row.nbytes = int(step_bytes(model.config, weights, midway, model.dtype))
        row.method = "events between steps" if run.clock.measures else "host clock"
        if run.roofs is not None:
            row.roof_gbs = run.roofs.read_gbs
            row.gbs = row.nbytes / row.us / 1e3
            row.roof_fraction = row.gbs / run.roofs.read_gbs

    # Prompts.

    def time_prefills(self) -> None:
        """Prompts in turns, each on an idle device."""
        budget = self.run.settings.seconds / 2
        host: dict[str, list[float]] = {name: [] for name in self.paths}
        due: dict[str, int] = {}

        def once(name: str) -> float:
            path = self.paths[name]
            path.reset()
            seconds, on_host = self.run.latency.once(path.prefill)
            host[name].append(on_host)
            return seconds

        def size(name: str) -> list[float]:
            due[name] = max(3, min(MOST_PREFILLS, int(budget / once(name))))
            host[name].clear()
            return []

        if self.run.clock.measures:
            self.in_turns(self.prefill, dict.fromkeys(self.paths, 1), size)
        else:
            due = dict.fromkeys(self.paths, 1)
        rounds = {name: min(ROUNDS, n) for name, n in due.items()}
        samples = self.in_turns(
            self.prefill, rounds, lambda name: [once(name) for _ in range(max(1, due[name] // rounds[name]))]
        )
        for name, seconds in samples.items():
            self.fill_prefill(name, seconds, host[name])
        self.compare(self.prefill)

    def fill_prefill(self, name: str, seconds: Sequence[float], host: Sequence[float]) -> None:
        row, model, run = self.prefill[name], self.model, self.run
        row.us, row.us_p20, row.us_p80 = (1e6 * s for s in spread(seconds))
        row.us_p99 = 1e6 * percentile(seconds, 0.99)
        row.samples, row.calls = len(seconds), 1
        row.tokens_per_s = self.batch * run.prompt / (row.us / 1e6)
        row.nbytes = (model.own if name in OWN else model.dense).nbytes
        row.method = "events, idle device" if run.clock.measures else "host clock"
        if run.roofs is not None:
            row.host_us = 1e6 * spread(host)[0]
            flops = model.prefill_flops(self.batch, run.prompt)
            row.tflops, row.gbs = flops / row.us / 1e6, row.nbytes / row.us / 1e3
            row.roof_gbs, row.roof_tflops = run.roofs.read_gbs, run.roofs.products.get(row.dtype, run.roofs.tflops)
            row.roof_fraction = 1e6 * run.roofs.product_floor_seconds(row.nbytes, flops, row.dtype) / row.us

    def compare(self, rows: Mapping[str, E2ERow]) -> None:
        if not self.run.clock.measures:
            return
        timed = {name: row.us for name, row in rows.items() if row.status == "ok" and row.us}
        for name, us in timed.items():
            peers = [timed[peer] for peer in PEERS.get(name, ()) if peer in timed]
            rows[name].ratio_to_best_peer = min(peers) / us if peers else None
            rows[name].speedup_vs_eager = timed[HF_EAGER] / us if HF_EAGER in timed else None

    def write(self, done: bool = False) -> None:
        """What is known so far: a run that is cut off leaves what it has measured."""
        s = self.run.settings
        if s.json is not None:
            write_json(s.json, self.run.meta, self.run.rows)
        if self.file is not None:
            whole = added(self.before, self.meta, self.rows, done)
            write_json(self.file, whole.meta, whole.rows)
