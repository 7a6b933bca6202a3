"""The ranks of a command: rank 0 is its own process, the others are started for it, and end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from rooftile import graphs, runtime
from rooftile.engine import ranks
from rooftile.engine.config import ModelConfig
from rooftile.engine.engine import Engine
from rooftile.engine.leading import follow
from rooftile.engine.split import Split

_GRACE = 5.0  # seconds in which a process may end by itself


def _device(rank: int) -> torch.device:
    device = runtime.default_device()
    return torch.device("cuda", rank) if device.type == "cuda" else device


def _begin(rank: int, n: int, store: str) -> None:
    ranks.begin(_device(rank), init_method=f"file://{store}", rank=rank, world_size=n)


def _end() -> None:
    graphs.reset_collective_graphs()
    ranks.end()


def _follow(index: int, n: int, store: str, model: Path | dict[str, Any], options: dict[str, Any]) -> None:
    """One of the other ranks. Rank 0 says when it ends; if that is killed, so is this."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C is rank 0's
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what torch.multiprocessing lets a process get when its parent ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager may send it to all
    _begin(index + 1, n, store)
    options = {"tensor_parallel": n, **options}
    if isinstance(model, dict):
        engine = Engine.from_config(model, **options)
    else:
        engine = Engine.from_pretrained(model, **options, progress=False)
    follow(engine)
    _end()


def _watch(processes: Any, ended: threading.Event) -> None:
    """End this process where another one has failed: it may wait for that one for ever."""
    try:
        while not processes.join(grace_period=_GRACE):
            pass
    except Exception as error:
        if not ended.wait(_GRACE):  # else it failed here, too
            print(f"rooftile: a rank of tensor parallelism has failed: {error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


@contextlib.contextmanager
def started(n: int, model: Path | dict[str, Any], options: dict[str, Any]) -> Iterator[None]:
    """The other ranks of n. Each loads `Engine.from_pretrained(model, tensor_parallel=n, **options)` and follows; of a
    configuration, `Engine.from_config`.

    The caller does the same, and then leads (`AsyncEngine`, or `leading`). If another rank fails, the process ends with
    exit code 1. For n = 1, nothing.

    Raises:
        ValueError: there are fewer GPUs, n does not divide a size of the model, or `torchrun` has started this process.
    """
    if n == 1:
        yield
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(f"Engine: tensor_parallel is {n}, and torchrun has started this process, expected no torchrun")
    if runtime.default_device().type == "cuda" and (gpus := torch.cuda.device_count()) < n:
        raise ValueError(f"Engine: tensor_parallel is {n}, expected at most the number of GPUs, {gpus}")
    Split(0, n).check(ModelConfig.from_hf(model))
    with tempfile.TemporaryDirectory() as folder:
        store, ended = f"{folder}/store", threading.Event()
        processes = torch.multiprocessing.start_processes(
            _follow, (n, store, model, options), n - 1, join=False, daemon=True, start_method="spawn"
        )
        watch = threading.Thread(target=_watch, args=(processes, ended), daemon=True)
        watch.start()
        grace = 1.0  # after an error: others may wait in the middle of a step
        try:
            _begin(0, n, store)
            yield
            ended.set()
            grace = _GRACE
            _end()
        finally:
            ended.set()
            watch.join(grace)
            if watch.is_alive():
                for process in processes.processes:
                    process.kill()
                watch.join()
