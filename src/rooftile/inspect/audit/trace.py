"""What ran on the GPU, read from a trace of PyTorch's profiler (Chrome's trace format, which Perfetto opens).

Time is counted once: where two kernels overlap, as with programmatic dependent launch, it is the earlier one's. The
time between the first and the last of a phase in which neither a kernel nor a copy runs is its idle time. So all parts
of a phase add up to it.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from rooftile.inspect.audit.kernels import BLOCKS, COPIES, Kind, Launched, Origin, origin_of

MARK = "rooftile.audit "  # before the name of a phase, in annotations
IDLE = "idle"
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_GRAPH = "GraphLaunch"  # in the name of the call that replays one, of the runtime or of the driver
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")


@dataclasses.dataclass
class Row:
    """All runs of one kernel in a phase. `us` is their time in all, None where nothing was timed."""

    name: str
    kind: Kind
    block: str
    op: str = ""
    place: str = ""
    count: int = 0
    in_graphs: int = 0
    us: float | None = None


@dataclasses.dataclass
class Phase:
    """A part of what was audited: prefill, decode.

    Attributes:
        steps: how many forwards it has.
        wall_us: from the first kernel's start to the last one's end, None where nothing was timed.
        idle_us: the part of it in which no kernel runs.
        waits: calls by which the host waited for the GPU.
        problems: why the trace does not prove anything.
        last_step: begin, end and block of what ran in the last step, in microseconds from the step's first; empty
            where nothing was timed, or where not every step has as many kernels and copies.
    """

    name: str
    steps: int = 1
    rows: list[Row] = dataclasses.field(default_factory=list)
    wall_us: float | None = None
    idle_us: float | None = None
    waits: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)
    last_step: list[tuple[float, float, str]] = dataclasses.field(default_factory=list)

    def foreign(self, accepted: Collection[Kind] = ()) -> list[Row]:
        """The compute kernels that are not Rooftile's, nor of a kind that is accepted. NCCL's communicate."""
        return [row for row in self.rows if row.kind not in ("Rooftile", "copy", "NCCL", *accepted)]

    def by_block(self) -> dict[str, tuple[int, float | None]]:
        """Count and time of each operation of a block, and the idle time where time is known."""
        found: dict[str, tuple[int, float | None]] = {}
        for block in BLOCKS:
            rows = [row for row in self.rows if row.block == block]
            if rows:
                times = [row.us for row in rows if row.us is not None]
                found[block] = (sum(row.count for row in rows), sum(times) if times else None)
        if self.idle_us is not None:
            found[IDLE] = (0, self.idle_us)
        return found


@dataclasses.dataclass(frozen=True)
class _Event:
    """Something that ran on the GPU, in microseconds."""

    name: str
    category: str
    start: float
    end: float
    args: dict[str, Any]
    call: str = ""  # of the host, that launched it or the graph that it is part of

    @property
    def in_graph(self) -> bool:
        """Not every profiler writes the node of a graph, but what it launched is known by the call."""
        return _GRAPH in self.call or bool(self.args.get("graph node id"))


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file.

    Raises:
        ValueError: it is no trace.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a trace: {error}") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise ValueError(f"{path}: not a trace: it has no list of traceEvents")
    return events


def _complete(events: Iterable[dict[str, Any]], categories: Collection[str]) -> list[dict[str, Any]]:
    """Those of the categories that have a beginning and a duration."""
    return [e for e in events if e.get("ph") == "X" and str(e.get("cat", "")).lower() in categories]


def _spans(events: Iterable[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """Begin, end and name of the phases, as the host marked them."""
    marks = (e for e in _complete(events, ("user_annotation",)) if str(e["name"]).startswith(MARK))
    return sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"])[len(MARK) :]) for e in marks)


def _within(spans: Sequence[tuple[float, float, str]], moment: float, after: bool = False) -> str | None:
    """The phase of that moment; with `after` also of what still runs after the host has left it."""
    at = bisect.bisect_right([begin for begin, _, _ in spans], moment) - 1
    return spans[at][2] if at >= 0 and (after or moment <= spans[at][1]) else None


def _threads(args: dict[str, Any]) -> int:
    block = args.get("block") or []
    threads = 1
    for n in block if isinstance(block, list) else []:
        threads *= int(n)
    return threads


def _origin(event: _Event, launched: Collection[Launched], strict: bool) -> Origin:
    if event.category != "kernel":
        return Origin("copy", COPIES)
    return origin_of(
        event.name,
        launched,
        strict=strict,
        threads=_threads(event.args),
        shared=int(event.args.get("shared memory", 0)),
        registers=int(event.args.get("registers per thread", 0)),
    )


def _measure(phase: Phase, events: Sequence[_Event], launched: Collection[Launched], strict: bool) -> None:
    """Rows and times of a phase."""
    rows: dict[tuple[str, Origin], Row] = {}
    covered = min(e.start for e in events)
    first, idle = covered, 0.0
    ran: list[tuple[float, float, str]] = []
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        origin = _origin(event, launched, strict)
        row = rows.setdefault(
            (event.name, origin), Row(event.name, origin.kind, origin.block, origin.op, origin.place, us=0.0)
        )
        idle += max(0.0, event.start - covered)
        assert row.us is not None
        row.us += max(0.0, event.end - max(event.start, covered))
        row.count += 1
        row.in_graphs += event.in_graph
        covered = max(covered, event.end)
        ran.append((event.start, event.end, origin.block))
    if len(ran) % phase.steps == 0:
        ran = ran[-(len(ran) // phase.steps) :]
        phase.last_step = [(round(a - ran[0][0], 3), round(b - ran[0][0], 3), block) for a, b, block in ran]
    phase.rows = sorted(rows.values(), key=lambda r: -(r.us or 0.0))
    phase.wall_us, phase.idle_us = covered - first, idle


def phases(
    events: Sequence[dict[str, Any]],
    steps: dict[str, int],
    launched: Collection[Launched] = (),
    *,
    strict: bool = False,
) -> list[Phase]:
    """The phases of a trace, each with its kernels.

    A kernel belongs to the phase in which the host launched it, or the graph that it is part of; where the trace does
    not say who launched it, to the last phase that began before it. What was launched outside of all phases is left
    out.

    Args:
        events: of the trace.
        steps: the phases that are expected, and how many forwards each has.
        launched, strict: see `origin_of`.
    """
    spans = _spans(events)
    calls = {
        e["args"]["correlation"]: e
        for e in _complete(events, _CALLS)
        if e.get("args", {}).get("correlation") is not None
    }
    by_phase: dict[str, list[_Event]] = {name: [] for name in steps}
    seen: set[Any] = set()
    for e in _complete(events, _WORK):
        args, start = e.get("args", {}), float(e["ts"])
        call = calls.get(args.get("correlation"))
        seen.add(args.get("correlation"))
        name = _within(spans, start, after=True) if call is None else _within(spans, float(call["ts"]))
        if name in by_phase:
            end = start + float(e.get("dur", 0.0))
            launch = "" if call is None else str(call["name"])
            by_phase[name].append(_Event(str(e["name"]), str(e["cat"]).lower(), start, end, args, launch))
    waits: Counter[str | None] = Counter()
    blind: Counter[str | None] = Counter()
    for e in _complete(events, _CALLS):
        name = _within(spans, float(e["ts"]))
        waits[name] += str(e["name"]) in _WAITS
        blind[name] += _GRAPH in str(e["name"]) and e.get("args", {}).get("correlation") not in seen
    found = []
    for name, n in steps.items():
        phase = Phase(name, n, waits=waits[name])
        if not any(e.category == "kernel" for e in by_phase[name]):
            phase.problems.append("the profiler saw no kernel")
        if blind[name]:
            phase.problems.append(f"of {blind[name]} replays of a graph the profiler saw no kernel")
        if by_phase[name]:
            _measure(phase, by_phase[name], launched, strict)
        found.append(phase)
    return found
