"""Compile for targets without their GPUs: one process for each target, and a new one if a compiler failure ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

import torch

from rooftile.cases import Direction, OpCase, Point, all_cases
from rooftile.cases.check import NAMES
from rooftile.inspect.plan import Kernel, Row, Task, allowed_spills, faults
from rooftile.runtime import TARGETS


def environment(arch: str, cache: str) -> dict[str, str]:
    """The environment of a process that compiles for a target."""
    ours = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join(p for p in sys.path if p)
    # An empty cache, so that each compile time is of a real compilation.
    return {**ours, "ROOFTILE_COMPILE_TARGET": arch, "TRITON_CACHE_DIR": cache, "PYTHONPATH": path}


def _read(log: IO[bytes], start: int) -> str:
    return os.pread(log.fileno(), 1 << 20, start).decode(errors="replace")


def _ending(code: int, log: str) -> dict[str, Any]:
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"error": f"the compiler ended its process ({how})", "log": log.strip()[-20_000:], "kernels": []}


class Compilers:
    """Starts processes that compile, forked from one that has imported what they need, which takes seconds.

    Theirs is the environment in which this was made. To be closed.
    """

    def __init__(self) -> None:
        self._starts, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open until `close`
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "rooftile.inspect.worker"),
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=self._log,
                env=environment(next(iter(TARGETS)), ""),  # each fork is for a target of its own
            )

    def start(self, arch: str, cache: str, hashed: bool, connection: socket.socket, log: IO[bytes]) -> None:
        """Start one that reads tasks from the connection: see `rooftile.inspect.worker`."""
        message = json.dumps({"arch": arch, "cache": cache, "hashed": hashed}).encode()
        with contextlib.suppress(ConnectionError):  # it could not begin: `ending`
            socket.send_fds(self._starts, [message], [connection.fileno(), log.fileno()])

    def ending(self, log: IO[bytes]) -> dict[str, Any]:
        """The answer to a task that has none: this process has ended, or the one that it forked, whose log is given."""
        try:
            return _ending(self._process.wait(timeout=5), _read(self._log, 0))
        except subprocess.TimeoutExpired:
            return _ending(-signal.SIGKILL, _read(log, 0))  # what else could end it is answered

    def close(self) -> None:
        self._starts.close()
        self._process.wait()
        self._log.close()


class _Worker:
    """A process that compiles for a target, one task at a time, and puts the kernels into `kernels` by their hash."""

    def __init__(self, compilers: Compilers, arch: str, cache: str, kernels: dict[str, Kernel], hashed: bool) -> None:
        self._compilers = compilers
        self._kernels = kernels
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open until `close`
        self._connection, theirs = socket.socketpair()
        with theirs:
            compilers.start(arch, cache, hashed, theirs, self._log)
        self._answers = self._connection.makefile()

    def __call__(self, task: Task) -> dict[str, Any]:
        """The worker's answer, or how its process ended."""
        logged = 0
        with contextlib.suppress(ConnectionError):
            self._connection.sendall(json.dumps(task.as_json()).encode() + b"\n")
            for line in self._answers:
                fields = json.loads(line)
                if "begin" in fields:
                    logged = fields["begin"]
                elif "kernel" in fields:
                    kernel = Kernel(**fields["kernel"])
                    self._kernels.setdefault(kernel.hash, kernel)
                elif "ended" in fields:
                    return _ending(fields["ended"], _read(self._log, logged))
                else:
                    return fields
        return self._compilers.ending(self._log)

    def close(self) -> None:
        self._answers.close()
        self._connection.close()
        self._log.close()


def compile_on(
    arch: str,
    tasks: Iterable[Task],
    cases: Mapping[str, OpCase] | None = None,
    done: Callable[[], None] = lambda: None,
    hashed: bool = False,
    compilers: Compilers | None = None,
) -> list[Row]:
    """Compile those calls for a target in a separate process, and judge each kernel.

    Args:
        arch: a name in `rooftile.runtime.TARGETS`.
        tasks: see `plan`. The next is taken when the one before it is compiled.
        cases: the cases, with what they exclude and allow; all of Rooftile's by default.
        done: called after each task.
        hashed: whether to hash the machine code of each kernel.
        compilers: what starts the process; by default something of this call's own.

    Returns:
        One row for each op, direction, dtype and kernel; calls that failed come as rows with the verdict FAIL.
    """
    cases = all_cases() if cases is None else cases
    rows: list[Row] = []
    order: dict[str, int] = {}
    kernels: dict[str, Kernel] = {}
    uses: dict[tuple[str, str, str, str], list[str]] = {}
    failures: dict[tuple[str, str, str, str], list[str]] = {}
    logs: dict[tuple[str, str, str, str], str] = {}
    with tempfile.TemporaryDirectory() as cache, contextlib.ExitStack() as opened:
        worker: _Worker | None = None
        for task in tasks:
            excluded = cases[task.op].excluded.get(arch)
            if excluded and task.op not in order:
                rows.append(Row(arch, task.op, "", "", (), None, "excluded", excluded))
            order.setdefault(task.op, len(order))
            if excluded:
                continue
            if worker is None:
                compilers = compilers or opened.enter_context(contextlib.closing(Compilers()))
                worker = opened.enter_context(contextlib.closing(_Worker(compilers, arch, cache, kernels, hashed)))
            answer = worker(task)
            done()
            for direction, key in answer["kernels"]:
                uses.setdefault((task.op, direction, task.dtype, key), []).append(str(task.point))
            if "error" in answer:
                failure = (task.op, str(task.direction), task.dtype, str(answer["error"]))
                failures.setdefault(failure, []).append(str(task.point))
                logs.setdefault(failure, answer["log"])
    for failed, points in failures.items():
        op, direction, dtype, message = failed
        rows.append(Row(arch, op, direction, dtype, tuple(points), None, "FAIL", message, logs[failed]))
    for (op, direction, dtype, key), points in uses.items():
        found = faults(kernels[key], TARGETS[arch], allowed_spills(cases[op], kernels[key]))
        distinct = tuple(dict.fromkeys(points))
        rows.append(
            Row(arch, op, direction, dtype, distinct, kernels[key], "FAIL" if found else "PASS", "; ".join(found))
        )
    return sorted(rows, key=lambda r: (order[r.op], r.direction != "forward", r.kernel.name if r.kernel else ""))


def compile_case(
    case: OpCase,
    point: Point,
    dtype: torch.dtype = torch.bfloat16,
    direction: Direction = "forward",
    arch: str = "sm_90",
    source: str = "rooftile.cases",
) -> list[Row]:
    """The kernels of one call of a case on a target: `compile_case(case, case.sets["llm"][0])[0].kernel.registers`.

    `source` is the module whose `CASES` holds the case, if it is not Rooftile's.
    """
    return compile_on(arch, [Task(case.name, point, NAMES[dtype], direction, source)], {case.name: case})
