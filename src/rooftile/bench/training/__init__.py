"""`rooftile bench training`: the rows of results/<gpu>/training/, in parts that each fit into a short session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rooftile import runtime
from rooftile.bench import optim, run
from rooftile.bench.measure import Effort
from rooftile.bench.rows import TOGETHER
from rooftile.bench.training import convergence, plots, steps
from rooftile.cases import all_cases

SUITE = "training"
PARTS = ("losses", "optim", "steps", "convergence", "plots")
# Distillation is often in float32: log-probabilities near 0 have few digits in bfloat16.
FLOAT32_TOO = ("kl_div", "jsd")
SECONDS = 0.3  # of each implementation: ten calls of the slowest, and more


def losses(ops: Sequence[str], console: Console, results: Path | None, jobs: int | None, verbose: bool) -> int:
    """Forward and backward of each loss, or of those named, at the points of its set `training`.

    Returns 1 if a row of ours is wrong or raised, else 0.
    """
    known = [name for name, case in all_cases().items() if SUITE in case.sets]
    if unknown := sorted(set(ops) - set(known)):
        raise ValueError(f"unknown loss {', '.join(unknown)}; known losses: {', '.join(known)}")
    code = 0
    wanted = [name for name in known if name in ops or not ops]
    for float32 in (False, True):
        settings = run.Settings(
            ops=[name for name in wanted if (name in FLOAT32_TOO) == float32],
            sets=(SUITE,) if runtime.MODE is runtime.Mode.GPU else None,
            dtypes=(torch.bfloat16, torch.float32) if float32 else (torch.bfloat16,),
            directions=(TOGETHER,),
            effort=Effort(seconds=SECONDS),
            results=results,
            suite=SUITE,
            jobs=jobs,
            verbose=verbose,
            host=False,
        )
        if settings.ops:
            code |= run.run(settings, console)
    return code


def draw_all(console: Console, results: Path) -> None:
    """Draw again what the rows under that folder show. No GPU is needed."""
    for path in sorted(results.glob(f"*/{SUITE}/*.json")):
        for chart in plots.draw(path):
            console.print(str(chart), highlight=False, soft_wrap=True)
    for path in sorted(results.glob(f"*/{convergence.FOLDER}/*.json")):
        for chart in convergence.draw(path):
            console.print(str(chart), highlight=False, soft_wrap=True)


def run_parts(
    parts: Sequence[str], console: Console, results: Path | None = None, ops: Sequence[str] = (),
    jobs: int | None = None, verbose: bool = False, families: Sequence[str] = (), **of_steps: Any,
) -> int:  # fmt: skip
    """Run those parts, or without any those that the options are of, or else all that measure.

    `ops` are of `losses`, `families` of `convergence`, and `of_steps` go to `steps.run`.

    Returns 1 if a row of ours is wrong or raised, else 0.

    Raises:
        ValueError: a part, loss, family, model or implementation is not known, an option is of a part that is not
            run, plots have no results, or results or the largest batches are requested in the interpreter.
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ValueError(f"unknown part {', '.join(unknown)}; known parts: {', '.join(PARTS)}")
    given = {"losses": bool(ops), "steps": any(of_steps.values()), "convergence": bool(families)}
    asked = [part for part, has_options in given.items() if has_options]
    if parts and (idle := [part for part in asked if part not in parts]):
        raise ValueError(f"options of {', '.join(idle)} are given, but the parts to run are {', '.join(parts)}")
    wanted = parts or asked or PARTS[:-1]
    if of_steps.get("fit") and "steps" in wanted and runtime.MODE is not runtime.Mode.GPU:
        raise ValueError("--fit looks for the largest batches that fit into a GPU's memory, and there is no GPU")
    code = 0
    if "losses" in wanted:
        code |= losses(ops, console, results, jobs, verbose)
    if "optim" in wanted:
        code |= optim.run((), console, results)
    if "steps" in wanted:
        code |= steps.run(of_steps.pop("models", ()), of_steps.pop("impls", ()), console, results, **of_steps)
    if "convergence" in wanted:
        code |= convergence.run(families, console, results, jobs)
    if "plots" in wanted:
        if results is None:
            raise ValueError("plots are drawn from results; give --results")
        draw_all(console, results)
    return code
