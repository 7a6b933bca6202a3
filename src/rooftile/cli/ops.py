"""Commands over ops: check, bench, inspect and tune; and info."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, cast

import typer

from rooftile.cli.common import (
    DType,
    JsonFile,
    Ops,
    Panel,
    SetName,
    cases_of,
    choose_mode,
    command,
    console,
    has_gpu,
    names_of,
    refuse_absent,
    refused,
    require_charts,
)
from rooftile.errors import NoGPU


@command(Panel.measure)
def check(
    ops: Ops = None,
    sets: Annotated[
        list[SetName] | None,
        typer.Option("--set", help="Points to check; repeatable. Default: tiny and edge, and on a GPU llm."),
    ] = None,
    dtypes: Annotated[list[DType] | None, typer.Option("--dtype", help="Repeatable. Default: all.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write the rows to this file.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", dir_okay=False, help="Also write the rows to this file.")
    ] = None,
) -> None:
    """Check every op against its float64 reference, forward and backward. Exit code 1 if any row fails."""
    choose_mode()
    cases = cases_of(ops)
    from rooftile.cases import check_report
    from rooftile.cases.check import DTYPES

    names = [s.value for s in sets] if sets else list(check_report.default_sets())
    refuse_absent(cases, names)
    rows = check_report.check_all(cases, names, [DTYPES[d.value] for d in dtypes] if dtypes else None, console)
    check_report.show(rows, console)
    if json_file is not None:
        check_report.write_json(rows, json_file)
    if csv_file is not None:
        check_report.write_csv(rows, csv_file)
    if not all(row.passed for row in rows):
        raise typer.Exit(1)


class DirectionName(str, enum.Enum):
    forward = "forward"
    backward = "backward"
    both = "both"
    together = "forward+backward"


@command(Panel.measure)
def bench(
    ops: Ops = None,
    sets: Annotated[
        list[SetName] | None,
        typer.Option(
            "--set",
            help="Points to measure; repeatable. Default: llm. The interpreter takes tiny, its default, and edge.",
        ),
    ] = None,
    dtypes: Annotated[list[DType] | None, typer.Option("--dtype", help="Repeatable. Default: bf16.")] = None,
    direction: Annotated[DirectionName, typer.Option(help="What to time; both: each alone.")] = DirectionName.both,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="Baselines by name: eager, compile, and the op's own, such as torch, liger, quack, fa4, cudnn, cuda; "
            "another name lists them. Repeatable, or with commas. Default: all but cuda, which bench twins has."
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Most warm-up passes.")] = 50,
    iters: Annotated[int, typer.Option(min=1, help="Most measured passes of each implementation.")] = 200,
    seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="Device time of each implementation, in 20 passes or more and within --iters; 0: exactly --warmup "
            "and --iters passes.",
        ),
    ] = 0.05,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", dir_okay=False, help="Also write the rows to this file.")
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write a chart of each op and direction here.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/<suite>/<op>.json, as in results/."),
    ] = None,
    suite: Annotated[str, typer.Option(help="The suite's name under --results.")] = "rowwise",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Keep the points that --results has of this commit and machine, and measure the others."
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that compile in advance; 0 for none. Default: by the amount of work."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print a line for each point, and where the time went.")
    ] = False,
    host: Annotated[
        bool,
        typer.Option("--host", help="Measure the host time of a call instead, beside the PyTorch op that it replaces."),
    ] = False,
) -> None:
    """Measure ops against their baselines and the GPU's roofs. Rows are checked first; exit code 1 if ours fails."""
    choose_mode()
    from rooftile.bench.measure import Effort
    from rooftile.bench.rows import EACH, Measured
    from rooftile.bench.run import Settings, run
    from rooftile.cases.check import DTYPES

    if host:
        from rooftile.bench import host_ops

        try:
            code = host_ops.run(ops or (), console, results, json_file)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        raise typer.Exit(code)
    cases = cases_of(ops, "bench")
    require_charts(plot, results if results and any(case.over for case in cases) else None)
    directions = EACH if direction is DirectionName.both else (cast(Measured, direction.value),)
    settings = Settings(
        ops=tuple(ops or ()),
        sets=[s.value for s in sets] if sets else None,
        dtypes=[DTYPES[d.value] for d in dtypes] if dtypes else None,
        directions=directions,
        peers=names_of(peers),
        effort=Effort(warmup=warmup, iters=iters, seconds=seconds),
        csv=csv_file,
        json=json_file,
        plot=plot,
        results=results,
        suite=suite,
        resume=resume,
        jobs=jobs,
        verbose=verbose,
    )
    try:
        code = run(settings, console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@command(Panel.measure, "bench schedules")
def bench_schedules(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="linear, int8_linear, int4_linear. Default: all.", show_default=False),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/schedules/<name>.json.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes that compile in advance; 0 for none.")] = 12,
) -> None:
    """Compare the schedules and kernels that can run one GEMM. Each is checked before it is timed."""
    choose_mode()
    from rooftile.bench.schedules import run

    try:
        code = run(names or (), console, results, jobs=jobs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@command(Panel.measure, "bench twins")
def bench_twins(
    ops: Annotated[
        list[str] | None,
        typer.Argument(help="rms_norm, rope, silu_mul, softmax. Default: all.", show_default=False),
    ] = None,
    dtypes: Annotated[list[DType] | None, typer.Option("--dtype", help="Repeatable. Default: bf16.")] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/twins/<op>.json.")
    ] = None,
    json_file: JsonFile = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print a line for each point, and where the time went.")
    ] = False,
) -> None:
    """Compare ops with the same ops in hand-written CUDA C++, compiled here. Exit code 1 if ours fails."""
    choose_mode()
    from rooftile.bench.twins.compare import compare
    from rooftile.cases.check import DTYPES

    chosen = [DTYPES[d.value] for d in dtypes] if dtypes else None
    try:
        code = compare(ops or (), console, chosen, results, json_file, verbose)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@command(Panel.measure, "bench optim")
