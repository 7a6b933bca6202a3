"""`rooftile audit --trace FILE.nsys-rep`: a timeline of the audited phases by Nsight Systems.

They run once more for it, in a process of their own under `nsys`: PyTorch's profiler and Nsight Systems can't record
the kernels of one process at a time.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rooftile.bench import profile
from rooftile.inspect.audit.profile import NSYS

if TYPE_CHECKING:
    from rooftile.inspect.audit import Settings


def find() -> str:
    """The path of `nsys`.

    Raises:
        ProfilerError: it is not on the PATH.
    """
    return profile.find_profiler(
        "nsys", f"Only Nsight Systems writes FILE{NSYS}; --trace FILE.json takes PyTorch's profiler."
    )


def command(nsys: str, report: Path, settings: Path) -> list[str]:
    """What is run. `nsys` records from cudaProfilerStart to cudaProfilerStop, and each kernel of a graph."""
    return [
        nsys, "profile", "--trace", "cuda,nvtx", "--sample", "none", "--cuda-graph-trace", "node",
        "--capture-range", "cudaProfilerApi", "--capture-range-end", "stop", "--output", str(report.with_suffix("")),
        sys.executable, "-m", "rooftile.inspect.audit.nsys", str(settings),
    ]  # fmt: skip


def record(nsys: str, s: Settings, trace: Path) -> None:
    """Write the report of the implementation that `s` asks for, by default the engine.

    Raises:
        ProfilerError: `nsys`, or the process under it, failed, or there is no report.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings, report = Path(folder) / "settings", Path(folder) / f"trace{NSYS}"
        settings.write_bytes(pickle.dumps(s))
        done = profile.start_profiler(command(nsys, report, settings))
        if done.returncode or not report.exists():
            raise profile.failure(f"nsys wrote no {trace}", done)
        trace.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(report, trace)


if __name__ == "__main__":
    from rooftile.inspect.audit import capture

    capture(pickle.loads(Path(sys.argv[1]).read_bytes()))
