"""Commands over results: measure the published ones again, or show earlier ones without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooftile.cli.common import Panel, command, console, needing_bench, require_charts

Results = Annotated[
    Path,
    typer.Option(
        "--results", metavar="DIR", exists=True, file_okay=False, help="Where results are kept, as in a clone."
    ),
]


@command(Panel.measure, "bench published")
def bench_published(
    suites: Annotated[list[str] | None, typer.Argument(help="Names of suites. Default: list them.")] = None,
    results: Annotated[
        Path, typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/<suite>/, as in results/.")
    ] = Path("results"),
) -> None:
    """Measure published suites on this GPU, each by its commands; without names, list suites and commands."""
    from rooftile.bench import published

    if not suites:
        published.show(console)
        return
    require_charts(results)
    try:
        code = published.run(suites, results, console)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SUITES") from None
    raise typer.Exit(code)


@command(Panel.measure)
def roofline(
    results: Results = Path("results"),
    out: Annotated[Path, typer.Option(metavar="DIR", file_okay=False, help="Write the charts here.")] = Path(),
) -> None:
    """Draw every measured kernel on the measured roofline of its GPU, as SVG and PNG, from earlier results."""
    from rooftile.bench import roofline

    try:
        with needing_bench():
            roofline.run(results, out, console)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--results") from None


@command(Panel.measure)
def report(
    results: Results = Path("results"),
    out: Annotated[Path, typer.Option(metavar="FILE", dir_okay=False, help="Write the page here.")] = Path(
        "report.html"
    ),
    check: Annotated[
        bool,
        typer.Option("--check", help="List rows older than their kernels instead; exit code 1 if there are any."),
    ] = False,
) -> None:
    """Write one HTML page of earlier results: tables that sort and filter, charts, machines and versions."""
    from rooftile.bench import page

    if check:
        raise typer.Exit(page.check(results, console))
    try:
        with needing_bench():
            page.run(results, out, console)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--results") from None
