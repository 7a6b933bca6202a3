"""`rooftile tune`: measure launch configurations, write the fastest correct ones to a table, report the speedup."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console

from rooftile import runtime, tuning
from rooftile.bench.info import machine
from rooftile.bench.report import NO_MEASUREMENT
from rooftile.bench.run import Phases, progress
from rooftile.bench.timer import Clock, clock
from rooftile.bench.tune import report as tune_report
from rooftile.bench.tune import worker as tune_worker
from rooftile.bench.tune.problems import Item, Settings, plan, shapes_by_model, with_defaults
from rooftile.bench.tune.search import Found, Seconds
from rooftile.bench.tune.space import TUNABLES, label
from rooftile.bench.tune.store import Store, command
from rooftile.bench.tune.worker import Compile, Died, Search
from rooftile.tuning import gpu_slug

COMPILING = 0.5  # of the budget, at most
MOST_DEATHS = 8  # of processes at one problem, after which it is given up


def tidy(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


class Tuning:
    """One run: its problems, its tables, and the time left."""

    def __init__(self, settings: Settings, console: Console, device: torch.device, timer: Clock | None) -> None:
        self.settings, self.console, self.device, self.timer = settings, console, device, timer
        self.measures = runtime.MODE is runtime.Mode.GPU if timer is None else timer.measures
        self.target = runtime.target(device)
        self.began = time.monotonic()
        self.phases = Phases()
        facts = machine()
        self.gpu = gpu_slug(str(facts["gpu"])) if facts["gpu"] else "interpreter"
        names = ("gpu", "driver", "torch", "triton", "rooftile", "commit", "date")
        self.run = {name: facts[name] for name in names}
        self.run["command"] = command(sys.argv[1:])
        if not self.measures:
            self.run["note"] = NO_MEASUREMENT
        self.stores: dict[str, Store] = {}
        self.spaces: dict[Item, list[Any]] = {}
        self.defaults: dict[Item, Any] = {}
        self.uncompiled: set[Any] = set()
        self.broken: set[Any] = set()  # binaries that failed before the search, and would at the next problem too

    @property
    def left(self) -> float | None:
        budget = self.settings.budget
        return None if budget is None else self.began + budget - time.monotonic()

    def store(self, item: Item) -> Store:
        table = item.tunable.table
        if table not in self.stores:
            folder = self.settings.out or tuning.user_folder()
            path = folder / self.gpu / f"{table}.json"
            self.stores[table] = Store(path, table, self.gpu, self.target.multiprocessors, self.run)
        return self.stores[table]

    def bad_label(self, item: Item, name: str) -> str:
        """The key of a failed configuration: it may work at other sizes, or with another compiler."""
        return f"{name}, {item.key}, triton {self.run['triton']}"

    def known_bad(self, item: Item) -> dict[str, str]:
        """By label, the configurations that failed before at such a problem."""
        failed = self.store(item).table.failed
        names = (label(item.tunable, c) for c in (self.defaults[item], *self.spaces[item]))
        under = {name: self.bad_label(item, name) for name in names}
        return {name: failed[key] for name, key in under.items() if key in failed}

    def remember(self, item: Item, failed: dict[str, str]) -> None:
        for name, reason in failed.items():
            if not reason.startswith("OutOfMemoryError"):  # which says something of this problem alone
                self.store(item).table.failed.setdefault(self.bad_label(item, name), reason)

    def open(self, items: Sequence[Item]) -> list[Item]:
        """The remaining problems, with their spaces."""
        left = [item for item in items if self.settings.again or item.key not in self.store(item).table.entries]
        if self.settings.again:
            for item in left:
                table = self.store(item).table
                table.failed = {name: why for name, why in table.failed.items() if f", {item.key}, " not in name}
        for item in left:
            self.defaults[item] = item.tunable.default(item.problem, self.target)
            self.spaces[item] = item.tunable.space(item.problem, self.target, self.settings.exhaustive)
        return left

    def compile_tasks(self, items: Sequence[Item]) -> dict[Any, tuple[Item, Compile]]:
        """Each binary once, at the smallest problem that it serves; the likely configurations of all problems first."""
        ranked: dict[Any, tuple[int, int, Item, Any]] = {}
        for item in items:
            bad = self.known_bad(item)
            for rank, config in enumerate((self.defaults[item], *self.spaces[item])):
                if label(item.tunable, config) in bad:
                    continue
                binary = (item.tunable.name, item.tunable.binary(item.problem, config))
                size = item.tunable.nbytes(item.problem)
                before = ranked.get(binary)
                if before is None or size < before[1]:
                    ranked[binary] = (min(rank, before[0] if before else rank), size, item, config)
        in_order = sorted(ranked.items(), key=lambda pair: pair[1][0])
        return {b: (item, Compile(item.tunable.name, item.problem, c)) for b, (_, _, item, c) in in_order}

    def compile_ahead(self, items: Sequence[Item]) -> None:
        tasks = self.compile_tasks(items)
        jobs = self.settings.jobs
        if jobs is None:
            jobs = max(1, min(16, (os.cpu_count() or 2) - 1)) if self.measures and self.timer is None else 0
        if not jobs:
            return
        until = None if self.left is None else time.monotonic() + COMPILING * self.left
        self.phases.enter("compile")
        by_task = {id(task): (binary, item) for binary, (item, task) in tasks.items()}
        if until is not None:
            self.uncompiled = set(tasks)
        with progress(self.console, len(tasks)) as (begin, done):
            begin(f"compiling in {jobs} processes")

            def finished(task: Compile, wrong: str) -> None:
                binary, item = by_task[id(task)]
                self.uncompiled.discard(binary)
                if wrong:
                    self.remember(item, {label(item.tunable, task.config): wrong})
                    if not wrong.startswith("OutOfMemoryError"):
                        self.broken.add(binary)
                done()

            tune_worker.compile_ahead([task for _, task in tasks.values()], jobs, until, finished)
        if self.uncompiled:
            self.console.print(f"{len(self.uncompiled)} of {len(tasks)} kernels were not compiled: the budget ends")

    def task(self, item: Item, share: int) -> Search:
        """The search at a problem; its neighbours' winners come first. `share`: the number of problems left, with
        this one."""
        tunable = item.tunable
        sizes = tunable.describe(item.problem)
        near = []
        if sizes.get("layout") == "nt":
            found = tune_report.find(self.store(item).table.entries.values(), sizes["n"], sizes["k"], sizes["gated"])
            by_fields = {tuple(tunable.fields(c).items()): c for c in self.spaces[item]}
            near = [c for e in found.values() if (c := by_fields.get(tuple(e["config"].items()))) is not None]
        space = dict.fromkeys((*near, *self.spaces[item]))
        left_out = self.uncompiled | self.broken
        kept = tuple(c for c in space if (tunable.name, tunable.binary(item.problem, c)) not in left_out)
        seconds = Seconds() if self.measures else Seconds(0.0, 0.0, 0.0)
        left = None if self.left is None else max(0.0, self.left) / share
        bad = self.known_bad(item)
        return Search(tunable.name, item.problem, kept, self.defaults[item], seconds, left, bad)

    def search(self, item: Item, task: Search, process: tune_worker.Worker | None) -> Found:
        """Search, in the given process or in this one. A configuration that ends the process is skipped.

        Raises:
            RuntimeError: nothing was found.
        """
        if process is None:
            return tune_worker.run_search(task, self.timer or clock(self.device), self.device, lambda name: None)
        until = None if task.left is None else time.monotonic() + task.left
        for _ in range(MOST_DEATHS):
            try:
                return process.ask(task)
            except Died as death:
                if not death.trying:
                    raise RuntimeError(str(death)) from None
                died = {death.trying: str(death)}
                self.remember(item, died)
                left = None if until is None else max(0.0, until - time.monotonic())
                task = dataclasses.replace(task, left=left, known_bad={**task.known_bad, **died})
        raise RuntimeError(f"{MOST_DEATHS} configurations ended the process")

    def finish(self, item: Item, found: Found) -> dict[str, Any]:
        """Write the result."""
        self.remember(item, found.failed)
        entry = {
            **item.tunable.describe(item.problem),
            "config": item.tunable.fields(found.config),
            "us": tidy(found.us),
            "default_us": tidy(found.default_us),
            "peer_us": tidy(found.peer_us),
            "error": tidy(found.error),
            "default": label(item.tunable, found.default),
            "tried": found.tried,
            "space": found.space,
        }
        self.store(item).add(item.key, entry)
        return entry

    def each(self, items: Sequence[Item]) -> Iterator[tuple[Item, Found | Exception]]:
        """The result of each problem."""
        with tune_worker.worker() as process:
            isolated = process if self.measures and self.timer is None else None
            for i, item in enumerate(items):
                if self.left is not None and self.left <= 0:
                    return
                try:
                    yield item, self.search(item, self.task(item, len(items) - i), isolated)
                except Exception as error:
                    yield item, error


def line(item: Item, entry: dict[str, Any], found: Found) -> str:
    default = f", default {found.default_us:.2f}" if found.default_us is not None else ", the default is wrong"
    peer = f", {item.tunable.peer} {found.peer_us:.2f}" if found.peer_us is not None else ""
    what = f"{item.tunable.name} {item.of} [{item.key}]: {found.us:.2f} us{default}{peer}"
    config = label(item.tunable, found.config)
    return (
        f"{what}: {config} ({found.tried} of {found.space} tried, {len(found.failed)} failed) [{found.seconds:.1f} s]"
    )


def run(settings: Settings, console: Console, device: torch.device | None = None, timer: Clock | None = None) -> int:
    """Tune what the settings ask for. Returns 1 if a problem has no correct configuration, else 0.

    By default the device and its clock are this process's own, and the search has a separate process.

    Raises:
        ValueError: an op or a model is not known, or a table can't be written to.
        RuntimeError: there is no GPU, and the process is not in the interpreter.
    """
    device = device or runtime.default_device()
    tuned = Tuning(settings, console, device, timer)
    settings = tuned.settings = with_defaults(settings, tuned.measures)
    items = plan(settings)
    todo = tuned.open(items)
    if len(todo) < len(items):
        console.print(f"{len(items) - len(todo)} of {len(items)} GEMMs are in the table already; --again for all")
    wrong: list[tuple[Item, Exception]] = []
    tuned.compile_ahead(todo)
    tuned.phases.enter("search")
    with progress(console, len(todo), settings.verbose) as (begin, done):
        begin("searching")
        for item, found in tuned.each(todo):
            begin(f"{item.tunable.name} {item.of} [{item.key}]")
            if isinstance(found, Exception):
                wrong.append((item, found))
                done(f"{item.tunable.name} {item.of} [{item.key}]: {found}")
            else:
                done(line(item, tuned.finish(item, found), found))
    tuned.phases.enter("report")
    tuning.forget()
    models = shapes_by_model(settings)
    for op in settings.ops:
        rows = [(item.of, entry) for item in items if item.tunable.name == op and (entry := _entry(tuned, item))]
        title = f"{op}, tuned" + ("" if tuned.measures else f" ({NO_MEASUREMENT})")
        if rows:
            tune_report.show(console, rows, models, title, TUNABLES[op].peer)
    for item, error in wrong:
        console.print(f"{item.tunable.name} {item.of} [{item.key}]: {error}", style="red", markup=False)
    unfinished = [item for item in items if _entry(tuned, item) is None]
    if len(unfinished) > len(wrong):
        console.print(f"{len(unfinished) - len(wrong)} GEMMs are left: the budget ended. Run it again to go on.")
    for store in tuned.stores.values():
        console.print(f"written to {store.path}", soft_wrap=True, highlight=False)
    if settings.verbose:
        tuned.phases.show(console)
    return int(bool(wrong))


def _entry(tuned: Tuning, item: Item) -> dict[str, Any] | None:
    return tuned.store(item).table.entries.get(item.key)
