"""The machine: the GPU, its driver, versions, the mode of the process, installed baselines."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import rooftile
from rooftile import runtime
from rooftile.bench.sources import DIRTY, UNKNOWN, hashes

PEERS = {
    "torch": "torch",
    "liger": "liger-kernel",
    "quack": "quack-kernels",
    "torchao": "torchao",
    "fa4": "flash-attn-4",
    "flashinfer": "flashinfer-python",
    "cuda": "nvidia-cuda-nvrtc",
}


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str, cwd: Path | None = None) -> str | None:
    """The first line that a command prints, or None where it can't be run or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or None if done.returncode == 0 else None


def gpu() -> str | None:
    """The accelerator's name, or None."""
    device = runtime.accelerator()
    return None if device is None else str(torch.get_device_module(device.type).get_device_name(device))


def driver() -> str | None:
    """The GPU driver's version, or None."""
    if runtime.accelerator() is None:
        return None
    return (
        _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        or _output("modinfo", "-F", "version", "amdgpu")
        or UNKNOWN
    )


def commit() -> str:
    """ROOFTILE_COMMIT if set, else git's HEAD in a checkout; with "-dirty" if files differ."""
    root = Path(__file__).resolve().parents[3]
    if name := os.environ.get("ROOFTILE_COMMIT"):
        return name
    head = _output("git", "rev-parse", "HEAD", cwd=root) if (root / ".git").exists() else None
    if head and _output("git", "status", "--porcelain", "--untracked-files=no", cwd=root):
        head += DIRTY
    return head or UNKNOWN


# What two runs must have in common for their rows to share a file.
SAME = ("gpu", "driver", "torch", "triton", "rooftile", "commit", "python", "peers")


def may_join(meta: Mapping[str, Any], before: Mapping[str, Any], also: Sequence[str]) -> bool:
    """Whether a run with that metadata may add rows to such a file: machine, versions, known commit and the named
    fields are the same."""
    known = meta["commit"] != UNKNOWN and not meta["commit"].endswith(DIRTY)
    return known and all(before.get(name) == meta[name] for name in (*SAME, *also))


def mode() -> str:
    if runtime.MODE is runtime.Mode.INTERPRETER:
        return "interpreter: kernels run on the CPU, exactly and slowly"
    if runtime.MODE is runtime.Mode.COMPILE:
        return f"compile only, for {os.environ['ROOFTILE_COMPILE_TARGET']}"
    return "GPU" if runtime.accelerator() is not None else "none: no GPU, and TRITON_INTERPRET is not set"


def machine() -> dict[str, Any]:
    """The metadata of every result file, except the roofs."""
    interpreted = runtime.MODE is runtime.Mode.INTERPRETER
    return {
        "gpu": None if interpreted else gpu(),
        "driver": None if interpreted else driver(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "rooftile": rooftile.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "peers": {name: version(distribution) for name, distribution in PEERS.items()},
        "definitions": hashes(),
    }


def check_results(results: Path | None, measures: bool) -> None:
    """Raise ValueError if --results is given to a run that is no measurement, or whose commit is not known."""
    if results is None:
        return
    if not measures:
        raise ValueError("--results is for measurements, and the interpreter makes none; use --json")
    if commit() == UNKNOWN:
        raise ValueError("--results records the measured commit, which is unknown here; set ROOFTILE_COMMIT to it")


def lines(roofs: bool = True) -> list[tuple[str, str]]:
    """What `rooftile info` shows, as (what, value)."""
    device = runtime.accelerator()
    found = [("gpu", gpu() or "none"), ("mode", mode())]
    if device is not None and runtime.MODE is runtime.Mode.GPU:
        target = runtime.target(device)
        size = f"{target.multiprocessors} SMs, {target.l2 / 2**20:.0f} MiB of L2"
        found += [("architecture", f"{target.arch}, {size}"), ("driver", driver() or UNKNOWN)]
    found += [("rooftile", f"{rooftile.__version__}, commit {commit()}"), ("python", platform.python_version())]
    found += [("torch", torch.__version__), ("triton", version("triton") or "not installed")]
    found += [(f"peer {name}", version(d) or "absent") for name, d in PEERS.items()]
    for name in ("transformers", "matplotlib"):
        found.append((name, version(name) or "not installed"))
    if not roofs or runtime.MODE is not runtime.Mode.GPU or device is None:
        found.append(
            ("roofs", "not measured: " + ("no GPU" if device is None else "not asked for, or the interpreter"))
        )
        return found

    from rooftile.bench.roof import measure_roofs
    from rooftile.bench.timer import clock

    measured = measure_roofs(clock(device), device)
    gemms = ", ".join(f"{dtype} {tflops:.0f} TFLOP/s" for dtype, tflops in measured.gemms.items())
    return [
        *found,
        ("copy roof", f"{measured.copy_gbs:.0f} GB/s, read plus written"),
        ("read roof", f"{measured.read_gbs:.0f} GB/s"),
        ("GEMM roof", f"{gemms}, 8192 x 8192 x 8192"),
    ]
