"""`rooftile bench`: check, measure, compare, report."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rooftile import runtime
from rooftile.bench import report, warm
from rooftile.bench.info import check_results, machine, may_join
from rooftile.bench.measure import ROOF, Effort, Timing, measure, one_of
from rooftile.bench.roof import Roofs, gemm_dtype, measure_roofs
from rooftile.bench.rows import EACH, OURS, TOGETHER, Measured, Row, compare, gpu_slug, groups, read_json, write_json
from rooftile.bench.timer import Clock, clock
from rooftile.bench.variants import Variant, check_names, peer_names, variants
from rooftile.cases import Direction, OpCase, Point, find_cases
from rooftile.cases.case import SMALL_SETS
from rooftile.cases.check import NAMES, Truth, check, points


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure and where to write. If `sets`, `dtypes` or `peers` is None, the mode decides. `resume`: take what
    `results` has of this commit. `host`: measure first calls and the host's times too."""

    ops: Sequence[str] = ()
    sets: Sequence[str] | None = None
    dtypes: Sequence[torch.dtype] | None = None
    directions: Sequence[Measured] = EACH
    peers: Sequence[str] | None = None
    effort: Effort = dataclasses.field(default_factory=Effort)
    csv: Path | None = None
    json: Path | None = None
    plot: Path | None = None
    results: Path | None = None
    suite: str = "rowwise"
    resume: bool = False
    jobs: int | None = None
    verbose: bool = False
    host: bool = True


class Phases:
    """Where the time of a run goes: seconds of wall clock by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._since = "start", time.perf_counter()

    def enter(self, name: str) -> None:
        """End the current phase and begin that one."""
        now = time.perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now

    def show(self, console: Console) -> None:
        self.enter("end")
        table = Table("phase", "seconds", title="wall clock", title_justify="left")
        for name, seconds in self.seconds.items():
            table.add_row(name, f"{seconds:.1f}")
        console.print(table)


def brief(error: BaseException | str) -> str:
    """One line of at most 200 characters."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return text.strip().partition("\n")[0][:200]


@dataclasses.dataclass(frozen=True)
class Verdict:
    status: str
    max_error: float | None = None
    message: str = ""
    max_abs_error: float | None = None


CUTS = (1, 4, 16)  # of the rows, for a check that does not fit into memory