def bench_optim(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Lists of parameters, such as 50M or Llama-3.2-1B. Default: all.", show_default=False),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/training/adamw.json.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Time a step of AdamW over a list of parameters beside torch.optim.AdamW. Exit code 1 if ours fails."""
    choose_mode()
    from rooftile.bench.optim import run

    try:
        code = run(names or (), console, results, json_file)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@command(Panel.measure, "bench training")
def bench_training(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help="losses, optim, steps, convergence, plots. Default: those of the options, or all that measure.",
            show_default=False,
        ),
    ] = None,
    ops: Annotated[
        list[str] | None, typer.Option("--op", help="Losses by name; repeatable, or with commas. Default: all.")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Of steps: llama-3.2-1b, qwen3-0.6b, gemma-3-1b, llama-3-8b-lora, tiny, tiny-lora; repeatable, or "
            "with commas. Default: the first, and in the interpreter tiny.",
        ),
    ] = None,
    impls: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            help='Of steps: eager, compile, liger, rooftile, "rooftile attention", "rooftile attention linear", '
            '"rooftile compile", and for adapters "rooftile lora", "rooftile attention linear lora"; repeatable, or '
            'with commas. Default: eager, compile, liger, rooftile, "rooftile attention linear", for adapters also '
            "the last two, and in the interpreter eager and rooftile.",
        ),
    ] = None,
    families: Annotated[
        list[str] | None,
        typer.Option(
            "--family",
            help="Of convergence: modules of transformers such as llama or qwen2_moe, and llama-3.2-1b; repeatable, or "
            "with commas. Default: all, and in the interpreter llama.",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a step. Default: by the model.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of a sequence. Default: 4096.")] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Find the largest batches in 16 and 24 GiB and in all memory instead."),
    ] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Record the memory of one step too.")] = False,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/training/: JSON and charts.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes that compile in advance, 0 for none; of convergence, those that train. Default: by the "
            "amount of work.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print a line for each point, and where the time went.")
    ] = False,
) -> None:
    """Measure training: losses forward and backward, AdamW, and steps of whole models; train models of all families.

    Results are checked; exit code 1 if ours fails.

    plots draws the charts of earlier results again, without a GPU.
    """
    choose_mode()
    require_charts(results)
    from rooftile.bench.training import run_parts

    try:
        code = run_parts(
            parts or (),
            console,
            results,
            names_of(ops) or (),
            jobs,
            verbose,
            families=names_of(families) or (),
            models=names_of(models) or (),
            impls=names_of(impls) or (),
            batch=batch,
            tokens=tokens,
            fit=fit,
            timeline=timeline,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@command(Panel.develop)
def sanitize(
    ops: Ops = None,
    tools: Annotated[
        list[str] | None,
        typer.Option("--tool", help="memcheck, racecheck, synccheck; repeatable, or with commas. Default: all."),
    ] = None,
    sets: Annotated[
        list[SetName] | None, typer.Option("--set", help="Points to check; repeatable. Default: tiny.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="The most time of one op under one tool.")] = 300.0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time. Default: half of the cores.")] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/sanitizer/checks.json.")
    ] = None,
) -> None:
    """Run the checks of every op under NVIDIA's compute-sanitizer. Exit code 1 if it finds an error."""
    if not has_gpu():
        raise typer.BadParameter("sanitize needs a GPU; without one, the interpreter checks the bounds of every access")
    from rooftile.bench.sanitize import run

    try:
        code = run(
            ops, names_of(tools) or (), [s.value for s in sets or (SetName.tiny,)], console,
            results=results, limit=seconds, jobs=jobs,
        )  # fmt: skip
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@command(Panel.measure)
def profile(
    op: Annotated[str, typer.Argument(help="The op, as in `rooftile check`.")],
    shape: Annotated[
        str | None,
        typer.Option(
            help="The shape's name, such as 16384x4096, or a part that no other has. Default: the first of its llm set."
        ),
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Of the inputs.")] = DType.bf16,
    backward: Annotated[bool, typer.Option("--backward", help="Profile the backward.")] = False,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/profile/: the bytes moved.")
    ] = None,
) -> None:
    """Count in each kernel of one call of an op, by Nsight Compute: occupancy, DRAM bytes, L2 hits, stalls.

    Needs a GPU, and ncu on the PATH. The bytes stand beside the least that the op must move.
    """
    if not has_gpu():
        raise typer.BadParameter("profile needs a GPU; `rooftile inspect` shows registers and spills without one")
    from rooftile.bench.profile import ProfilerError, run
    from rooftile.cases.check import DTYPES

    try:
        code = run(op, shape, DTYPES[dtype.value], "backward" if backward else "forward", console, results)
    except ProfilerError as error:
        raise refused("profile", error) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@command(Panel.run)
