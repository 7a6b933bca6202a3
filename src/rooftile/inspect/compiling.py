"""Compile for targets without their GPUs: one process for each target, and a new one if a compiler failure ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def _ending(code: int, log: str) -> dict[str, Any]:
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"error": f"the compiler ended its process ({how})", "log": log.strip()[-20_000:], "kernels": []}


def _answers(
    tasks: Sequence[Task], arch: str, cache: str, done: Callable[[], None], hashed: bool
) -> tuple[list[dict[str, Any]], dict[str, Kernel]]:
    """One worker's answers, one for each task it reached. If it did not reach all, the last one says how it ended."""
    answers: list[dict[str, Any]] = []
    kernels: dict[str, Kernel] = {}
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile("w+") as questions:
        questions.writelines(json.dumps(task.as_json()) + "\n" for task in tasks)
        questions.seek(0)
        command = (sys.executable, "-m", "rooftile.inspect.worker", *(["--hashed"] if hashed else []))
        with subprocess.Popen(
            command, stdin=questions, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(arch, cache)
        ) as process:
            assert process.stdout is not None
            begun = None
            for line in process.stdout:
                fields = json.loads(line)
                if "begin" in fields:
                    begun = fields["logged"]
                elif "kernel" in fields:
                    kernel = Kernel(**fields["kernel"])
                    kernels[kernel.hash] = kernel
                else:
                    answers.append(fields)
                    done()
        if len(answers) < len(tasks):
            log.seek(begun or 0)
            ending = _ending(process.returncode, log.read().decode(errors="replace"))
            # A worker that could not start would fail with the next task too.
            ended = 1 if begun is not None else len(tasks)
            answers += [ending] * ended
            for _ in range(ended):
                done()
    return answers, kernels


def compile_on(
    arch: str,
    tasks: Sequence[Task],
    cases: Mapping[str, OpCase] | None = None,
    done: Callable[[], None] = lambda: None,
    hashed: bool = False,
) -> list[Row]:
    """Compile those calls for a target in a separate process, and judge each kernel.

    Args:
        arch: a name in `rooftile.runtime.TARGETS`.
        tasks: see `plan`.
        cases: the cases, with what they exclude and allow; all of Rooftile's by default.
        done: called after each task.
        hashed: whether to hash the machine code of each kernel.

    Returns:
        One row for each op, direction, dtype and kernel; calls that failed come as rows with the verdict FAIL.
    """
    cases = all_cases() if cases is None else cases
    rows: list[Row] = []
    for op in dict.fromkeys(t.op for t in tasks if arch in cases[t.op].excluded):
        rows.append(Row(arch, op, "", "", (), None, "excluded", cases[op].excluded[arch]))
    left = [t for t in tasks if arch not in cases[t.op].excluded]
    kernels: dict[str, Kernel] = {}
    uses: dict[tuple[str, str, str, str], list[str]] = {}
    failures: dict[tuple[str, str, str, str], list[str]] = {}
    logs: dict[tuple[str, str, str, str], str] = {}
    with tempfile.TemporaryDirectory() as cache:
        while left:
            answers, compiled = _answers(left, arch, cache, done, hashed)
            kernels = {**compiled, **kernels}
            for task, answer in zip(left, answers, strict=False):
                for direction, key in answer["kernels"]:
                    uses.setdefault((task.op, direction, task.dtype, key), []).append(str(task.point))
                if "error" in answer:
                    failure = (task.op, str(task.direction), task.dtype, str(answer["error"]))
                    failures.setdefault(failure, []).append(str(task.point))
                    logs.setdefault(failure, answer["log"])
            left = left[len(answers) :]
    for failed, points in failures.items():
        op, direction, dtype, message = failed
        rows.append(Row(arch, op, direction, dtype, tuple(points), None, "FAIL", message, logs[failed]))
    for (op, direction, dtype, key), points in uses.items():
        found = faults(kernels[key], TARGETS[arch], allowed_spills(cases[op], kernels[key]))
        distinct = tuple(dict.fromkeys(points))
        rows.append(
            Row(arch, op, direction, dtype, distinct, kernels[key], "FAIL" if found else "PASS", "; ".join(found))
        )
    order = list(dict.fromkeys(t.op for t in tasks))
    return sorted(rows, key=lambda r: (order.index(r.op), r.direction != "forward", r.kernel.name if r.kernel else ""))


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
