"""`python -m rooftile.demo`: models on real text, plain and patched; the engine; every op checked and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooftile.cli import choose_mode, console


def main(
    results: Annotated[
        Path, typer.Option(metavar="DIR", file_okay=False, help="On a GPU: where <gpu>/prefill/ is written.")
    ] = Path("results"),
) -> None:
    """Run Hugging Face models on real text with and without Rooftile, generate text, check every op, and measure.

    Exit code 1 if a difference is over its bound or a check fails.
    """
    choose_mode()
    import torch

    from rooftile import runtime
    from rooftile.bench import prefill, warm
    from rooftile.bench.measure import Effort
    from rooftile.bench.run import Settings, run
    from rooftile.cases import check_report, find_cases
    from rooftile.cases.check import calls
    from rooftile.demo.compare import compare, show, text
    from rooftile.demo.engine import show_engine
    from rooftile.demo.models import MODELS

    real = runtime.MODE is runtime.Mode.GPU
    device = runtime.default_device()
    tokens = text(2048 if real else 96, device)
    sizes = "real sizes" if real else "tiny models, since kernels run in Triton's CPU interpreter"
    console.print(f"Rooftile's demo: {sizes}.", highlight=False)

    compared = []
    for model in MODELS:
        console.print(f"{model.title} ...", highlight=False)
        compared.append(compare(model, tokens, real=real, dtype=torch.bfloat16))
        if real:
            torch.get_device_module(device.type).empty_cache()
    show(compared, tokens.shape[1], console)
    right = all(c.passed for c in compared)

    right &= show_engine(console)

    console.print("\nEvery op against its reference in float64:", highlight=False)
    # One dtype, at small sizes: real ones are checked below, before they are timed, and all by `rooftile check`.
    cases, sets, dtypes = find_cases(), ("tiny",), (torch.bfloat16,)
    tasks = [warm.Task(c.name, *call, peers=()) for c in cases for call in calls(c, sets, dtypes)]
    if jobs := warm.default_jobs(len(tasks)):
        console.print(f"compiling in {jobs} processes ...", highlight=False)
        warm.warm(tasks, jobs)
    rows = check_report.check_all(cases, sets, dtypes, console)
    check_report.show(rows, console)
    right &= all(row.passed for row in rows)

    console.print("\nEvery op beside PyTorch:", highlight=False)
    effort = Effort(seconds=0.02)
    right &= run(Settings(peers=("eager", "torch"), directions=("forward",), effort=effort), console) == 0

    console.print("\nA whole model:", highlight=False)
    right &= prefill.run(prefill.Settings(results=results if real else None), console) == 0
    if not right:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
