"""Commands of the engine: `generate`, and `audit`, which lists its kernels and their origin."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from rooftile.cli.common import (
    NAMED,
    CacheType,
    Deterministic,
    DType,
    Panel,
    QuantizeName,
    SpeculateName,
    TensorParallel,
    choose_mode,
    command,
    console,
    notices,
    refused,
    require_charts,
    speculation_of,
)


@command(Panel.run)
def generate(
    path: Annotated[str, typer.Argument(help="A checkpoint folder, an id on the Hugging Face Hub, or `demo`.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Repeatable; prompts run as one batch. Default: all of standard input."),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text as it is generated; several prompts in sequence.")
    ] = False,
    quantize: Annotated[QuantizeName, typer.Option(help="Quantize the weights of the GEMMs.")] = QuantizeName.none,
    dtype: Annotated[DType, typer.Option(help="Type of activations and of other weights.")] = DType.bf16,
    kv_dtype: CacheType = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a prompt and its text. Default: as many as needed.")
    ] = None,
    speculate: SpeculateName = None,
    deterministic: Deterministic = False,
    tensor_parallel: TensorParallel = 1,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most new tokens for each prompt. Default: 128, or as many as there is room for."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many of the most likely tokens; 0 is no limit.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens that reach this probability together.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Exclude tokens less likely than this fraction of the most likely one.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, earlier tokens become less likely.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after an end-of-text token.")] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="List each token with its log-probability, on standard error.")
    ] = False,
) -> None:
    """Continue prompts and report the speed: tokens/s, ms a step, GB/s, fraction of the roof, time to the first token.

    Each prompt and its text go to standard output, everything else to standard error.
    """
    import sys

    if not prompts and sys.stdin.isatty():
        raise typer.BadParameter(
            "no prompt given, and standard input is a terminal: give a text, or pipe one", param_hint="--prompt"
        )
    source = "a prompt" if prompts else "standard input"
    try:
        prompts = prompts or [sys.stdin.read().removesuffix("\n")]
        for text in prompts:
            text.encode()
    except UnicodeError as error:
        raise typer.BadParameter(f"{source} is no UTF-8: {error}", param_hint="--prompt") from None
    if prompts == [""]:
        raise typer.BadParameter(f"{source} is empty, expected a text", param_hint="--prompt")
    choose_mode()
    from rooftile.bench.generate import CACHES, Settings, run
    from rooftile.cases.check import DTYPES

    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }
    settings = Settings(
        path=path,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        stream=stream,
        quantize=quantize.kind,
        dtype=DTYPES[dtype.value],
        kv_dtype=None if kv_dtype is None else CACHES[kv_dtype.value],
        max_seq_len=max_seq_len,
        stop=stop or (),
        speculate=speculation_of(speculate),
        deterministic=deterministic,
        tensor_parallel=tensor_parallel,
        sampling=sampling,
    )
    try:
        code = run(settings, console, notices)
    except (ValueError, TypeError, OSError) as error:
        raise refused("generate", error) from None
    raise typer.Exit(code)


class ImplName(str, enum.Enum):
    """What `audit` runs, as in `rooftile.inspect.audit.IMPLS`; repeated here so that --help needs no PyTorch."""

    engine = "engine"
    serve = "serve"
    cuda = "cuda"
    patched = "patched"


@command(Panel.develop)
def audit(
    path: Annotated[
        Path | None, typer.Argument(exists=True, help="A checkpoint folder. Default: random weights.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help=f"{NAMED}; or a config.json. Weights are random. Default: llama-3-8b, and in the interpreter tiny.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each prompt. Default: 512, and in the interpreter 12.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of decoding. Default: 8, and in the interpreter 2.")
    ] = None,
    quantize: Annotated[QuantizeName, typer.Option(help="Quantize the engine's weights.")] = QuantizeName.none,
    dtype: Annotated[DType, typer.Option(help="Type of activations and of other weights.")] = DType.bf16,
    impl: Annotated[
        ImplName | None,
        typer.Option(
            help="engine; serve: an AsyncEngine with requests that overlap; cuda: the same model with cuBLAS, SDPA and "
            "torch.compile, which does not pass; patched: Hugging Face's model after rooftile.patch, compiled; the "
            "Triton kernels that Inductor generates from the model's own code are accepted, and listed as such. "
            "Default: engine, and on a GPU cuda beside it."
        ),
    ] = None,
    speculate: SpeculateName = None,
    tensor_parallel: TensorParallel = 1,
    layers: Annotated[int | None, typer.Option(min=1, help="Keep only the first layers of the model.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Write the trace of PyTorch's profiler, for Perfetto; or to FILE.nsys-rep a report of Nsight Systems, "
            "for which the phases run once more under nsys.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Draw a decoding step, kernel by kernel, in SVG."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write every kernel to this file.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/audit/: every kernel, and a timeline."),
    ] = None,
) -> None:
    """List every GPU kernel of prefill and decode. Exit code 1 if one that computes is not a Triton kernel of Rooftile.

    Copies and memsets are listed. Without a GPU, launches and PyTorch ops are recorded in the interpreter.
    """
    choose_mode()
    if path is not None and model is not None:
        raise typer.BadParameter("a checkpoint folder names its model: give one of the two", param_hint="--model")
    require_charts(timeline, results)
    from rooftile import runtime
    from rooftile.bench.profile import ProfilerError
    from rooftile.cases.check import DTYPES
    from rooftile.inspect.audit import Settings, run

    on_gpu = runtime.MODE is runtime.Mode.GPU
    settings = Settings(
        model=str(path) if path else model or ("llama-3-8b" if on_gpu else "tiny"),
        weights=path,
        impl=impl.value if impl else None,
        batch=batch,
        prompt=prompt or (512 if on_gpu else 12),
        steps=steps or (8 if on_gpu else 2),
        quantize=quantize.kind,
        speculate=speculation_of(speculate),
        tensor_parallel=tensor_parallel,
        dtype=DTYPES[dtype.value],
        layers=layers,
        trace=trace,
        timeline=timeline,
        json=json_file,
        results=results,
    )
    try:
        code = run(settings, console)
    except ProfilerError as error:
        raise refused("audit", error, code=error.code) from None
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)