def truths(case: OpCase, point: Point, dtype: torch.dtype, direction: Direction, device: torch.device) -> list[Truth]:
    """At the point and, if it has rows, at the same one with fewer of them, by `CUTS`."""
    cuts = [point]
    if "rows" in point.dims:
        cuts = [dataclasses.replace(point, dims={**point.dims, "rows": max(1, point["rows"] // n)}) for n in CUTS]
    return [Truth(case, cut, dtype, direction, device=device) for cut in cuts]


def judge(variant: Variant, known: Sequence[Truth]) -> Verdict:
    """Whether an implementation is correct. Ours must meet the check's tolerances; a baseline only the case's ceilings,
    since it need not round as eager PyTorch does. Where float64 does not fit into memory, fewer rows are checked."""
    ours = variant.name == OURS
    for truth in known:
        checks = check(truth, function=None if ours else variant.function, mutates=variant.mutates)
        if not any(c.message.startswith("OutOfMemoryError") for c in checks):
            break
    most, largest = (max(filter(math.isfinite, some), default=None) for some in (
        [c.error for c in checks], [c.abs_error for c in checks],
    ))  # fmt: skip
    for c in checks:
        allowed = truth.case.tolerance(truth.dtype, truth.direction, c.output)
        rounds_otherwise = c.message.startswith("error ") and c.error <= max(allowed.ceiling, allowed.peers)
        if c.passed or (rounds_otherwise and not ours):
            continue
        if not ours and c.message.startswith("dtype "):  # Llama's own formula promotes where dtypes are mixed
            return Verdict("unsupported", most, brief(f"another result: {c.output} has {c.message}"), largest)
        # An exception's name comes before the colon. A message about a wrong result begins in lower case.
        status = "error" if re.match(r"[A-Z]\w+: ", c.message) else "FAIL"
        return Verdict(status, most, brief(f"{c.output}: {c.message}" if status == "FAIL" else c.message), largest)
    return Verdict("ok", most, max_abs_error=largest)


class Bench:
    """One run: its clock, its roofs, and the rows so far."""

    def __init__(self, settings: Settings, console: Console, clock: Clock, device: torch.device) -> None:
        self.settings, self.console, self.clock, self.device = settings, console, clock, device
        self.phases = Phases()
        self.meta: dict[str, Any] = {**machine(), "suite": settings.suite, "host": {}, "first_call_ms": {}}
        self.roofs: Roofs | None = None
        self.rows: list[Row] = []

    def measure_roofs(self) -> None:
        self.phases.enter("roofs")
        self.roofs = measure_roofs(self.clock, self.device) if self.clock.measures else None
        self.meta["roof_copy_gbs"] = self.roofs and self.roofs.copy_gbs
        self.meta["roof_read_gbs"] = self.roofs and self.roofs.read_gbs
        self.meta["roof_tflops"] = self.roofs and self.roofs.tflops
        self.meta["roof_products"] = self.roofs and dict(self.roofs.gemms)
        if not self.clock.measures:
            self.meta["note"] = report.NO_MEASUREMENT

    def measure_host(self, plan: dict[str, tuple[OpCase, list[Point]]], dtype: torch.dtype) -> None:
        """The host's times and the first calls, at each op's smallest point."""
        from rooftile.bench.host import first_call_ms, measure_host, smallest

        self.phases.enter("first calls and host")
        first, host = self.meta["first_call_ms"], self.meta["host"]
        for case, _ in plan.values():
            if case.name in self.meta["host"]:
                continue
            try:
                point = smallest(case, dtype)
                first[case.name] = first_call_ms(case, point, dtype, self.clock, self.device)
                host[case.name] = dataclasses.asdict(measure_host(case, point, dtype, self.clock, self.device))
            except Exception as error:  # the op's rows say what is wrong with it
                self.console.print(
                    f"{case.name}: the host's time was not measured: {brief(error)}", style="yellow", markup=False
                )

    def row(self, case: OpCase, point: Point, dtype: torch.dtype, direction: Measured, name: str) -> Row:
        nbytes = case.nbytes(point, dtype.itemsize, one_of(direction))
        where = (case.name, direction, point.label, NAMES[dtype], name)
        return Row(*where, options=dict(point.options), nbytes=nbytes, roof=case.roof, dims=dict(point.dims))

    def measure_point(self, case: OpCase, point: Point, dtype: torch.dtype, direction: Measured) -> list[Row]:
        """Check each implementation, time the correct ones, compare."""
        found = variants(case, point, self.settings.peers, reruns=direction != TOGETHER)
        side = one_of(direction)
        rows = {v.name: self.row(case, point, dtype, direction, v.name) for v in found}
        self.phases.enter("check")
        known = truths(case, point, dtype, side, self.device)
        for variant in found:
            row = rows[variant.name]
            row.status, row.message = variant.status, variant.message
            if variant.function is not None:
                with self.clock.active():
                    verdict = judge(variant, known)
                row.status, row.max_error, row.message = verdict.status, verdict.max_error, verdict.message
                row.max_abs_error = verdict.max_abs_error
        del known  # its tensors
        right = [v for v in found if rows[v.name].status == "ok"]
        timings = measure(
            case, point, dtype, direction, right, self.clock, self.settings.effort, self.device, self.phases.enter
        )
        roof = timings.get(ROOF)
        roof_gbs = None if not isinstance(roof, Timing) else rows[OURS].nbytes / roof.us[0] / 1e3
        for variant in right:
            row = rows[variant.name]
            self.fill(row, case.flops(point, side), timings[variant.name], roof_gbs)
            if direction == TOGETHER and variant.mutates and row.status == "ok":
                row.message = f"overwrites {', '.join(variant.mutates)}; a call reads what the previous one wrote"
        if self.clock.measures:
            compare(rows.values())
        return list(rows.values())

    def fill(self, row: Row, flops: int, timing: Timing | Exception, roof_gbs: float | None) -> None:
        """The figures of one row."""
        if isinstance(timing, Exception):
            row.status, row.message = "error", brief(timing)
            return
        row.us, row.us_p20, row.us_p80 = timing.us
        row.method, row.samples, row.calls = timing.method, len(timing.samples), timing.calls
        if self.roofs is None:
            return
        row.host_us, row.peak_bytes, row.extra_bytes = timing.host_us, timing.peak_bytes, timing.extra_bytes
        row.gbs, row.tflops, row.roof_gbs = row.nbytes / row.us / 1e3, flops / row.us / 1e6, roof_gbs
        if row.roof == "copy":
            floor = self.roofs.floor_seconds(row.nbytes, flops, roof_gbs)
        else:
            dtype = gemm_dtype(row.roof, row.dtype, row.options)
            row.roof_gbs, row.roof_tflops = self.roofs.read_gbs, self.roofs.gemms.get(dtype, self.roofs.tflops)
            floor = self.roofs.gemm_floor_seconds(row.nbytes, flops, dtype)
        row.roof_fraction = 1e6 * floor / row.us

    def measure_safely(self, case: OpCase, point: Point, dtype: torch.dtype, direction: Measured) -> list[Row]:
        """The rows of a point. An error that concerns all of them is written into each."""
        try:
            return self.measure_point(case, point, dtype, direction)
        except Exception as error:
            message = brief(error)
        gc.collect()
        names = self.settings.peers if self.settings.peers is not None else peer_names(case)
        rows = [self.row(case, point, dtype, direction, name) for name in (OURS, *names)]
        for row in rows:
            row.status, row.message = "error", message
        return rows

    def path(self, case: OpCase) -> Path:
        """The op's file in the results."""
        assert self.settings.results is not None
        return self.settings.results / gpu_slug(str(self.meta["gpu"])) / self.settings.suite / f"{case.name}.json"

    def measured(self, case: OpCase) -> dict[tuple[str, ...], list[Row]]:
        """The groups of rows that the op's file has of this machine, commit and suite, all baselines there and none of
        ours failed. The file's host times are taken, too."""
        if not self.path(case).is_file():
            return {}
        meta, rows = read_json(self.path(case))
        if not may_join(self.meta, meta, ("suite",)):
            return {}
        for key in ("host", "first_call_ms"):
            self.meta[key] |= meta.get(key, {})
        names = self.settings.peers if self.settings.peers is not None else peer_names(case)
        found = (group for group in groups(rows) if {row.impl for row in group}.issuperset((OURS, *names)))
        return {group[0].group: group for group in found if not any(row.failed for row in group)}

    def write_results(self, case: OpCase, charts: bool) -> None:
        if self.settings.results is None:
            return
        path, meta = self.path(case), dict(self.meta)
        for key in ("host", "first_call_ms"):
            meta[key] = {name: value for name, value in self.meta[key].items() if name == case.name}
        rows = [r for r in self.rows if r.op == case.name]
        write_json(path, meta, rows)
        if case.over and charts:
            report.plot_over(path.parent, rows, case.over, str(self.meta["gpu"]))

    def write_reports(self, cases: Iterable[OpCase]) -> None:
        s = self.settings
        if s.csv is not None:
            report.write_csv(s.csv, self.rows)
        if s.json is not None:
            write_json(s.json, self.meta, self.rows)
        if s.plot is not None:
            report.plot(s.plot, self.rows, str(self.meta["gpu"]), self.clock.measures)
            for case in cases:
                if case.over:
                    own = [r for r in self.rows if r.op == case.name]
                    report.plot_over(s.plot, own, case.over, str(self.meta["gpu"]))


def plan(settings: Settings) -> dict[str, tuple[OpCase, list[Point]]]:
    """The points to measure, by op.

    Raises:
        ValueError: an op or a baseline is not known, or no op has a point in the sets.
    """
    cases = find_cases(list(settings.ops) or None)
    check_names(cases, settings.peers)
    assert settings.sets is not None
    found = {case.name: (case, _with_work(case, points(case, settings.sets))) for case in cases}
    found = {name: (case, some) for name, (case, some) in found.items() if some}
    if not found:
        raise ValueError(f"no point of {', '.join(c.name for c in cases)} is in the set {', '.join(settings.sets)}")
    return found


def _with_work(case: OpCase, found: Sequence[Point]) -> list[Point]:
    """The points without the empty ones, which can be checked but not timed."""
    return [p for p in found if case.nbytes(p, 1, "forward") > 0 and case.flops(p, "forward") > 0]


@contextlib.contextmanager
def progress(
    console: Console, total: int, verbose: bool = False
) -> Iterator[tuple[Callable[[str], None], Callable[..., None]]]:
    """`begin(what)` and `done(line)`: a bar on a terminal, a line for each point elsewhere or where asked for."""
    lines = verbose or not console.is_terminal
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total)

        def done(line: str = "") -> None:
            progress.advance(bar)
            if line and lines:
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield lambda what: progress.update(bar, description=what), done


def _line(rows: Sequence[Row], seconds: float) -> str:
    """One point, in short."""
    ours = rows[0]
    head = f"{ours.op} {ours.direction} {ours.dtype} {ours.place}:"
    if ours.us is None:
        return f"{head} {ours.status} {ours.message} [{seconds:.1f} s]"
    figures = [f"{ours.us:.2f} us"]
    figures += [f"{ours.gbs:.0f} GB/s"] if ours.gbs else []
    figures += [f"{ours.roof_fraction:.3f} of the roof"] if ours.roof_fraction else []
    figures += [f"{ours.ratio_to_best_peer:.3f} of the best baseline"] if ours.ratio_to_best_peer else []
    bad = [f"{r.impl} {r.status}" for r in rows[1:] if r.status in ("FAIL", "error")]
    return f"{head} {', '.join(figures + bad)} [{seconds:.1f} s]"


def _mode_defaults(settings: Settings, measures: bool) -> Settings:
    check_results(settings.results, measures)
    if settings.resume and settings.results is None:
        raise ValueError("--resume keeps the rows of --results, and no --results is given")
    slow = [name for name in settings.sets or () if name not in SMALL_SETS]
    if slow and not measures:
        raise ValueError(
            f"the set {', '.join(slow)} has real sizes, at which the interpreter takes minutes to hours a point and "
            f"measures nothing: use {' or '.join(SMALL_SETS)}, or a GPU"
        )
    effort = settings.effort
    if not measures and effort.seconds:  # else the passes that were asked for
        effort = dataclasses.replace(effort, warmup=0, iters=2)
    return dataclasses.replace(
        settings,
        sets=settings.sets or (("llm",) if measures else ("tiny",)),
        dtypes=settings.dtypes or (torch.bfloat16,),
        effort=effort,
    )


def run(settings: Settings, console: Console, device: torch.device | None = None, timer: Clock | None = None) -> int:
    """Measure what the settings ask for, show it, write it. Returns 1 if a row of ours is wrong or raised, else 0.

    By default the device and its clock are this process's own.

    Raises:
        ValueError: an op, baseline or set is not known, or results or real sizes are requested in the interpreter.
        RuntimeError: there is no GPU, and this is not the interpreter.
    """
    device = device or runtime.default_device()
    measures = runtime.MODE is runtime.Mode.GPU if timer is None else timer.measures
    settings = _mode_defaults(settings, measures)
    work = plan(settings)
    assert settings.dtypes is not None
    bench = Bench(settings, console, timer or clock(device), device)
    rows: dict[tuple[str, ...], list[Row]] = {}
    if settings.resume:
        for case, _ in work.values():
            rows |= bench.measured(case)
    bench.measure_roofs()
    if bench.clock.measures and settings.host:
        bench.measure_host(work, settings.dtypes[0])

    every = [
        (case.together() if direction == TOGETHER else case, point, dtype, direction)
        for case, found in work.values()
        for point in found
        for dtype in settings.dtypes
        if dtype in case.dtypes
        for direction in settings.directions
        if direction == "forward" or case.grads
    ]
    keys = [bench.row(*where, OURS).group for where in every]
    todo = [(key, *where) for key, where in zip(keys, every, strict=True) if key not in rows]
    jobs = warm.default_jobs(len(todo)) if settings.jobs is None else settings.jobs
    if jobs:
        bench.phases.enter("compile ahead")
        peers = None if settings.peers is None else tuple(settings.peers)
        with progress(console, len(todo)) as (begin, done):
            begin(f"compiling in {jobs} processes")
            warm.warm([warm.Task(c.name, p, d, w, peers) for _, c, p, d, w in todo], jobs, done)

    gc.freeze()  # objects alive now are not scanned again: later collections are quick
    bench.rows = [row for key in keys for row in rows.get(key, ())]
    with progress(console, len(todo), settings.verbose) as (begin, done):
        for i, (key, case, point, dtype, direction) in enumerate(todo):
            begin(f"{case.name} {direction} {NAMES[dtype]} {point}")
            since = time.perf_counter()
            rows[key] = bench.measure_safely(case, point, dtype, direction)
            bench.rows = [row for each in keys for row in rows.get(each, ())]
            done(_line(rows[key], time.perf_counter() - since))
            ends = i + 1 == len(todo) or todo[i + 1][1].name != case.name
            bench.write_results(case, charts=ends)  # now, before a failure at a later point loses them
            if ends:
                bench.clock.release()
    gc.unfreeze()

    bench.phases.enter("report")
    report.show(console, bench.rows, bench.clock.measures)
    if bench.meta.get("host"):
        report.show_host(console, bench.meta["host"], bench.meta["first_call_ms"])
    bench.write_reports(case for case, _ in work.values())
    if settings.verbose:
        bench.phases.show(console)
    return int(any(r.failed for r in bench.rows))
