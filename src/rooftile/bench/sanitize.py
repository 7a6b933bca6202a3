"""`rooftile sanitize`: NVIDIA's compute-sanitizer over the checks of every op, one process for each op and tool.

memcheck finds accesses out of bounds and misaligned ones, with PyTorch's caching allocator off, so that each tensor is
an allocation of its own; racecheck finds races in shared memory; synccheck finds barriers that not all threads reach.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from rooftile.bench.info import machine, may_join
from rooftile.bench.rows import gpu_slug, write_whole
from rooftile.cases import find_cases

TOOLS = ("memcheck", "racecheck", "synccheck")
SUITE = "sanitizer"
FOUND = 86  # the exit code that the sanitizer is told to give if it finds an error
Status = Literal["ok", "errors", "failed", "timeout"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one tool says of one op. `"failed"`: the tool, or the check itself, did not run to the end.

    `message` is the first error, or the last line of output.
    """

    op: str
    tool: str
    status: Status
    seconds: float
    message: str = ""


def command(sanitizer: str, tool: str, op: str, sets: Sequence[str]) -> list[str]:
    check = [sys.executable, "-m", "rooftile", "check", op, "--dtype", "bf16"]
    return [
        sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "3", *check,
        *(word for name in sets for word in ("--set", name)),
    ]  # fmt: skip


def run_one(sanitizer: str, tool: str, op: str, sets: Sequence[str], limit: float) -> Verdict:
    """Run the checks of an op under a tool, for at most `limit` seconds."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    since = time.perf_counter()
    try:
        done = subprocess.run(
            command(sanitizer, tool, op, sets),
            capture_output=True, text=True, timeout=limit, check=False, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Verdict(op, tool, "timeout", limit, f"not done after {limit:.0f} s")
    seconds = time.perf_counter() - since
    lines = [line.removeprefix("=========").strip() for line in (done.stdout + done.stderr).splitlines()]
    if done.returncode == 0:
        return Verdict(op, tool, "ok", seconds)
    if done.returncode == FOUND:
        first = next((x for x in lines if re.match(r"(Invalid|Race|Error|Barrier|Misaligned|Program hit)", x)), "")
        return Verdict(op, tool, "errors", seconds, first[:300])
    said = [line for line in lines if line]
    return Verdict(op, tool, "failed", seconds, f"exit code {done.returncode}: {said[-1] if said else ''}"[:300])


def run_all(
    sanitizer: str, ops: Sequence[str], tools: Sequence[str], sets: Sequence[str], limit: float, jobs: int
) -> Iterator[Verdict]:
    """The verdicts, as they come."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        work = [pool.submit(run_one, sanitizer, tool, op, sets, limit) for tool in tools for op in ops]
        for done in concurrent.futures.as_completed(work):
            yield done.result()


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """A line for each op; then what was found."""
    tools = list(dict.fromkeys(v.tool for v in verdicts))
    by_op: dict[str, dict[str, Verdict]] = {}
    for v in verdicts:
        by_op.setdefault(v.op, {})[v.tool] = v
    table = Table("op", *tools)
    styles = {"ok": "green", "errors": "bold red", "failed": "yellow", "timeout": "yellow"}
    for op, found in sorted(by_op.items()):
        cells = (found.get(tool) for tool in tools)
        table.add_row(
            op, *("–" if v is None else f"[{styles[v.status]}]{v.status}[/] {v.seconds:.0f} s" for v in cells)
        )
    console.print(table)
    for v in verdicts:
        if v.status != "ok":
            console.print(f"{v.op} {v.tool}: {v.status}: {v.message}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{sum(v.status == 'ok' for v in verdicts)}/{len(verdicts)} ok", highlight=False)


def _earlier(path: Path, meta: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a file to which this run may add: those of the same machine, commit and sets."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        joins = may_join(meta, before["meta"], ("sets",))
    except (OSError, ValueError, KeyError):
        return {}
    return {(row["op"], row["tool"]): row for row in before["rows"]} if joins else {}


def run(
    ops: Sequence[str] | None, tools: Sequence[str], sets: Sequence[str], console: Console, *,
    results: Path | None = None, limit: float = 300.0, jobs: int | None = None,
) -> int:  # fmt: skip
    """Sanitize those ops, or all; write `results/<gpu>/sanitizer/checks.json`.

    Returns 1 if a tool found an error, or if none ran to its end, else 0.

    Raises:
        ValueError: an op or a tool is not known.
        FileNotFoundError: compute-sanitizer is not installed.
    """
    if unknown := sorted(set(tools) - set(TOOLS)):
        raise ValueError(f"unknown tool {', '.join(unknown)}; known tools: {', '.join(TOOLS)}")
    names = [case.name for case in find_cases(list(ops) if ops else None)]
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise FileNotFoundError("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    meta: dict[str, Any] = {**machine(), "suite": SUITE, "sets": list(sets)}
    verdicts: list[Verdict] = []
    path = results and results / gpu_slug(str(meta["gpu"])) / SUITE / "checks.json"
    kept = _earlier(path, meta) if path else {}
    # Half of the cores: a sanitizer's process has threads of its own.
    for v in run_all(sanitizer, names, tools or TOOLS, sets, limit, jobs or max(1, (os.cpu_count() or 2) // 2)):
        verdicts.append(v)
        if path is not None:
            kept[v.op, v.tool] = dataclasses.asdict(v)
            rows = [row for _, row in sorted(kept.items())]
            write_whole(path, json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    show(verdicts, console)
    return int(any(v.status == "errors" for v in verdicts) or not any(v.status == "ok" for v in verdicts))
