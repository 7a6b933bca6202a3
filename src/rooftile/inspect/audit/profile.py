"""An implementation of a model, run phase by phase: on a GPU under a profiler, else with its calls recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rooftile import launching
from rooftile.inspect.audit import trace as audit_trace
from rooftile.inspect.audit.calls import Recorder
from rooftile.inspect.audit.kernels import Launched, source_of
from rooftile.inspect.audit.trace import MARK, Phase

from triton.runtime.jit import JITFunction  # isort: skip

NSYS = ".nsys-rep"  # the suffix of a report of Nsight Systems
# PyTorch's own remedy for graphs under the profiler: CUPTI is neither taken down nor set up again.
_CUPTI = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}


@dataclasses.dataclass(frozen=True)
class Part:
    """What is run for a phase: `before` belongs to none, and `steps` is how many forwards `run` has.

    `problems` says, after a run, why it proves nothing.
    """

    name: str
    run: Callable[[], Any]
    steps: int = 1
    before: Callable[[], Any] = lambda: None
    problems: Callable[[], list[str]] = list


def _launched(compiled: Any) -> Launched | None:
    source = source_of(getattr(compiled.src, "fn", None))
    if source is None:
        return None
    metadata = compiled.metadata
    warp = getattr(getattr(metadata, "target", None), "warp_size", 32)
    return Launched(source, metadata.num_warps * warp, int(metadata.shared), int(getattr(compiled, "n_regs", 0) or 0))


@contextlib.contextmanager
def told() -> Iterator[list[Any]]:
    """The compiled kernels that Rooftile launches meanwhile, once each; those that a graph captures among them."""
    stock_run, stock_start = JITFunction.run, launching.start_compiled
    found: dict[int, Any] = {}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = stock_run(self, *args, **kwargs)
        if compiled is not None:
            found.setdefault(id(compiled), compiled)
        return compiled

    def start(compiled: Any, programs: int, device: int, args: tuple[Any, ...]) -> None:
        found.setdefault(id(compiled), compiled)
        stock_start(compiled, programs, device, args)

    JITFunction.run, launching.start_compiled = run, start
    kernels: list[Any] = []
    try:
        with launching.observed():
            yield kernels
    finally:
        JITFunction.run, launching.start_compiled = stock_run, stock_start
        kernels += found.values()


def _ready(build: Callable[[], Sequence[Part]]) -> Sequence[Part]:
    """The parts, after two runs of each: kernels are compiled then, and graphs recorded, those of prompts in the second
    run."""
    parts = build()
    for part in (*parts, *parts):
        part.before()
        part.run()
    torch.cuda.synchronize()
    return parts


def _run(parts: Sequence[Part], mark: Callable[[str], contextlib.AbstractContextManager[Any]]) -> None:
    """Run the parts, each within `mark` of its name."""
    for part in parts:
        part.before()
        torch.cuda.synchronize()
        with mark(MARK + part.name):
            part.run()
        torch.cuda.synchronize()


def captured(build: Callable[[], Sequence[Part]]) -> None:
    """Run what `build` makes for a profiler around this process: between cudaProfilerStart and cudaProfilerStop, each
    phase in an NVTX range."""
    parts = _ready(build)
    with torch.cuda.profiler.profile():
        _run(parts, torch.cuda.nvtx.range)


def profiled(build: Callable[[], Sequence[Part]], trace: Path | None, *, strict: bool) -> list[Phase]:
    """The phases of what `build` makes, as PyTorch's profiler saw them on the GPU.

    Args:
        trace: where the profiler's trace is written, for Perfetto.
        strict: only what Rooftile's launchers launched counts as Rooftile's.
    """
    for name, value in _CUPTI.items():
        os.environ.setdefault(name, value)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with told() as kernels:
        parts = _ready(build)
        with torch.profiler.profile(activities=activities) as profiler:
            _run(parts, torch.profiler.record_function)
    launched = [k for compiled in kernels if (k := _launched(compiled)) is not None]
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        events = audit_trace.load(path)
    found = audit_trace.phases(events, {p.name: p.steps for p in parts}, launched, strict=strict)
    return _with_problems(found, parts)


def recorded(build: Callable[[], Sequence[Part]]) -> list[Phase]:
    """The phases of what `build` makes, as their launches and ops of PyTorch are in Triton's interpreter."""
    recorder, parts = Recorder(), build()
    for part in parts:
        part.before()
        with recorder.phase(part.name, part.steps):
            part.run()
    return _with_problems(recorder.phases(), parts)


def _with_problems(phases: list[Phase], parts: Sequence[Part]) -> list[Phase]:
    for phase, part in zip(phases, parts, strict=True):
        phase.problems += part.problems()
    return phases
