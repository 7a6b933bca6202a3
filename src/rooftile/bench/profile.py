"""`rooftile profile`: what Nsight Compute counts in the kernels of one call of an op.

The call runs in a process of its own under `ncu`, after a first call that compiles. `ncu` sees the NVTX range around
the second call alone, and runs each kernel in it several times, with its memory saved and restored.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rooftile.bench.info import check_results, machine
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import OURS, gpu_slug, write_whole
from rooftile.cases import Direction, OpCase, Point
from rooftile.cases.check import DTYPES, NAMES

RANGE = "rooftile.profile"  # the NVTX range around the call that is profiled
_STALL = "smsp__average_warps_issue_stalled_"
_PER_ISSUE = "_per_issue_active.ratio"
METRICS = {
    "us": "gpu__time_duration.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "l2": "lts__t_sector_hit_rate.pct",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "grid": "launch__grid_size",
    "threads": "launch__block_size",
}
# ncu gives a number the unit that suits it.
_UNITS = {
    "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "nsecond": 1e-3, "ns": 1e-3, "usecond": 1, "us": 1,
    "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6,
}  # fmt: skip
STALLS = 3  # causes shown
ISSUES = "selected"  # ncu counts the warp that issues among the causes


class ProfilerError(Exception):
    """There is no profiler, or it failed; the message says what to do."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code  # of the profiler


def find_profiler(name: str, otherwise: str) -> str:
    """The path of a profiler.

    Raises:
        ProfilerError: it is not on the PATH; the message ends with `otherwise`.
    """
    path = shutil.which(name)
    if path is None:
        raise ProfilerError(f"{name} is not on the PATH. {otherwise}")
    return path