def info(
    roofs: Annotated[bool, typer.Option(help="Measure the GPU's roofs; takes a few seconds.")] = True,
) -> None:
    """Print the GPU, versions, mode, installed baselines and measured roofs."""
    from rich.table import Table

    from rooftile.bench.info import lines

    table = Table(show_header=False)
    for what, value in lines(roofs):
        table.add_row(what, value)
    console.print(table)


@command(Panel.develop)
def inspect(
    ops: Ops = None,
    archs: Annotated[
        list[str] | None,
        typer.Option(
            "--arch", help="Target: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 or gfx942; repeatable. Default: sm_90."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Compile every op for every target.")] = False,
    sets: Annotated[
        list[SetName] | None,
        typer.Option("--set", help="Points to compile; repeatable. Default: tiny and all sets of real sizes."),
    ] = None,
    first: Annotated[
        bool,
        typer.Option(
            "--first",
            help="Only the first point of each set of real sizes; beside it only tiny points with other tensors.",
        ),
    ] = False,
    dtypes: Annotated[list[DType] | None, typer.Option("--dtype", help="Repeatable. Default: all.")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            dir_okay=False,
            help="Also write the rows to this file, with hashes of the machine code.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="List kernels whose machine code differs from this --json file.",
        ),
    ] = None,
    renamed: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="For --against: JSON object from old op names to new ones.",
        ),
    ] = None,
    most_seconds: Annotated[
        float | None,
        typer.Option(
            "--max-compile-seconds", metavar="N", min=0, help="Fail kernels that take more processor time to compile."
        ),
    ] = None,
) -> None:
    """Compile every kernel for a target, without a GPU. Show registers, spills, shared memory and compile time.

    Tuned tables are used only if ROOFTILE_TUNING_GPU names a GPU, such as ROOFTILE_TUNING_GPU=h200.

    Exit code 1 if a kernel does not compile, spills more than its case allows, exceeds the limits of a CTA, or takes
    more than --max-compile-seconds.
    """
    from rooftile import runtime

    if everything and (ops or archs):
        raise typer.BadParameter(
            "compiles every op for every target; it takes no ops and no --arch", param_hint="--all"
        )
    chosen = list(dict.fromkeys(archs or ["sm_90"])) if not everything else list(runtime.TARGETS)
    unknown = [arch for arch in chosen if arch not in runtime.TARGETS]
    if unknown:
        raise typer.BadParameter(
            f"unknown target {', '.join(unknown)}; known targets: {', '.join(runtime.TARGETS)}", param_hint="--arch"
        )
    cases = cases_of(ops)
    from rooftile.cases.check import DTYPES
    from rooftile.inspect import compare, report
    from rooftile.inspect.plan import SETS

    try:
        earlier = compare.read(against) if against else None
        new_names = compare.read_renamed(renamed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    names = [s.value for s in sets] if sets else list(SETS)
    chosen_dtypes = [DTYPES[d.value] for d in dtypes] if dtypes else None
    refuse_absent(cases, names)
    hashed = json_file is not None or against is not None
    rows = report.inspect_all(cases, chosen, console, names, chosen_dtypes, hashed, first)
    if most_seconds is not None:
        rows = report.limited(rows, most_seconds)
    report.show(rows, console)
    if json_file is not None:
        report.write_json(rows, json_file)
    if earlier is not None:
        now = report.as_json(rows)
        for note in compare.notes(earlier["meta"], now["meta"]):
            console.print(note, style="yellow", highlight=False)
        try:
            compared = compare.compare(earlier["rows"], now["rows"], new_names)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--against") from None
        console.print(str(compared), markup=False, highlight=False, soft_wrap=True)
    if any(row.verdict == "FAIL" for row in rows):
        raise typer.Exit(1)


@command(Panel.develop)
def tune(
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="NAME|PATH", help="llama-3-8b, granite-8b-code, qwen2.5-7b, ...; or a config.json."
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option("--shape", metavar="M,N,K", help="x (M, K) times a weight (N, K); repeatable.")
    ] = None,
    rows: Annotated[
        list[int] | None,
        typer.Option("--m", min=1, help="Rows of x for --model; repeatable. Default: 1, 2, 4, ... to 4096."),
    ] = None,
    dtypes: Annotated[list[DType] | None, typer.Option("--dtype", help="Repeatable. Default: bf16.")] = None,
    precision: Annotated[str, typer.Option(help="Precision of float32 GEMMs: ieee or tf32.")] = "ieee",
    ops: Annotated[
        list[str] | None,
        typer.Option("--op", help="linear, gated_linear, matmul_nn (dx), matmul_tn (dw). Default: linear."),
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds in all. Default: no limit.")] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Try all configurations, not only the likely ones.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/<op>.json instead of the user's own table."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also measure shapes that the table already has.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile in advance. Default: by the number of cores.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print a line for each GEMM, and where the time went.")
    ] = False,
) -> None:
    """Search for the fastest launch configurations. Each is checked before it is timed. Later calls use the results."""
    if not os.environ.get("TRITON_INTERPRET") and not has_gpu():
        raise refused("tune", NoGPU("there is no GPU here to measure on"))
    from rooftile.bench.tune import Settings, run
    from rooftile.bench.tune.problems import parse_shape
    from rooftile.cases.check import DTYPES

    try:
        settings = Settings(
            models=tuple(models or ()),
            shapes=[parse_shape(text) for text in shapes or ()],
            rows=rows,
            dtypes=[DTYPES[d.value] for d in dtypes] if dtypes else None,
            precision=precision,
            ops=tuple(names_of(ops) or ("linear",)),
            budget=budget,
            exhaustive=exhaustive,
            out=out,
            again=again,
            jobs=jobs,
            verbose=verbose,
        )
        code = run(settings, console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)
