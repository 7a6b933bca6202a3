"""`python -m rooftile.demo`: ops checked, models plain and patched, training and generation, on one page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rooftile.cli import choose_mode, console

if TYPE_CHECKING:  # they import Triton, whose mode is not chosen yet
    from rooftile.cases.case import OpCase
    from rooftile.cases.check import CheckRow

NEW = 64  # tokens that the 8B model generates
WIDTH = 112  # of the page, where the output is no terminal
COLUMNS = 2  # of families, beside each other


def family_of(case: OpCase) -> str:
    """The file that holds the case."""
    return case.inputs.__module__.rpartition(".")[2]


def worst(rows: Sequence[CheckRow]) -> float:
    """The largest error as a fraction of its tolerance."""
    return max(row.error / row.tolerance if row.tolerance else float(row.error > 0) for row in rows)


def show_families(cases: Sequence[OpCase], rows: Sequence[CheckRow], page: Console) -> None:
    """One entry for each family of ops: its checks, and the largest error as a fraction of the tolerance."""
    families: dict[str, list[str]] = {}
    for case in cases:
        families.setdefault(family_of(case), []).append(case.name)
    entries = []
    for family, names in families.items():
        own = [row for row in rows if row.op in names]
        failed = sum(not row.passed for row in own)
        verdict = f"[bold red]{failed} FAIL[/]" if failed else "[green]PASS[/]"
        entries.append((family, str(len(own)), f"{worst(own):.2f}", verdict))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for _ in range(COLUMNS):
        table.add_column("  family", no_wrap=True)
        table.add_column("checks", justify="right")
        table.add_column("error", justify="right")
        table.add_column("")
    lines = -(-len(entries) // COLUMNS)
    for i in range(lines):
        cells = entries[i::lines]
        table.add_row(*(cell for family, *others in cells for cell in (f"  {family}", *others)))
    page.print(table)


def check_ops(page: Console, details: Console) -> bool:
    """Every op against its reference in float64, in bfloat16 at small sizes. True if all checks pass."""
    import torch

    from rooftile.bench import warm
    from rooftile.cases import check_report, find_cases
    from rooftile.cases.check import calls

    cases, sets, dtypes = find_cases(), ("tiny",), (torch.bfloat16,)
    tasks = [warm.Task(c.name, *call, peers=()) for c in cases for call in calls(c, sets, dtypes)]
    if jobs := warm.default_jobs(len(tasks)):
        warm.warm(tasks, jobs)
    rows = check_report.check_all(cases, sets, dtypes, details)
    check_report.show(rows, details)
    passed = sum(row.passed for row in rows)
    page.print(
        f"\n[bold]Ops[/]: {passed}/{len(rows)} checks passed; {len(cases)} ops against float64 references, forward and "
        "backward, bf16\n  error: the largest, as a fraction of its tolerance",
        highlight=False,
    )
    show_families(cases, rows, page)
    return passed == len(rows)


def compare_models(page: Console, details: Console) -> bool:
    """Hugging Face models on the shipped text, plain and patched. True if each is as exact as the plain one."""
    import torch

    from rooftile import runtime
    from rooftile.demo.compare import compare, show, show_short, text
    from rooftile.huggingface.small_models import MODELS

    tokens = text(96, runtime.default_device())
    compared = [compare(model, tokens, dtype=torch.bfloat16) for model in MODELS]
    show(compared, tokens.shape[1], details)
    show_short(compared, tokens.shape[1], page)
    return all(c.passed for c in compared)


def measure(page: Console, details: Console, results: Path) -> bool:
    """The rows of the README's first table that take the least time, measured here. True if no row fails."""
    import shutil

    from rooftile.bench import e2e, training
    from rooftile.bench.docs import headline
    from rooftile.bench.e2e import paths
    from rooftile.bench.training.worker import EAGER, LIGER, OURS, OURS_ALL

    shutil.rmtree(results, ignore_errors=True)  # an earlier demo's
    code = training.run_parts(
        ("steps",), details, results, models=(headline.TRAINED,), impls=(EAGER, LIGER, OURS, OURS_ALL)
    )
    size = {"models": (headline.MODEL,), "batches": (1,), "prompt": headline.PROMPT, "new": NEW, "seconds": 1.0}
    for quantize, impls in (
        (None, (paths.OURS, paths.CUDA, paths.HF)),
        ("fp8", (paths.OURS,)),
        ("int4", (paths.OURS,)),
    ):
        code |= e2e.run(e2e.Settings(**size, impls=impls, quantize=quantize, results=results), details)  # type: ignore[arg-type]
    page.print("\n[bold]Whole models[/], measured here", highlight=False)
    headline.show(headline.figures(results, NEW), page)
    return code == 0


def main(
    details: Annotated[Path, typer.Option(metavar="FILE", dir_okay=False, help="Where every row is written.")] = Path(
        "build/demo/details.txt"
    ),
    results: Annotated[
        Path, typer.Option(metavar="DIR", file_okay=False, help="On a GPU: where the measurements are written.")
    ] = Path("build/demo/results"),
) -> None:
    """Check every op, run Hugging Face models with and without Rooftile, train, and generate text.

    On a GPU, also measure whole models. Exit code 1 if a difference is over its bound or a check fails.
    """
    choose_mode()
    from rooftile import runtime
    from rooftile.demo.generation import show_text
    from rooftile.demo.train import show_training

    since = time.perf_counter()
    real = runtime.MODE is runtime.Mode.GPU
    page = console if console.is_terminal else Console(width=WIDTH)
    details.parent.mkdir(parents=True, exist_ok=True)
    with details.open("w", encoding="utf-8") as file:
        rest = Console(file=file, width=200)
        right = check_ops(page, rest)
        right &= compare_models(page, rest)
        right &= show_training(page)
        right &= show_text(page, 64 if real else 24)
        if real:
            right &= measure(page, rest, results)
    page.print(
        f"\n{time.perf_counter() - since:.0f} s; every row is in {details}\n"
        "Next: rooftile check (more sizes and dtypes), "
        f"rooftile {'bench (every op)' if real else 'inspect (compile for seven GPUs)'}, README.md, docs/",
        highlight=False,
    )
    if not right:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
