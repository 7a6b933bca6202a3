"""`python -m rooftile.inspect.worker`: imports what compiling takes, once, and forks a process for each target.

Each message on the socket that is its standard input starts one: {"arch": target, "cache": folder of Triton's cache,
"hashed": whether to hash the machine code of each kernel}, with the descriptors of a socket and of a file.

From the socket the fork reads one JSON task a line. For each task it writes JSON lines: {"begin": bytes of the file},
then {"kernel": {...}} for each new kernel, then {"kernels": [[direction, hash], ...]}, with "error" and "log" where it
failed. What is printed goes to the file. Some compiler failures abort the process: then {"ended": exit code} takes the
place of the last line, and another fork has the next task.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import itertools
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rooftile import runtime
from rooftile.cases import Direction, OpCase, all_cases
from rooftile.cases.check import DTYPES, as_tuple
from rooftile.inspect import driver
from rooftile.inspect.plan import Kernel, Task
from rooftile.inspect.resources import resources

from triton.runtime import cache  # isort: skip

# The slowest known kernel takes seconds; one that takes this long will not finish.
_TASK_SECONDS = 300


class _Recorder:
    """Keeps each launched kernel once, and the hashes that the running task used."""

    def __init__(self, hashed: bool) -> None:
        self.hashed = hashed
        self.kernels: dict[str, Kernel] = {}
        self.fresh: list[Kernel] = []
        self.used: dict[tuple[Direction, str], None] = {}
        self.direction: Direction = "forward"

    def launched(self, compiled: Any, seconds: float) -> None:
        if compiled.hash not in self.kernels:
            kernel = _kernel(compiled, 1e3 * seconds, self.hashed)
            self.kernels[compiled.hash] = kernel
            self.fresh.append(kernel)
        self.used[self.direction, compiled.hash] = None


def _kernel(compiled: Any, compile_ms: float, hashed: bool) -> Kernel:
    src, metadata = compiled.src, compiled.metadata
    names = src.fn.arg_names
    constants = {names[k[0]]: v for k, v in src.constants.items() if len(k) == 1}
    divisible = {names[k[0]] for k, attrs in src.attrs.items() if len(k) == 1 and ["tt.divisibility", 16] in attrs}
    return Kernel(
        hash=compiled.hash,
        name=src.fn.__name__,
        constants={n: v if isinstance(v, int | float | str | None) else str(v) for n, v in constants.items()},
        signature={n: t + (":16" if n in divisible else "") for n, t in src.signature.items() if t != "constexpr"},
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        num_ctas=getattr(metadata, "num_ctas", 1),
        threads=metadata.num_warps * metadata.target.warp_size,
        compile_ms=round(compile_ms, 2),
        **dataclasses.asdict(resources(compiled, hashed)),
    )


def _find(task: Task) -> OpCase:
    if task.source == "rooftile.cases":
        return all_cases()[task.op]
    return next(c for c in importlib.import_module(task.source).CASES if c.name == task.op)


def _run(case: OpCase, task: Task, inputs: dict[str, Tensor], grads: list[str], recorder: _Recorder) -> None:
    leaves = {n: t.detach().requires_grad_(n in grads) for n, t in inputs.items()}
    given = {n: t.clone() if n in case.mutates else t for n, t in leaves.items()}
    recorder.direction = "forward"
    outputs = as_tuple(case.function(**given, **task.point.options))
    if grads:
        recorder.direction = "backward"
        torch.autograd.grad(outputs, [leaves[n] for n in grads], [torch.empty_like(o) for o in outputs])


def _call(task: Task, recorder: _Recorder) -> None:
    case = _find(task)
    inputs = case.inputs(task.point, DTYPES[task.dtype], torch.device("meta"), torch.Generator())
    grads = [n for n in case.grads if n in inputs] if task.direction == "backward" else []
    try:
        # Deterministic gradients, which PyTorch makes on request, have their own kernels.
        modes = (False, True) if grads and case.deterministic == "asked" else (False,)
        for deterministic in modes:
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            _run(case, task, inputs, grads, recorder)
    finally:
        torch.use_deterministic_algorithms(False)
    used = any(direction == task.direction for direction, _ in recorder.used)
    if not used and all(t.numel() for t in inputs.values()):  # else there may be nothing to compute
        raise RuntimeError("no kernel was launched")


def _import_all() -> None:
    """What the first kernel of a process imports, and the hash of Triton itself that names each kernel."""
    all_cases()
    torch.use_deterministic_algorithms(False)  # imports Inductor
    importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    getattr(cache, "triton_key", lambda: None)()


def _compile(start: dict[str, Any], tasks: Iterable[str], answer: Callable[..., None]) -> None:
    """Answer those tasks."""
    os.environ.update(ROOFTILE_COMPILE_TARGET=start["arch"], TRITON_CACHE_DIR=start["cache"])
    runtime._FIXED = runtime.TARGETS[start["arch"]]
    recorder = _Recorder(start["hashed"])
    driver.install(runtime.target(torch.device("meta")), recorder.launched)
    for line in tasks:
        logged = os.fstat(2).st_size
        answer(begin=logged)
        recorder.used, recorder.fresh = {}, []
        error = {}
        faulthandler.dump_traceback_later(_TASK_SECONDS, exit=True)
        try:
            _call(Task.from_json(json.loads(line)), recorder)
        except Exception as e:
            sys.stdout.flush()
            printed = os.pread(2, 20_000, logged).decode(errors="replace")
            error = {"error": f"{type(e).__name__}: {e}", "log": printed}
        faulthandler.cancel_dump_traceback_later()
        for kernel in recorder.fresh:
            answer(kernel=dataclasses.asdict(kernel))
        answer(kernels=list(recorder.used), **error)


def _forked(function: Callable[..., None], *args: Any) -> int:
    """The id of a process that calls the function and ends."""
    if child := os.fork():
        return child
    code = 1
    try:
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(start: dict[str, Any], connection: int, log: int) -> None:
    """Have each task compiled by a process, and by a new one if a compiler failure has ended it."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # else who asks for starts would not see that nobody reads them
    os.dup2(log, 1)  # the output of Triton and its tools
    os.dup2(log, 2)
    with socket.socket(fileno=connection) as both:
        tasks, answers = both.makefile(), both.makefile("w")

        def answer(**fields: Any) -> None:
            print(json.dumps(fields), file=answers, flush=True)

        for line in tasks:  # a task comes when the one before it is answered, so nothing else has been read
            _, status = os.waitpid(_forked(_compile, start, itertools.chain([line], tasks), answer), 0)
            with contextlib.suppress(OSError):  # nobody reads it if there was no task left
                answer(ended=os.waitstatus_to_exitcode(status))


def main() -> None:
    _import_all()
    # Triton makes and frees hundreds of thousands of objects; searching them for cycles takes a tenth of the time.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    forks = []
    with socket.socket(fileno=0) as starts:
        while True:
            message, descriptors, *_ = socket.recv_fds(starts, 1 << 16, 2)
            if not message:
                break
            forks.append(_forked(_serve, json.loads(message), *descriptors))
            for descriptor in descriptors:
                os.close(descriptor)
    for fork in forks:  # their processor time is this one's, too
        os.waitpid(fork, 0)


if __name__ == "__main__":
    main()