def start_profiler(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a profiler to its end, with what it and the program under it print."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def failure(what: str, done: subprocess.CompletedProcess[str]) -> ProfilerError:
    """The error of a profiler that ended so, with its last lines."""
    last = "\n".join(f"{done.stdout}\n{done.stderr}".strip().splitlines()[-5:])
    return ProfilerError(f"{what} (exit code {done.returncode}):\n{last}", done.returncode or 2)


@dataclasses.dataclass(frozen=True)
class Task:
    """One call: an op at a point, in a dtype and a direction."""

    op: str
    point: Point
    dtype: str
    direction: Direction

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Task:
        fields = json.loads(text)
        return Task(**{**fields, "point": Point(**fields["point"])})


@dataclasses.dataclass(frozen=True)
class Profile:
    """The counters of one kernel: those of `METRICS` that this GPU has, in us, bytes and percent.

    `stalls` are the cycles that a warp waits for each cause between two of its instructions, most first.
    """

    kernel: str
    counters: dict[str, float]
    stalls: dict[str, float]


def find_point(case: OpCase, asked: str | None) -> Point:
    """The point of that label and options, or that label, or the one whose label and options contain that text; without
    it, the first of the models' points.

    Raises:
        ValueError: none has it, or several do; the message lists the points.
    """
    named = [p for name in ("llm", "gemm", "decode", "tiny") for p in case.sets.get(name, ())]
    every = named + [p for some in case.sets.values() for p in some if p not in named]
    if asked is None:
        return every[0]
    by_text = {str(p): p for p in every}
    if asked in by_text:
        return by_text[asked]
    found = [t for t, p in by_text.items() if asked == p.label] or [t for t in by_text if asked in t]
    if not found:
        raise ValueError(f"{case.name} has no shape {asked!r}; known shapes: {', '.join(by_text)}")
    if len(found) > 1:
        raise ValueError(f"{case.name} has several shapes {asked!r}: {', '.join(found)}; expected one of them")
    return by_text[found[0]]


def command(ncu: str, task: Task) -> list[str]:
    """What is run: the clocks are left as they are, as a benchmark finds them."""
    metrics = [*METRICS.values(), f"regex:{_STALL}.*{_PER_ISSUE.replace('.', '[.]')}"]
    return [
        ncu, "--target-processes", "all", "--clock-control", "none", "--csv", "--page", "raw", "--nvtx",
        "--nvtx-include", RANGE, "--metrics", ",".join(metrics),
        sys.executable, "-m", "rooftile.bench.profile", task.as_json(),
    ]  # fmt: skip


def parse(text: str) -> list[Profile]:
    """The kernels of a raw page in CSV: a line of names, a line of units, and a line for each kernel.

    Raises:
        ValueError: there is no such table.
    """
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise ValueError("no table of counters")
    names, units, *rows = list(csv.reader(io.StringIO("\n".join(lines[first:]))))

    def value(row: Sequence[str], name: str) -> float | None:
        at = names.index(name) if name in names else None
        if at is None or not row[at].strip() or row[at] in ("n/a", "no data"):
            return None
        return float(row[at].replace(",", "")) * _UNITS.get(units[at], 1)

    found = []
    for row in (r for r in rows if len(r) == len(names)):
        counters = {short: v for short, name in METRICS.items() if (v := value(row, name)) is not None}
        causes = (n for n in names if n.startswith(_STALL) and n.endswith(_PER_ISSUE))
        stalls = {n[len(_STALL) : -len(_PER_ISSUE)]: v for n in causes if (v := value(row, n))}
        stalls.pop(ISSUES, None)
        ordered = dict(sorted(stalls.items(), key=lambda item: -item[1]))
        found.append(Profile(row[names.index("Kernel Name")], counters, ordered))
    return found


def profile(task: Task, ncu: str | None = None) -> list[Profile]:
    """The kernels of one call of that op.

    Raises:
        ProfilerError: `ncu` is not installed, may not read the counters, or failed.
    """
    ncu = ncu or find_profiler(
        "ncu",
        "Nsight Compute comes with the CUDA toolkit; without it, `rooftile bench` gives times and the fraction of the "
        "roof, and `rooftile inspect` registers, spills and shared memory.",
    )
    done = start_profiler(command(ncu, task))
    if "ERR_NVGPUCTRPERM" in f"{done.stdout}\n{done.stderr}":
        raise ProfilerError("this user may not read the GPU's counters (ERR_NVGPUCTRPERM); run as root")
    try:
        found = parse(done.stdout)
    except ValueError:
        found = []
    if done.returncode or not found:
        raise failure("ncu gave no counters", done)
    return found


def run_call(task: Task, around: Callable[[], Any], device: Any) -> None:
    """The call, twice; the second within `around()`, a context."""
    from rooftile.bench import measure, variants
    from rooftile.cases import find_cases

    (case,) = find_cases([task.op])
    (ours,) = (v for v in variants.variants(case, task.point, ()) if v.function is not None)
    given = measure.draw(case, task.point, DTYPES[task.dtype], task.direction, device, 0)
    call = measure.bind(ours, case, task.point, task.direction, given)
    call()
    with around():
        call()


def main(text: str) -> None:
    """In the process under `ncu`."""
    import torch

    from rooftile import runtime

    device = runtime.default_device()

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        torch.cuda.synchronize()
        # Of the process, not of this thread: autograd has threads of its own.
        found = torch.cuda.nvtx.range_start(RANGE)
        yield
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_end(found)

    run_call(Task.from_json(text), around, device)


def lines(found: Sequence[Profile]) -> list[list[str]]:
    """The counters by line: its name, then a cell for each kernel."""

    def of(name: str, unit: str = "", factor: float = 1.0) -> Callable[[Profile], str]:
        return lambda p: f"{number(p.counters[name] * factor, 4)}{unit}" if name in p.counters else "–"

    def stall(i: int) -> Callable[[Profile], str]:
        return lambda p: " ".join(f"{n} {v:.2f}" for n, v in [*p.stalls.items()][i : i + 1])

    forms = {
        "time": of("us", " us"),
        "achieved occupancy": of("occupancy", " %"),
        "DRAM throughput": of("dram", " %"),
        "L2 hit rate": of("l2", " %"),
        "tensor pipe active": of("tensor", " %"),
        "DRAM bytes read": of("read", " MB", 1e-6),
        "DRAM bytes written": of("written", " MB", 1e-6),
        "programs x threads": lambda p: " x ".join(f"{p.counters.get(n, 0):.0f}" for n in ("grid", "threads")),
        "registers a thread": of("registers"),
        **{f"stall {i + 1}, cycles an instruction": stall(i) for i in range(STALLS)},
    }
    return [[name, *map(form, found)] for name, form in forms.items()]


def show(case: OpCase, task: Task, found: Sequence[Profile], console: Console) -> None:
    """A column for each kernel; the bytes of all kernels beside the least that the op must move."""
    least = case.nbytes(task.point, DTYPES[task.dtype].itemsize, task.direction)
    table = Table(title=f"{task.op} {task.direction}, {task.point}, {task.dtype}", title_justify="left")
    table.add_column("")
    for p in found:
        table.add_column(p.kernel.partition("(")[0], justify="right", overflow="fold")
    for line in lines(found):
        table.add_row(*line)
    console.print(table)
    moved = sum(p.counters.get("read", 0.0) + p.counters.get("written", 0.0) for p in found)
    console.print(
        f"DRAM moved {number(moved / 1e6, 4)} MB; the op must move at least {number(least / 1e6, 4)} MB: "
        f"{ratio(moved / least)} times as much. Less than 1: inputs were in the L2 cache, or results still are.",
        highlight=False,
    )


def write(results: Path, task: Task, found: Sequence[Profile]) -> Path:
    """Write the bytes that all kernels of the call moved, and the counters of each, to
    `<gpu>/profile/<op>-<direction>-<dtype>.json`."""
    meta = machine()
    moved = {f"dram_{verb}_bytes": sum(p.counters.get(name, 0.0) for p in found)
             for verb, name in (("read", "read"), ("write", "written"))}  # fmt: skip
    kernels = {"us": sum(p.counters.get("us", 0.0) for p in found), "kernels": [dataclasses.asdict(p) for p in found]}
    place = {"op": task.op, "direction": task.direction, "shape": task.point.label, "options": task.point.options}
    row = {**place, "dtype": task.dtype, "impl": OURS, **moved, **kernels}
    folder = results / gpu_slug(str(meta["gpu"])) / "profile"
    path = folder / f"{task.op}-{task.direction}-{task.dtype}.json"
    write_whole(path, json.dumps({"meta": meta, "rows": [row]}, indent=1) + "\n")
    return path


def run(
    op: str, shape: str | None, dtype: Any, direction: Direction, console: Console, results: Path | None = None
) -> int:
    """Profile and show; write the bytes under `results`, for the documentation's table of memory passes.

    Raises:
        ValueError: the op or the shape is not known, or the op has no such direction.
        ProfilerError: see `profile`.
    """
    from rooftile.cases import find_cases

    (case,) = find_cases([op])
    if direction not in case.directions:
        raise ValueError(f"{op} has no {direction}; it has {', '.join(case.directions)}")
    check_results(results, measures=True)
    task = Task(op, find_point(case, shape), NAMES[dtype], direction)
    found = profile(task)
    show(case, task, found, console)
    if results is not None:
        console.print(f"{write(results, task, found)}: written", markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    main(sys.argv[1])
